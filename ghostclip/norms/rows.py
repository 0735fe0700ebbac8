"""Gradients that fall on a few rows of a table: embeddings. No one-hot is ever built.

A row is d numbers that stand together in the table's memory: all of a table's row, or as little as one entry of it.

The gradient of example i is a table whose row r is the sum of ``gradients[i, t]`` over the positions t with
``indices[i, t] == r``. Four ways to its squared norm:

    chains    compiled: chain the positions of equal indices, sum each chain
    runs      sort each example's indices, sum runs of equal ones
    repeats   the same, but only for indices that occur more than once; the others' norms add up as they are
    gram      inner products of all pairs of positions with equal indices, for few positions
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ghostclip.native.custom_ops import is_traced
from ghostclip.native.rows import add_rows, chained_squared_norms, chains_are_there

from .memory import FRESH, Memory
from .outer import chunks, reliable
from .rounding import squared_sizes
from .term import (
    NormResult,
    PerExampleGrads,
    Strategy,
    size_class,
    split_examples,
    squared_norms,
    to_float32,
    zero_examples,
)

__all__ = ["LookupGrads", "pairs_squared_norms", "repeats_squared_norms", "runs_squared_norms"]

# With more positions than this, all pairs of them are never the fewest steps.
PAIRED_POSITIONS = 128


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


def repeats_squared_norms(indices: Tensor, gradients: Tensor) -> Tensor:
    """As `runs_squared_norms`; sums only where an index occurs more than once, which it has to look for."""
    batch, positions = indices.shape
    ordered, order = indices.sort(dim=1)
    same = ordered[:, 1:] == ordered[:, :-1]
    alone = torch.ones_like(ordered, dtype=torch.bool)
    alone[:, 1:] &= ~same
    alone[:, :-1] &= ~same
    # Where they are in sorted order; there, equal neighbours of one example make a run.
    repeated = (~alone).flatten().nonzero().squeeze(1)
    owner = repeated.div(positions, rounding_mode="floor")
    place = owner * positions + order.flatten()[repeated]
    flat = gradients.flatten(0, 1)
    each = gradients.square().sum(2).flatten()
    each[place] = 0.0
    starts = torch.ones_like(repeated, dtype=torch.bool)
    starts[1:] = ~same.flatten()[repeated[1:] - owner[1:] - 1] | (owner[1:] != owner[:-1])
    run = starts.cumsum(0) - 1
    sums = torch.zeros_like(flat[: len(repeated)]).index_add_(0, run, flat[place])
    first = owner[starts]
    return each.view(batch, positions).sum(1).index_add_(0, first, sums[: first.shape[0]].square().sum(1))


def pairs_squared_norms(indices: Tensor, gradients: Tensor, memory: Memory = FRESH) -> Tensor:
    """As `runs_squared_norms`, in O(B T^2 d), which is less work for few positions."""
    batch, positions = indices.shape
    squared, scale = gradients.new_empty(batch), gradients.square().sum(dim=(1, 2))
    for part in chunks(batch, 2 * positions * positions * gradients.element_size()):
        side = gradients[part]
        pairs = torch.bmm(side, side.mT, out=memory.empty(side, side.shape[0], positions, positions))
        pairs.masked_fill_(indices[part].unsqueeze(1) != indices[part].unsqueeze(2), 0.0)
        torch.sum(pairs, dim=(1, 2), out=squared[part])
        del pairs  # its memory is the next chunk's
    return reliable(squared, scale, lambda: runs_squared_norms(indices, gradients))


@dataclass(eq=False)
class LookupGrads(PerExampleGrads):
    """Rows of gradients and where they fall.

    Attributes:
        indices: [B, T], the row each gradient belongs to.
        gradients: [B, T, d]; zero where a position does not count (padding).
        shape: of the table, [rows, d]; with a smaller d, indices count the parts that rows then consist of.
    """

    indices: Tensor
    gradients: Tensor
    shape: torch.Size

    @property
    def width(self) -> int:
        """d."""
        return self.gradients.shape[2]

    @property
    def key(self) -> tuple:
        sizes, kinds = tuple(self.gradients.shape[1:]), (self.indices.dtype, self.gradients.dtype)
        return ("rows", size_class(self.examples), sizes, self.shape, kinds, self.gradients.device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.gradients, self.indices)

    def closed_form(self, keep: bool) -> NormResult | None:
        return NormResult(squared_norms(self.gradients)) if self.indices.shape[1] == 1 else None

    def candidates(self) -> dict[str, Strategy]:
        numbers, positions = float(self.gradients.numel()), self.indices.shape[1]
        # Sorting and adding by index are not counted in flops; these factors are what they were measured to cost.
        found = {"runs": Strategy("direct", LookupGrads._by_runs, 60 * numbers)}
        if chains_are_there(self.indices, to_float32(self.gradients)):
            found["chains"] = Strategy("direct", LookupGrads._by_chains, 10 * numbers)
        if self.gradients.device.type == "cpu":
            found["repeats"] = Strategy("direct", LookupGrads._by_repeats, 50 * numbers, traces=False)
        if positions <= PAIRED_POSITIONS:
            found["gram"] = Strategy("gram", LookupGrads._by_pairs, 2 * numbers * positions)
        return found

    def _by_runs(self, keep: bool = False, memory: Memory = FRESH) -> NormResult:
        return NormResult(runs_squared_norms(self.indices, to_float32(self.gradients)))

    def _by_chains(self, keep: bool = False, memory: Memory = FRESH) -> NormResult:
        squared, sizes = chained_squared_norms(self.indices, to_float32(self.gradients))
        return NormResult(squared, absolute=sizes * self.indices.shape[1])

    def _by_repeats(self, keep: bool = False, memory: Memory = FRESH) -> NormResult:
        return NormResult(repeats_squared_norms(self.indices, to_float32(self.gradients)))

    def _by_pairs(self, keep: bool = False, memory: Memory = FRESH) -> NormResult:
        return NormResult(pairs_squared_norms(self.indices, to_float32(self.gradients), memory))

    def head(self, count: int) -> LookupGrads:
        return LookupGrads(self.indices[:count], self.gradients[:count], self.shape)

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
        table = to_float32(self.gradients[:0]).new_zeros(self.shape)
        self.add_weighted(table, weights)
        return table

    def add_weighted(self, table: Tensor, weights: Tensor) -> None:
        """Adds `weighted_sum` to a contiguous table [*shape]."""
        gradients = to_float32(self.gradients)
        weights = weights.to(gradients.dtype)
        if chains_are_there(self.indices, gradients) and not is_traced():
            add_rows(table, self.indices, gradients, weights)
            return
        gradients = gradients * weights.view(-1, 1, 1)
        table.view(-1, self.width).index_add_(0, self.indices.flatten(), gradients.flatten(0, 1))

    def keep_only(self, keep: Tensor) -> LookupGrads:
        return LookupGrads(self.indices, zero_examples(self.gradients, keep), self.shape)

    def split_rows(self, count: int, row_order: str) -> LookupGrads:
        indices, gradients = (split_examples(t, count, row_order).flatten(1, 2) for t in (self.indices, self.gradients))
        return LookupGrads(indices, gradients, self.shape)
