"""Whether two tensors hold the same numbers, whatever layout they have: torch.equal takes no sparse ones."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["numbers_of", "same_numbers"]

ROWS, COLUMNS = {torch.sparse_csr, torch.sparse_bsr}, {torch.sparse_csc, torch.sparse_bsc}


def numbers_of(tensor: Tensor) -> list[Tensor]:
    """The strided tensors that hold what a tensor is made of: itself, or a sparse one's places and values."""
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in ROWS:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in COLUMNS:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Whether both have one shape and layout, and the same numbers, bit for bit; a NaN differs from a NaN."""
    alike = one.shape == other.shape and one.layout == other.layout
    return alike and all(map(torch.equal, numbers_of(one), numbers_of(other)))
