"""Gradients that fall on a few rows of a table: embeddings. No one-hot is ever built.

A row is d numbers that stand together in the table's memory: all of a table's row, or as little as one entry of it.

The gradient of example i is a table whose row r is the sum of ``gradients[i, t]`` over the positions t with
``indices[i, t] == r``. For its squared norm compiled C chains the positions of equal indices and sums each chain;
without it each example's indices are sorted, and runs of equal ones summed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ghostclip.native.rows import chained_squared_norms, chains_are_there, summed_rows

from .outer import chunks
from .reduce import hidden_in_product
from .term import (
    NormResult,
    PerExampleGrads,
    product_of_sizes,
    split_examples,
    squared_norms,
    squared_sizes,
    to_float32,
)

__all__ = ["BagGrads", "LookupGrads", "lookup_squared_norms", "runs_squared_norms"]


def runs_squared_norms(indices: Tensor, gradients: Tensor) -> Tensor:
    """Squared norms [B] of scattered rows, for indices [B, T] and gradients [B, T, d], in O(B T d)."""
    batch, positions = indices.shape
    if positions == 1 or batch == 0:
        return squared_norms(gradients)
    ordered, order = indices.sort(dim=1)
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    run = starts.flatten().cumsum(0) - 1
    offsets = torch.arange(batch, device=order.device).unsqueeze(1) * positions
    slot = torch.empty_like(run).scatter_(0, (order + offsets).flatten(), run)
    sums = torch.zeros_like(gradients.flatten(0, 1)).index_add_(0, slot, gradients.flatten(0, 1))
    # Runs are numbered over the whole batch: each belongs to the example its first position belongs to.
    owner = torch.zeros_like(run).scatter_(0, run, torch.arange(batch, device=run.device).repeat_interleave(positions))
    return sums.new_zeros(batch).index_add_(0, owner, squared_norms(sums))


def lookup_squared_norms(indices: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor | None]:
    """As `runs_squared_norms`, by compiled C where it is there.

    Returns:
        The squared norms [B], and ``sum_t |gradients_t|^2`` [B] where it was found on the way.
    """
    if chains_are_there(indices, gradients):
        return chained_squared_norms(indices, gradients)
    return runs_squared_norms(indices, gradients), None


@dataclass(eq=False)
class LookupGrads(PerExampleGrads):
    """Rows of gradients and where they fall.

    Attributes:
        indices: [B, T], the row each gradient belongs to.
        gradients: [B, T, d]; zero where a position does not count (padding).
        shape: of the table, [rows, d]; with a smaller d, indices count the parts that rows then consist of.
    """

    TENSORS = ("gradients", "indices")
    indices: Tensor
    gradients: Tensor
    shape: torch.Size

    @property
    def width(self) -> int:
        """d."""
        return self.gradients.shape[2]

    def closed_form(self, keep: bool) -> NormResult:
        if self.indices.shape[1] == 1:
            return NormResult(squared_norms(self.gradients))
        squared, sizes = lookup_squared_norms(self.indices, to_float32(self.gradients))
        return NormResult(squared, absolute=None if sizes is None else sizes * self.indices.shape[1])

    def absolute(self) -> Tensor | None:
        positions = self.indices.shape[1]
        return None if positions == 1 else squared_sizes(self.gradients) * positions

    def per_example(self) -> Tensor:
        gradients = to_float32(self.gradients)
        table = gradients.new_zeros(self.indices.shape[0], *self.shape)
        rows = table.view(len(table), self.shape.numel() // self.width, self.width)
        rows.scatter_add_(1, self.indices.unsqueeze(2).expand_as(gradients), gradients)
        return table

    def weighted_sum(self, weights: Tensor) -> Tensor:
        gradients, rows = to_float32(self.gradients), self.shape.numel() // max(1, self.width)
        weights = weights.to(gradients.dtype)
        if chains_are_there(self.indices, gradients):
            return summed_rows(self.indices, gradients, weights, rows).view(self.shape)
        # In float64, as compiled C does: the places of a batch that fall on one row may be hundreds of thousands.
        wide = gradients.new_zeros(rows, self.width, dtype=torch.float64)
        weighted = gradients.double() * weights.view(-1, 1, 1)
        wide.index_add_(0, self.indices.flatten(), weighted.flatten(0, 1))
        return wide.to(gradients.dtype).view(self.shape)

    def split_rows(self, count: int, row_order: str) -> LookupGrads:
        return self.replaced(lambda tensor: split_examples(tensor, count, row_order).flatten(1, 2))


@dataclass(eq=False)
class BagGrads(PerExampleGrads):
    """Bags of rows of a table, which were added up: every position of an example has the same gradient.

    Row r of example i's gradient is ``(sum of factors[i, t] over t with indices[i, t] == r) * gradients[i]``, an outer
    product of counts and one vector, so that its squared norm is that of the counts times that of the vector.

    Attributes:
        gradients: [B, d], at the sums.
        indices: [B, T], the rows each example looked up.
        factors: [B, T], what they were multiplied with, zero where a position does not count; None for ones.
        shape: of the table, [rows, d].
    """

    TENSORS = ("gradients", "indices", "factors")
    gradients: Tensor
    indices: Tensor
    factors: Tensor | None
    shape: torch.Size

    def rows(self) -> LookupGrads:
        """The same with a gradient for every position."""
        gradients = to_float32(self.gradients).unsqueeze(1)
        if self.factors is None:
            return LookupGrads(self.indices, gradients.expand(-1, self.indices.shape[1], -1), self.shape)
        return LookupGrads(self.indices, self.factors.unsqueeze(2) * gradients, self.shape)

    def closed_form(self, keep: bool) -> NormResult:
        gradients, factors = to_float32(self.gradients), self.factors
        if factors is None:
            factors = gradients.new_ones(()).expand(self.indices.shape)
        counts, _ = lookup_squared_norms(self.indices, factors.unsqueeze(2))
        squared, known = squared_norms(gradients), self.absolute()
        lost = hidden_in_product(counts, self.indices.shape[1], squared, gradients.shape[1])
        return NormResult(counts * squared, absolute=lost if known is None else known + lost)

    def absolute(self) -> Tensor | None:
        if self.factors is None:
            return None
        return product_of_sizes(self.gradients, self.factors) * self.indices.shape[1]

    def per_example(self) -> Tensor:
        return self.rows().per_example()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = to_float32(self.gradients).new_zeros(self.shape)
        for part in chunks(self.examples, total[:1].nbytes * self.indices.shape[1]):
            total += self.pick(part).rows().weighted_sum(weights[part])
        return total

    def split_rows(self, count: int, row_order: str) -> LookupGrads:
        return self.rows().split_rows(count, row_order)
