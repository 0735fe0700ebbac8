"""Gram norms by compiled C: gram.c and windows.c form about the half of each Gram matrix that is needed.

`half_gram` works at the speed of large matrix products, however few positions there are, where torch's batched products
take half as long again to three times as long. `half_windows` takes an example at a time, in the cache: a fifth to a
half of the time of `ghostclip.norms.windows` where positions are 64 or more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ghostclip.native.build import library
from ghostclip.native.calls import run_examples
from ghostclip.native.custom_ops import traceable

__all__ = ["half_gram", "half_gram_is_there", "half_windows", "half_windows_are_there", "in_plane"]


def half_gram_is_there(like: Tensor) -> bool:
    """Whether `half_gram` can be used for tensors of that kind."""
    return like.device.type == "cpu" and library("gram") is not None


def half_windows_are_there(images: Tensor) -> bool:
    """Whether `half_windows` can be used for images of that kind: in one or two dimensions, on the CPU."""
    return images.device.type == "cpu" and images.dim() in (3, 4) and library("windows") is not None


def _two_vectors(first: Tensor, second: Tensor, *sizes: object) -> tuple[Tensor, Tensor]:
    return second.new_empty(len(second)), second.new_empty(len(second))


@traceable("half_gram(Tensor left, Tensor right) -> (Tensor, Tensor)", _two_vectors)
def half_gram(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """As `ghostclip.norms.outer.gram`, for left [B, T, p] and right [B, T, d] on the CPU."""
    left, right = (side if side.stride(2) == 1 else side.contiguous() for side in (left, right))
    batch, positions, outputs = left.shape
    inputs = right.shape[2]
    squared, scale = _two_vectors(right, left)
    sides = (left, *left.stride()[:2], right, *right.stride()[:2])
    work = batch * positions**2 * (outputs + inputs) // 2
    run_examples("gram", "gram", left.dtype, batch, work, (*sides, squared, scale, positions, outputs, inputs))
    return squared, scale


@traceable(
    "half_windows(Tensor images, Tensor grads, int[] kernel, int[] padding, int[] dilation) -> (Tensor, Tensor)",
    _two_vectors,
)
def half_windows(
    images: Tensor, grads: Tensor, kernel: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """As `ghostclip.norms.windows.windowed_gram`, for float32 or float64 images [B, C, *S] and grads [B, P, *O]."""
    images, grads = images.contiguous(), grads.contiguous()
    axes = [in_plane(sizes) for sizes in (images.shape[2:], grads.shape[2:], kernel)]
    squared, scale = _two_vectors(images, grads)
    sizes = (size for axis in (*axes, in_plane(padding, 0), in_plane(dilation)) for size in axis)
    channels = images.shape[1], grads.shape[1]
    work = sum(torch.Size(axis).numel() ** 2 * count for axis, count in zip(axes, channels, strict=False))
    arguments = (images, grads, squared, scale, *channels, *sizes)
    run_examples("windows", "windows", grads.dtype, len(grads), len(grads) * work // 2, arguments)
    return squared, scale


def in_plane(sizes: tuple[int, ...], of_one_row: int = 1) -> tuple[int, ...]:
    """What a convolution has along two axes: as it is, or for a line, which is a picture of one row."""
    return (of_one_row, *sizes) if len(sizes) == 1 else tuple(sizes)
