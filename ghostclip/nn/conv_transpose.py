"""Transposed convolutions: convolutions whose input and gradient have changed places.

A transposed convolution is the backward of a convolution, so the gradient of its weight is that of the convolution
which takes the gradient at its output as images, and its input as the gradient (Lee & Kifer 2020, section 5.2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ghostclip.errors import UnsupportedModelError
from ghostclip.norms.convolution import ConvGrads, Geometry
from ghostclip.norms.term import Dense, PerExampleGrads, to_float32

from .base import GhostLayer, LayerCall, is_capturing, place_of

__all__ = ["ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]


class _ConvTransposeNd(GhostLayer):
    """The rule all three share; images have B in dimension 0, channels in 1."""

    # What torch.nn.modules.conv._ConvNd has, for the type checker.
    padding: Any
    stride: Any
    dilation: Any
    groups: int
    weight: Tensor

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if is_capturing() and input.dim() != self.weight.dim():
            raise UnsupportedModelError(
                f"{place_of(self)} got an input of shape {list(input.shape)} without a batch dimension; "
                f"add one: {self.weight.dim()} dimensions, examples first"
            )
        return self.capture(super().forward(input, output_size), input, batch_dim=0)

    def per_example(self, name: str, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        if name == "bias":
            return Dense(to_float32(grad).flatten(2).sum(2))
        images, padding = self._as_images(grad, inputs[0].shape[2:])
        return ConvGrads(
            images, inputs[0], self.weight.shape, Geometry(self.stride, padding, self.dilation, self.groups)
        )

    def _as_images(self, grad: Tensor, positions: torch.Size) -> tuple[Tensor, tuple[int, ...]]:
        """Gradients as images from which a convolution makes just ``positions``, and the padding that is left to do."""
        axes = range(len(positions))
        reach = [self.dilation[axis] * (self.weight.shape[2 + axis] - 1) + 1 for axis in axes]
        whole = [self.stride[axis] * (positions[axis] - 1) + reach[axis] - 2 * self.padding[axis] for axis in axes]
        beyond = [grad.shape[2 + axis] - whole[axis] for axis in axes]
        if all(beyond[axis] < self.stride[axis] for axis in axes):
            return grad, self.padding
        # Output padding of a stride or more (torch allows it up to the dilation) would make positions that weren't.
        amounts = [side for axis in reversed(axes) for side in (self.padding[axis], self.padding[axis] - beyond[axis])]
        return F.pad(grad, amounts), (0,) * len(positions)


class ConvTranspose1d(_ConvTransposeNd, torch.nn.ConvTranspose1d, wraps=torch.nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` that can be clipped; every stride, padding, dilation, group count and output size."""


class ConvTranspose2d(_ConvTransposeNd, torch.nn.ConvTranspose2d, wraps=torch.nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` that can be clipped; every stride, padding, dilation, group count and output size."""


class ConvTranspose3d(_ConvTransposeNd, torch.nn.ConvTranspose3d, wraps=torch.nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` that can be clipped; every stride, padding, dilation, group count and output size."""
