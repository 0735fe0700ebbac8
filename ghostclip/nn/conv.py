"""Convolutions, transposed or not (Lee & Kifer 2020, section 5.2): over patches they are linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ghostclip.norms.convolution import ConvGrads, Geometry
from ghostclip.norms.term import Dense, PerExampleGrads, to_float32

from .base import GhostLayer, LayerCall, is_capturing, missing_batch_dimension

__all__ = ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]


class _Convolution(GhostLayer):
    """Images have B in dimension 0, channels in 1. What torch.nn.modules.conv._ConvNd has, for the type checker."""

    padding_mode: Any
    padding: Any
    stride: Any
    dilation: Any
    groups: int
    weight: Tensor
    _reversed_padding_repeated_twice: list[int]


class _ConvNd(_Convolution):
    """The rule all three share."""

    def example_dims(self, call: LayerCall) -> Sequence[int]:
        return (0,)

    def forward(self, input: Tensor) -> Tensor:
        if is_capturing() and input.dim() != self.weight.dim():
            raise missing_batch_dimension(self, input, self.weight.dim())
        return self.capture(super().forward(input), input)

    def per_example(self, name: str, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        grad = grad.movedim(call.batch_dim, 0)
        if name == "bias":
            return Dense(to_float32(grad).flatten(2).sum(2))
        images, padding = inputs[0].movedim(call.batch_dim, 0), self.padding
        if self.padding_mode != "zeros" or isinstance(padding, str):
            amounts = self._reversed_padding_repeated_twice
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            images, padding = F.pad(images, amounts, mode=mode), (0,) * len(self.stride)
        return ConvGrads(images, grad, self.weight.shape, Geometry(self.stride, padding, self.dilation, self.groups))


class Conv1d(_ConvNd, torch.nn.Conv1d, wraps=torch.nn.Conv1d):
    """`torch.nn.Conv1d` that can be clipped; every stride, padding, padding mode, dilation and group count."""


class Conv2d(_ConvNd, torch.nn.Conv2d, wraps=torch.nn.Conv2d):
    """`torch.nn.Conv2d` that can be clipped; every stride, padding, padding mode, dilation and group count."""


class Conv3d(_ConvNd, torch.nn.Conv3d, wraps=torch.nn.Conv3d):
    """`torch.nn.Conv3d` that can be clipped; every stride, padding, padding mode, dilation and group count."""


class _ConvTransposeNd(_Convolution):
    """The rule all three share: a transposed convolution is the backward of a convolution.

    So the gradient of its weight is that of the convolution which takes the gradient at its output as images, and its
    input as the gradient.
    """

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if is_capturing() and input.dim() != self.weight.dim():
            raise missing_batch_dimension(self, input, self.weight.dim())
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
