"""Gram norms by compiled C: native/gram.c forms about the half of each Gram matrix that is needed.

It works at the speed of large matrix products, however few positions there are, where torch's batched products take
half as long again to three times as long.
"""

from __future__ import annotations

from torch import Tensor

from ghostclip.native import library
from ghostclip.native.calls import run_examples

from .term import is_traced

__all__ = ["half_gram", "half_gram_is_there"]


def half_gram_is_there(like: Tensor) -> bool:
    """Whether `half_gram` can be used for tensors of that kind."""
    return like.device.type == "cpu" and library("gram") is not None


def half_gram(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """As `ghostclip.norms.outer.gram`, for left [B, T, p] and right [B, T, d] on the CPU."""
    if is_traced():
        from . import written

        return written.half_gram(left, right)
    left, right = (side if side.stride(2) == 1 else side.contiguous() for side in (left, right))
    batch, positions, outputs = left.shape
    inputs = right.shape[2]
    squared, scale = left.new_empty(batch), left.new_empty(batch)
    sides = (left, *left.stride()[:2], right, *right.stride()[:2])
    work = batch * positions**2 * (outputs + inputs) // 2
    arguments = (*sides, squared, scale, positions, outputs, inputs)
    run_examples("gram", "gram", left.dtype, batch, work, arguments)
    return squared, scale
