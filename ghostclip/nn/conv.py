"""Convolutions (Lee & Kifer 2020, section 5.2): over patches they are linear layers, see norms/convolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ghostclip.errors import UnsupportedModelError
from ghostclip.norms.convolution import ConvGrads, Geometry
from ghostclip.norms.term import Dense, PerExampleGrads, to_float32

from .base import GhostLayer, LayerCall, is_capturing, place_of

__all__ = ["Conv1d", "Conv2d", "Conv3d"]


class _ConvNd(GhostLayer):
    """The rule all three share; images have B in dimension 0, channels in 1."""

    # What torch.nn.modules.conv._ConvNd has, for the type checker.
    padding_mode: Any
    padding: Any
    stride: Any
    dilation: Any
    groups: int
    weight: Tensor
    _reversed_padding_repeated_twice: list[int]

    def forward(self, input: Tensor) -> Tensor:
        if is_capturing() and input.dim() != self.weight.dim():
            raise UnsupportedModelError(
                f"{place_of(self)} got an input of shape {list(input.shape)} without a batch dimension; "
                f"add one: {self.weight.dim()} dimensions, examples first"
            )
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
