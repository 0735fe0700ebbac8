"""Rules for layers of transformers that torch doesn't have; `wrap` imports this on meeting a module of transformers.

Norms need no rule here: followed through the graph they cost a step at most 4% more (Llama, Gemma, Qwen3, ConvNeXt).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import pytorch_utils

from ghostclip.nn.base import LAYERS, GhostLayer, LayerCall
from ghostclip.nn.linear import Linear, examples_first, summed_positions
from ghostclip.norms.outer import OuterProduct
from ghostclip.norms.term import PerExampleGrads

__all__ = ["Conv1D", "register"]

# Subclasses of a torch layer that write its forward anew, and mean the same.
SAME_AS = {"transformers.models.falcon.modeling_falcon.FalconLinear": Linear}


class Conv1D(GhostLayer, pytorch_utils.Conv1D, wraps=pytorch_utils.Conv1D):
    """GPT-2's linear layer, whose weight is [inputs, outputs]: dL_i/dW = sum_t x[i,t] (x) dz[i,t]."""

    weight: torch.nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        return self.capture(super().forward(x), x)

    def example_dims(self, call: LayerCall) -> Sequence[int]:
        return range(len(call.shape) - 1)

    def per_example(self, name: str, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        grad = examples_first(grad, call.batch_dim)
        if name == "bias":
            return summed_positions(grad)
        return OuterProduct(examples_first(inputs[0], call.batch_dim), grad, self.weight.shape)


def register(found: type) -> None:
    """Gives ``found`` a wrapper, where it is a class of transformers that has a rule by its name."""
    same = SAME_AS.get(f"{found.__module__}.{found.__qualname__}")
    if same is not None and found not in LAYERS:
        content = {"__module__": found.__module__, "__doc__": found.__doc__}
        type(found.__name__, (same, found), content, wraps=found)
