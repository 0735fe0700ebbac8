"""Rows of a table by compiled C: rows.c chains the positions of an example that have the same index.

It reads each gradient once and needs no memory beside a row and a few numbers a position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ghostclip.native.build import library
from ghostclip.native.calls import run_examples
from ghostclip.native.custom_ops import traceable

__all__ = ["chained_squared_norms", "chains_are_there", "summed_rows"]

# Columns that are shared out together, a line of the cache.
COLUMNS = 16


def chains_are_there(indices: Tensor, gradients: Tensor) -> bool:
    """Whether these can be given to the functions below."""
    known = indices.dtype == torch.int64 and gradients.dtype in (torch.float32, torch.float64)
    return known and gradients.device.type == "cpu" and library("rows") is not None


@traceable(
    "chained_squared_norms(Tensor indices, Tensor gradients) -> (Tensor, Tensor)",
    lambda indices, gradients: (gradients.new_empty(len(gradients)), gradients.new_empty(len(gradients))),
)
def chained_squared_norms(indices: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """As `ghostclip.norms.rows.runs_squared_norms`, for indices [B, T] and gradients [B, T, d] on the CPU.

    Returns:
        The squared norms [B], and ``sum_t |gradients_t|^2`` [B], which the rounding margin follows from.
    """
    batch, positions, width = gradients.shape
    squared, sizes = gradients.new_empty(batch), gradients.new_empty(batch)
    arguments = (*_sides(indices, gradients), squared, sizes, positions, width)
    run_examples("rows", "rows_squared", gradients.dtype, batch, gradients.numel(), arguments)
    return squared, sizes


@traceable(
    "summed_rows(Tensor indices, Tensor gradients, Tensor weights, SymInt rows) -> Tensor",
    lambda indices, gradients, weights, rows: gradients.new_empty(rows, gradients.shape[2]),
)
def summed_rows(indices: Tensor, gradients: Tensor, weights: Tensor, rows: int) -> Tensor:
    """[rows, d]: the sum of ``weights[b] * gradients[b, t]`` at row ``indices[b, t]``, in float64, rounded once.

    Args:
        indices, gradients: [B, T] and [B, T, d], as above.
        weights: [B].
        rows: of the table.
    """
    table = gradients.new_zeros(rows, gradients.shape[2])
    arguments = (*_sides(indices, gradients), weights.contiguous(), table, rows, *gradients.shape)
    # Threads share the columns: no two of them write to the same number.
    run_examples("rows", "rows_added", gradients.dtype, table.shape[1], gradients.numel(), arguments, COLUMNS)
    return table


def _sides(indices: Tensor, gradients: Tensor) -> tuple[Tensor | int, ...]:
    """Both with the strides that C wants."""
    gradients = gradients if gradients.stride(2) == 1 else gradients.contiguous()
    return (indices, *indices.stride(), gradients, *gradients.stride()[:2])
