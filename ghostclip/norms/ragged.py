"""Ragged examples: rows belong to examples by an index, as nodes belong to graphs or packed tokens to texts.

A layer's rule gives a term of R rows, each as if it were an example. The gradient of example i is the sum of those of
its rows. With three rows of two examples, index [1, 0, 1] and row gradients 2, 5, 4:

    g_0 = 5,  g_1 = 2 + 4 = 6,  clipped sum = v_1 * 2 + v_0 * 5 + v_1 * 4.

Materialised terms are summed by the index. For all others, examples with about as many rows form a bucket, in which
rows of zeros make their numbers equal; at most half of a bucket's rows are such. There rows are positions, and squared
norms have the forms of other terms. Clipped sums need no buckets: each row is weighted with its example's weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ghostclip.native.gram import gram_is_there, ragged_gram

from .combine import combine
from .outer import OuterProduct, gram_is_reliable
from .reduce import hidden_in_pairs
from .rows import LookupGrads
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
    def _pairs(self) -> int:
        """How many pairs of rows are of one example."""
        return int(self._counts.square().sum())

    def gram(self, term: OuterProduct) -> NormResult | None:
        """Squared norms of a term of the rows by Gram matrices in C.

        None where the direct form takes fewer operations, C isn't there, or digits cancelled.
        """
        (_, positions, outputs), inputs = term.left.shape, term.right.shape[2]
        gram, direct = positions * self._pairs * (outputs + inputs), 2 * len(self) * outputs * inputs
        if gram > direct or not gram_is_there(term.left):
            return None
        if not bool((self.index[1:] >= self.index[:-1]).all()):
            term = term.pick(self._order)
        left, right = (to_float32(side).flatten(0, 1) for side in (term.left, term.right))
        starts = torch.cat([self._counts.new_zeros(1), self._counts.cumsum(0)])
        squared, scale, sizes = ragged_gram(left, right, positions * starts)
        if not bool(gram_is_reliable(squared, scale).all()):
            return None
        lost = hidden_in_pairs(sizes, (outputs, inputs), positions * self._counts)
        return NormResult(squared, absolute=scale * positions * self._counts + lost)

    def entries(self) -> Sequence[Tensor]:
        """[B] tensors, the rows of each example."""
        return self._order.split(self._counts.tolist())

    def buckets(self) -> Iterator[tuple[Tensor, int, Tensor, Tensor]]:
        """Examples [b] with about as many rows: (examples, length, their rows [b * length], which of them are there).

        One bucket of all examples if half of its rows are there; else one for each power of two. Examples without rows
        are in none of these.
        """
        starts, longest = self._counts.cumsum(0) - self._counts, max(self._counts.tolist(), default=0)
        lengths = torch.full_like(starts, longest)
        if self.examples * longest > 2 * len(self):
            lengths = (2.0 ** self._counts.log2().ceil()).long()
        for length in filter(None, lengths.unique().tolist()):
            examples = (lengths == length).nonzero().flatten()
            places = torch.arange(length, device=starts.device)
            there = places < self._counts[examples, None]
            rows = torch.where(there, starts[examples, None] + places, 0)
            yield examples, length, self._order[rows.flatten()], there.flatten()


# How the rows of a tensor are those of examples: B * k of them in "example" order (b k) or "row" order (k b), or any
# number by an index.
RowOrder = str | RowIndex


def regrouped(term: PerExampleGrads, count: int, row_order: RowOrder, used: Tensor | None = None) -> PerExampleGrads:
    """The term of B examples from that of their rows; ``count`` of each, where they have as many.

    Rows that aren't ``used`` [rows] are nobody's, whatever they hold.
    """
    term = term if used is None else term.keep_only(used)
    if not isinstance(row_order, RowIndex):
        return term if count == 1 else term.split_rows(count, row_order)
    term = term if row_order.used is None else term.keep_only(row_order.used)
    if isinstance(term, Dense):
        return Dense(row_order.sums(to_float32(term.gradients)))
    return Ragged(term, row_order)


def combined(terms: Sequence[PerExampleGrads]) -> PerExampleGrads:
    """`combine` for terms of which some may be `Ragged`."""
    if len(terms) == 1 or not any(isinstance(term, Ragged) for term in terms):
        return combine(terms)
    uses = [(each.term, each.rows) if isinstance(each, Ragged) else (each, _each_its_own(each)) for each in terms]
    kinds = {type(term) for term, _ in uses}
    if kinds <= {OuterProduct, LookupGrads} and all(getattr(term, "groups", 1) == 1 for term, _ in uses):
        (_, rows), *others = uses
        if all(torch.equal(own.index, rows.index) for _, own in others):
            return regrouped(combine([term for term, _ in uses]), 1, RowIndex(rows.index, rows.examples))
        # Every position becomes a row, and the rows of all uses follow one another: as positions of one example first.
        whole = combine([term.replaced(lambda side: side.flatten(0, 1).unsqueeze(0)) for term, _ in uses])
        if type(whole) in kinds:
            index = torch.cat([own.index.repeat_interleave(term.tensors[0].shape[1]) for term, own in uses])
            return Ragged(whole.replaced(lambda side: side.transpose(0, 1)), RowIndex(index, rows.examples))
    return combine(terms)


def _each_its_own(term: PerExampleGrads) -> RowIndex:
    return RowIndex(torch.arange(term.examples, device=term.device), term.examples)


@dataclass(eq=False)
class Ragged(PerExampleGrads):
    """The gradients of a parameter that was used for rows of examples.

    Attributes:
        term: of the rows; not materialised.
        rows: whose they are.
    """

    term: PerExampleGrads
    rows: RowIndex

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.term.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.term.tensors

    @property
    def examples(self) -> int:
        return self.rows.examples

    def _by_buckets(self, answer: Callable[[PerExampleGrads], Tensor], *shape: int) -> Tensor:
        """[B, *shape] of what ``answer`` gives for each bucket's examples; zeros for examples without rows."""
        found = to_float32(self.tensors[0][:0]).new_zeros(self.examples, *shape)
        for examples, length, rows, there in self.rows.buckets():
            found[examples] = answer(regrouped(self.term.pick(rows, there), length, "example"))
        return found

    def closed_form(self, keep: bool) -> NormResult:
        # Where gradients are no larger than what they are made of, examples have so many rows that the direct form is
        # about as fast, and the clipped sum is had from them.
        if keep and 4 * self.examples * self.shape.numel() <= self.tensors[0].nbytes:
            kept = self.per_example()
            return NormResult(squared_norms(kept), kept)
        if isinstance(self.term, OuterProduct) and self.term.groups == 1:
            found = self.rows.gram(self.term)
            if found is not None:
                return found
        squared, absolute = self._by_buckets(_answer, 2).unbind(1)
        return NormResult(squared, absolute=absolute)

    def exact_squared_norms(self) -> Tensor:
        return self._by_buckets(functools.partial(_answer, exact=True), 2)[:, 0]

    def absolute(self) -> Tensor:
        return self._by_buckets(_answer, 2)[:, 1]

    def per_example(self) -> Tensor:
        return self._by_buckets(lambda term: term.per_example(), *self.shape)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.term.weighted_sum(weights[self.rows.index])

    def keep_only(self, keep: Tensor) -> Ragged:
        return Ragged(self.term.keep_only(keep[self.rows.index]), self.rows)

    def split_rows(self, count: int, row_order: str) -> PerExampleGrads:
        return Dense(self.per_example()).split_rows(count, row_order)


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
