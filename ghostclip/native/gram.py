"""Gram norms by compiled C: gram.c forms about the half of each Gram matrix that is needed.

It works at the speed of large matrix products, however few positions there are, where torch's batched products take
half as long again to three times as long. Without it "cached" steps of the benchmark's RNN, LSTM and Transformer take
1.14 to 1.15 of the time (experiments/results/kernels.md).
"""

from __future__ import annotations

from torch import Tensor

from ghostclip.native.build import library
from ghostclip.native.calls import run_examples
from ghostclip.native.custom_ops import traceable

__all__ = ["gram_is_there", "half_gram", "ragged_gram"]


def gram_is_there(like: Tensor) -> bool:
    """Whether `half_gram` and `ragged_gram` can be used for tensors of that kind."""
    return like.device.type == "cpu" and library("gram") is not None


def _results(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch = len(left)
    return left.new_empty(batch), left.new_empty(batch), left.new_empty(2, batch)


@traceable("half_gram(Tensor left, Tensor right) -> (Tensor, Tensor, Tensor)", _results)
def half_gram(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `ghostclip.norms.outer.gram`, for left [B, T, p] and right [B, T, d] on the CPU."""
    left, right = [side if side.stride(2) == 1 else side.contiguous() for side in (left, right)]
    batch, positions, outputs = left.shape
    inputs, found = right.shape[2], _results(left, right)
    sides = (left, *left.stride()[:2], right, *right.stride()[:2])
    work = batch * positions**2 * (outputs + inputs) // 2
    run_examples("gram", "gram", left.dtype, batch, work, (*sides, *found, batch, positions, outputs, inputs))
    return found


def ragged_gram(left: Tensor, right: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `half_gram`, for examples whose positions are rows, one example's after another's.

    A private step of the graph networks of experiments/ragged.py takes 0.80 to 0.92 of the time with it, and one of its
    packed texts 0.95.

    Args:
        left, right: [rows, p] and [rows, d] of float32 or float64, on the CPU.
        starts: [B + 1] int64, where each example's rows begin; the last is the number of rows.
    """
    left, right = (side if side.stride(1) == 1 else side.contiguous() for side in (left, right))
    (rows, outputs), inputs, batch = left.shape, right.shape[1], len(starts) - 1
    found = left.new_empty(batch), left.new_empty(batch), left.new_empty(2, batch)
    sides = (left, left.stride(0), right, right.stride(0))
    work = rows**2 // max(1, batch) * (outputs + inputs) // 2
    arguments = (*sides, starts.contiguous(), *found, batch, outputs, inputs)
    run_examples("gram", "ragged_gram", left.dtype, batch, work, arguments)
    return found
