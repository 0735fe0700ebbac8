"""Whose the rows of ragged examples are, as a user says it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ghostclip.norms.ragged import RowIndex

__all__ = ["read_indices"]


def read_indices(batch_index: Any, losses: Tensor) -> list[RowIndex]:
    """The indices a user gave for losses [B]: one tensor, or a sequence of them, each [rows] of int64.

    Raises:
        TypeError: something else was given, or another type of number.
        ValueError: another shape, on another device than the losses, or a number that isn't an example's.
    """
    given = list(batch_index) if isinstance(batch_index, list | tuple) else [batch_index]
    for index in given:
        if not isinstance(index, Tensor):
            raise TypeError(
                "batch_index must be a tensor [rows] of int64 with the example of each row, or a list of such tensors; "
                f"got {type(index).__name__}"
            )
        if index.dtype != torch.int64:
            raise TypeError(f"batch_index must hold int64 numbers; got {index.dtype}; convert it by batch_index.long()")
        if index.dim() != 1:
            raise ValueError(
                f"batch_index must have shape [rows], one example for each row; got {list(index.shape)}; of lengths "
                "[B] it is torch.repeat_interleave(torch.arange(B), lengths)"
            )
        if index.device != losses.device:
            raise ValueError(
                f"batch_index is on {index.device}, and the losses are on {losses.device}; move it by "
                "batch_index.to(losses.device)"
            )
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(losses):
            raise ValueError(
                f"batch_index must hold numbers from 0 to {len(losses) - 1}, for {len(losses)} losses; got numbers "
                f"from {int(index.min())} to {int(index.max())}; give each example a loss, one without rows too"
            )
    return [RowIndex(index, len(losses)) for index in given]
