"""Linear layers (Goodfellow 2015; Lee & Kifer 2020, section 5.1).

dL_i/dW = sum_t dz[i,t] (x) x[i,t] and dL_i/db = sum_t dz[i,t], over the positions t of example i.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ghostclip.norms.affine import LinearPair
from ghostclip.norms.outer import OuterProduct
from ghostclip.norms.term import Dense, PerExampleGrads, to_float32

from .base import GhostLayer, LayerCall, is_capturing

__all__ = ["Linear", "examples_first", "summed_positions"]


def examples_first(tensor: Tensor, batch_dim: int) -> Tensor:
    """[..., B at batch_dim, ..., features] as [B, T, features], positions flattened."""
    tensor = tensor.movedim(batch_dim, 0) if batch_dim else tensor
    return tensor.unsqueeze(1) if tensor.dim() == 2 else tensor.flatten(1, -2)


def summed_positions(grad: Tensor) -> Dense:
    """The term of a bias: grad [B, T, p] summed over positions."""
    return Dense(grad.squeeze(1) if grad.shape[1] == 1 else to_float32(grad).sum(1))


class Linear(GhostLayer, torch.nn.Linear, wraps=torch.nn.Linear):
    """`torch.nn.Linear` that can be clipped; any number of positions between the examples and the features."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() == 1 and is_capturing():  # one example of a loop over them
            return self.forward(input.unsqueeze(0)).squeeze(0)
        return self.capture(super().forward(input), input)

    def example_dims(self, call: LayerCall) -> Sequence[int]:
        return range(len(call.shape) - 1)

    def linear_pair(self, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> LinearPair | None:
        return LinearPair(grad, inputs[0], call.parameters) if grad.dim() == 2 else None

    def per_example(self, name: str, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        grad = examples_first(grad, call.batch_dim)
        if name == "bias":
            return summed_positions(grad)
        return OuterProduct(grad, examples_first(inputs[0], call.batch_dim), self.weight.shape)
