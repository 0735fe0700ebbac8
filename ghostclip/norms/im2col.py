"""Patches of images as the columns or rows of a matrix, with which a convolution is a linear layer.

(Lee & Kifer 2020, section 5.2; Chellapilla et al. 2006.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .memory import FRESH, Memory

__all__ = ["Geometry", "patches", "rows_of_patches"]


@dataclass(frozen=True)
class Geometry:
    """What a convolution does besides multiplying: all tuples have one entry a spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def patches(
    images: Tensor, kernel: tuple[int, ...], output: tuple[int, ...], geometry: Geometry, memory: Memory = FRESH
) -> Tensor:
    """im2col: images [B, C, *S] to [B, C * prod(kernel), prod(output)], by one strided view and one copy."""
    images = _padded(images, geometry).contiguous()
    steps = images.stride()[2:]
    view = images.as_strided(
        (*images.shape[:2], *kernel, *output),
        (*images.stride()[:2], *_times(steps, geometry.dilation), *_times(steps, geometry.stride)),
    )
    if not view.is_contiguous():
        view = memory.empty(view, *view.shape).copy_(view)
    return view.view(images.shape[0], images.shape[1] * math.prod(kernel), math.prod(output))


def rows_of_patches(
    images: Tensor, kernel: tuple[int, ...], output: tuple[int, ...], geometry: Geometry, memory: Memory = FRESH
) -> Tensor:
    """The same patches as rows, channels last: images [B, C, *S] to [B, prod(output), prod(kernel) * C]."""
    images = _padded(images, geometry).movedim(1, -1).contiguous()
    steps = images.stride()[1:-1]
    view = images.as_strided(
        (images.shape[0], *output, *kernel, images.shape[-1]),
        (images.stride()[0], *_times(steps, geometry.stride), *_times(steps, geometry.dilation), 1),
    )
    view = memory.empty(view, *view.shape).copy_(view)
    return view.view(images.shape[0], math.prod(output), -1)


def _padded(images: Tensor, geometry: Geometry) -> Tensor:
    """Images [B, C, *S] with zeros around them."""
    if not any(geometry.padding):
        return images
    return torch.nn.functional.pad(images, [side for amount in reversed(geometry.padding) for side in (amount, amount)])


def _times(steps: tuple[int, ...], factors: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(step * factor for step, factor in zip(steps, factors, strict=True))
