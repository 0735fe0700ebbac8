"""Ragged examples: rows belong to examples by an index, as nodes belong to graphs or packed tokens to texts.

A layer's rule gives a term of R rows, each as if it were an example. The gradient of example i is the sum of those of
its rows,

    g_i = sum over rows r with index[r] == i of g_r.

Terms that are materialised are summed by the index. For all others, examples with about as many rows form a bucket,
where each has the same number after a few rows of zeros: there its rows are positions, and the squared norm has the
forms it has elsewhere. A bucket's lengths differ by at most a half, so the memory is that of the rows, times 1.5.
Clipped sums need none of it: each row is weighted with its example's weight, ``sum_r v[index[r]] g_r``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .combine import combine
from .term import Dense, NormResult, PerExampleGrads, squared_norms, to_float32

__all__ = ["Ragged", "RowIndex", "RowOrder", "combined", "regrouped"]


class RowIndex:
    """Which example each row belongs to, in any order; examples may have no rows.

    Args:
        index: [R], int64, from 0 to ``examples`` - 1.
        examples: B.
        used: [R] bool, False for rows that have no part in any loss, whatever they hold; None where all have.
    """

    def __init__(self, index: Tensor, examples: int, used: Tensor | None = None) -> None:
        self.index, self.examples, self.used = index, examples, used

    @staticmethod
    def in_order(rows: int, examples: int, row_order: str, device: torch.device) -> Tensor:
        """[rows], the example of each where every example has as many, in "example" or "row" order."""
        numbers = torch.arange(rows, device=device)
        return numbers // (rows // examples) if row_order == "example" else numbers % examples

    @staticmethod
    def joined(parts: Sequence[RowIndex]) -> RowIndex:
        """That of the rows of several, one after another."""
        if len(parts) == 1:
            return parts[0]
        used = [torch.ones_like(part.index, dtype=torch.bool) if part.used is None else part.used for part in parts]
        whole = torch.cat([part.index for part in parts])
        return RowIndex(whole, parts[0].examples, None if all(p.used is None for p in parts) else torch.cat(used))

    def __len__(self) -> int:
        """R."""
        return len(self.index)

    def sums(self, rows: Tensor) -> Tensor:
        """Rows [R, ...] summed by example, [B, ...]."""
        return rows.new_zeros(self.examples, *rows.shape[1:]).index_add_(0, self.index, rows)

    @functools.cached_property
    def _order(self) -> Tensor:
        """[R], the rows, example after example."""
        return self.index.argsort(stable=True)

    @functools.cached_property
    def _counts(self) -> Tensor:
        return torch.bincount(self.index, minlength=self.examples)

    @functools.cached_property
    def _starts(self) -> Tensor:
        return self._counts.cumsum(0) - self._counts

    def entries(self) -> Sequence[Tensor]:
        """[B] tensors, the rows of each example."""
        return self._order.split(self._counts.tolist())

    @functools.cached_property
    def lengths(self) -> Tensor:
        """[B], each example's number of rows, rounded up to 1, 2, 3, 4, 6, 8, 12, 16 and so on."""
        sizes = [0, 1, *(size << shift for shift in range(len(self).bit_length()) for size in (2, 3))]
        table = torch.tensor(sizes, device=self.index.device)
        return table[torch.searchsorted(table, self._counts)]

    def positions(self, examples: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of some examples [b], of each as many as its length, and which of them are there."""
        lengths = self.lengths[examples]
        owners = torch.arange(len(examples), device=lengths.device).repeat_interleave(lengths)
        places = torch.arange(len(owners), device=lengths.device) - (lengths.cumsum(0) - lengths)[owners]
        there = places < self._counts[examples][owners]
        return self._order[torch.where(there, self._starts[examples][owners] + places, 0)], there


# How the rows of a tensor are those of examples: B * k of them in "example" order (b k) or "row" order (k b), or any
# number by an index.
RowOrder = str | RowIndex


def regrouped(term: PerExampleGrads, count: int, row_order: RowOrder) -> PerExampleGrads:
    """The term of B examples from that of their rows; ``count`` of each, where they have as many."""
    if not isinstance(row_order, RowIndex):
        return term if count == 1 else term.split_rows(count, row_order)
    term = term if row_order.used is None else term.keep_only(row_order.used)
    if isinstance(term, Dense):
        return Dense(row_order.sums(to_float32(term.gradients)))
    return Ragged([(term, row_order)], row_order.examples)


def combined(terms: Sequence[PerExampleGrads]) -> PerExampleGrads:
    """`combine` for terms of which some may be `Ragged`."""
    if len(terms) == 1 or not any(isinstance(term, Ragged) for term in terms):
        return combine(terms)
    uses = [term.uses if isinstance(term, Ragged) else [(term, None)] for term in terms]
    return Ragged([use for each in uses for use in each], terms[0].examples)


@dataclass(eq=False)
class Ragged(PerExampleGrads):
    """The gradients of a parameter that was used for rows of examples.

    Attributes:
        uses: terms of rows and whose these are; None: one row for each example.
        count: B.
    """

    uses: list[tuple[PerExampleGrads, RowIndex | None]]
    count: int

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.uses[0][0].shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple([tensor for term, _ in self.uses for tensor in term.tensors])

    @property
    def examples(self) -> int:
        return self.count

    def buckets(self) -> Iterator[tuple[Tensor, PerExampleGrads]]:
        """Examples [b] with about as many rows in each use, and their term; those without any rows are left out."""
        indices = list({id(rows): rows for _, rows in self.uses if rows is not None}.values())
        order, kinds, counts = _buckets(indices)
        places = {id(rows): rows.positions(order) for rows in indices}
        picked = [term.pick(*(places[id(rows)] if rows is not None else (order, None))) for term, rows in self.uses]
        starts = [0] * len(picked)
        for examples, sizes in zip(order.split(counts), kinds, strict=True):
            of_kind = dict(zip(map(id, indices), sizes, strict=True))
            parts = []
            for number, (_, rows) in enumerate(self.uses):
                length = 1 if rows is None else of_kind[id(rows)]
                stop = starts[number] + length * len(examples)
                if length:
                    parts.append(regrouped(picked[number].pick(slice(starts[number], stop)), length, "example"))
                starts[number] = stop
            if parts:
                yield examples, combine(parts)

    def _scattered(self, answer: Callable[[PerExampleGrads], Tensor], shape: Sequence[int] = ()) -> Tensor:
        """[B, *shape] of what ``answer`` gives for each bucket's examples; zeros for examples without rows."""
        found = to_float32(self.tensors[0][:0]).new_zeros(self.count, *shape)
        for examples, term in self.buckets():
            found[examples] = answer(term)
        return found

    def closed_form(self, keep: bool) -> NormResult:
        # Where gradients are no larger than what they are made of, examples have so many rows that the direct form is
        # about as fast, and the clipped sum is had from them.
        if keep and 4 * self.count * self.shape.numel() <= self.tensors[0].nbytes:
            kept = self.per_example()
            return NormResult(squared_norms(kept), kept)
        squared, absolute = self.squared_and_absolute().unbind(1)
        return NormResult(squared, absolute=absolute)

    def squared_and_absolute(self) -> Tensor:
        """[B, 2], squared norms and `absolute`."""
        return self._scattered(_answer, (2,))

    def exact_squared_norms(self) -> Tensor:
        return self._scattered(functools.partial(_answer, exact=True), (2,))[:, 0]

    def absolute(self) -> Tensor:
        return self.squared_and_absolute()[:, 1]

    def per_example(self) -> Tensor:
        return self._scattered(lambda term: term.per_example(), self.shape)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        first, *others = [
            term.weighted_sum(weights if rows is None else weights[rows.index]) for term, rows in self.uses
        ]
        return sum(others, start=first)

    def keep_only(self, keep: Tensor) -> Ragged:
        uses = [(term.keep_only(keep if rows is None else keep[rows.index]), rows) for term, rows in self.uses]
        return Ragged(uses, self.count)

    def split_rows(self, count: int, row_order: str) -> PerExampleGrads:
        return Dense(self.per_example()).split_rows(count, row_order)


def _buckets(indices: Sequence[RowIndex]) -> tuple[Tensor, list[list[int]], list[int]]:
    """All examples, bucket by bucket; the lengths of each bucket by each index; how many examples it has."""
    kinds, kind, counts = torch.stack([rows.lengths for rows in indices]).unique(
        dim=1, return_inverse=True, return_counts=True
    )
    return kind.argsort(stable=True), kinds.T.tolist(), counts.tolist()


def _answer(term: PerExampleGrads, exact: bool = False) -> Tensor:
    """[b, 2]: squared norms by the form with the fewest flops, and `PerExampleGrads.absolute` or zeros."""
    answer = term.closed_form(False)
    if exact and (squared := term.exact_squared_norms()) is not None:
        answer = NormResult(squared)
    elif answer is None:
        ways = [way for way in term.candidates().values() if not exact or way.family == "direct"]
        answer = min(ways, key=lambda way: way.flops).run(term)
    absolute = term.absolute() if answer.absolute is None else answer.absolute
    squared = answer.squared_norms
    return torch.stack([squared, torch.zeros_like(squared) if absolute is None else absolute], 1)
