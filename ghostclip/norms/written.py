"""Compiled C as single operations of a graph that is written down, and that doesn't look into them.

Each does what the function of the same name does outside of a graph, which calls it inside of one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import chained_rows, shifts
from . import half_gram as grams
from . import half_windows as windows

__all__ = ["chained_squared_norms", "half_gram", "half_windows", "shifted_products"]


@torch.library.custom_op("ghostclip::shifted_products", mutates_args=())
def shifted_products(
    images: Tensor,
    grads: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    keep: bool,
) -> list[Tensor]:
    """Squared norms [B] and, where asked, the gradients [B, P, C, *kernel]."""
    axes = tuple(kernel), tuple(stride), tuple(padding), tuple(dilation)
    squared, kept = shifts.shifted_products(images, grads, *axes, keep)
    return [squared] if kept is None else [squared, kept]


@shifted_products.register_fake
def _(
    images: Tensor,
    grads: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    keep: bool,
) -> list[Tensor]:
    shapes = [(len(grads),), (len(grads), grads.shape[1], images.shape[1], *kernel)]
    return [grads.new_empty(shape) for shape in shapes[: 1 + keep]]


@torch.library.custom_op("ghostclip::half_gram", mutates_args=())
def half_gram(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norms [B], and what tells whether they can be relied on."""
    return grams.half_gram(left, right)


@half_gram.register_fake
def _(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    return left.new_empty(len(left)), left.new_empty(len(left))


@torch.library.custom_op("ghostclip::half_windows", mutates_args=())
def half_windows(
    images: Tensor, grads: Tensor, kernel: list[int], padding: list[int], dilation: list[int]
) -> tuple[Tensor, Tensor]:
    """The same of a convolution's weight."""
    return windows.half_windows(images, grads, tuple(kernel), tuple(padding), tuple(dilation))


@half_windows.register_fake
def _(
    images: Tensor, grads: Tensor, kernel: list[int], padding: list[int], dilation: list[int]
) -> tuple[Tensor, Tensor]:
    return grads.new_empty(len(grads)), grads.new_empty(len(grads))


@torch.library.custom_op("ghostclip::chained_squared_norms", mutates_args=())
def chained_squared_norms(indices: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norms [B] of gradients that fall on rows of a table, and the sums [B] of all rows' own."""
    return chained_rows.chained_squared_norms(indices, gradients)


@chained_squared_norms.register_fake
def _(indices: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    return gradients.new_empty(len(gradients)), gradients.new_empty(len(gradients))
