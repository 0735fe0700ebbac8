"""Gram norms of ragged examples by compiled C: gram.c forms about the half of each Gram matrix that is needed."""

from __future__ import annotations

from torch import Tensor

from ghostclip.native.build import library
from ghostclip.native.calls import run_examples

__all__ = ["gram_is_there", "ragged_gram"]


def gram_is_there(like: Tensor) -> bool:
    """Whether `ragged_gram` can be used for tensors of that kind."""
    return like.device.type == "cpu" and library("gram") is not None


def ragged_gram(left: Tensor, right: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """As `ghostclip.norms.outer.gram`, for examples whose positions are rows, one example's after another's.

    A private step of the graph networks of experiments/ragged.py takes 0.80 to 0.92 of the time with it, and one of its
    packed texts 0.95.

    Args:
        left, right: [rows, p] and [rows, d] of float32 or float64, on the CPU.
        starts: [B + 1] int64, where each example's rows begin; the last is the number of rows.
    """
    left, right = (side if side.stride(1) == 1 else side.contiguous() for side in (left, right))
    (rows, outputs), inputs, batch = left.shape, right.shape[1], len(starts) - 1
    squared, scale = left.new_empty(batch), left.new_empty(batch)
    sides = (left, left.stride(0), right, right.stride(0))
    work = rows**2 // max(1, batch) * (outputs + inputs) // 2
    arguments = (*sides, starts.contiguous(), squared, scale, outputs, inputs)
    run_examples("gram", "ragged_gram", left.dtype, batch, work, arguments)
    return squared, scale
