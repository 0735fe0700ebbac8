"""Bilinear layers: z[o] = x1^T W[o] x2 + b[o], so dL_i/dW[o] = sum_t dz[i,t,o] x1[i,t] (x) x2[i,t]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ghostclip.norms.outer import OuterProduct
from ghostclip.norms.term import PerExampleGrads, to_float32

from .base import GhostLayer, LayerCall
from .linear import examples_first, summed_positions

__all__ = ["Bilinear"]


class Bilinear(GhostLayer, torch.nn.Bilinear, wraps=torch.nn.Bilinear):
    """`torch.nn.Bilinear` that can be clipped; any number of positions between the examples and the features."""

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        return self.capture(super().forward(input1, input2), input1, input2)

    def example_dims(self, call: LayerCall) -> Sequence[int]:
        return range(len(call.shape) - 1)

    def per_example(self, name: str, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        grad = examples_first(grad, call.batch_dim)
        if name == "bias":
            return summed_positions(grad)
        first, second = (to_float32(examples_first(tensor, call.batch_dim)) for tensor in inputs)
        outputs, width1, width2 = self.weight.shape
        # An outer product of two sides, one of which is itself an outer product: the smaller one is multiplied out.
        if outputs * width1 + width2 <= outputs + width1 * width2:
            return OuterProduct(_products(to_float32(grad), first), second, self.weight.shape)
        return OuterProduct(grad, _products(first, second), self.weight.shape)


def _products(left: Tensor, right: Tensor) -> Tensor:
    """Outer products at every position: [B, T, p] and [B, T, d] to [B, T, p * d]."""
    return (left.unsqueeze(3) * right.unsqueeze(2)).flatten(2)
