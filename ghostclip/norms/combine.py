"""One parameter used several times: its per-example gradient is the sum over its uses, cross terms and all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .convolution import ConvGrads
from .outer import OuterProduct, chunks, gram_is_reliable, reliable
from .reduce import Sizes, hidden
from .rows import BagGrads, LookupGrads, lookup_squared_norms
from .term import (
    Dense,
    Kind,
    NormResult,
    PerExampleGrads,
    Strategy,
    StrategyRun,
    squared_norms,
    to_float32,
)

__all__ = ["Tied", "combine", "cross"]

# Two uses cancel where the squared norm of their sum is below this many times `outer.CANCELLATION` of their own squared
# norms' sum: 0.1 in float32, which leaves 1e-6 of the norm to rounding. Their inner product may have cancelled by
# itself, where positions cancel in each of the uses: it is trusted where that much is left of what it is added up from.
CANCELLING_USES = 10.0


def combine(terms: Sequence[PerExampleGrads]) -> PerExampleGrads:
    """The term of a parameter used several times: concatenation along positions wherever the uses are of one kind."""
    if len(terms) == 1:
        return terms[0]
    terms = [_as_positions(term) for term in terms]
    outers = [term for term in terms if isinstance(term, OuterProduct) and term.groups == 1]
    rows = [term for term in terms if isinstance(term, LookupGrads)]
    widths = {term.left.shape[2] for term in outers}, {term.width for term in rows}
    alike = all(len(each) <= 1 for each in widths) and (not outers or widths[1] <= {terms[0].shape[-1]})
    if len(outers) + len(rows) == len(terms) and alike:
        if not rows:
            return _concatenated(outers)
        if not outers:
            return _concatenated(rows)
        return Tied(_concatenated(outers), _concatenated(rows))
    total, absolute = terms[0].per_example(), _absolute(terms[0])
    for term in terms[1:]:
        total, absolute = total + term.per_example(), absolute + _absolute(term)
    return Dense(total, absolute * len(terms))


def _absolute(term: PerExampleGrads) -> Tensor:
    """`PerExampleGrads.absolute`, or what it is where there is one part only."""
    found = term.absolute()
    if found is not None:
        return found
    answer = term.closed_form(False)
    return squared_norms(term.per_example()) if answer is None else answer.squared_norms


def _as_positions(term: PerExampleGrads) -> PerExampleGrads:
    """The term as one gradient a position, where it can be seen so."""
    if isinstance(term, ConvGrads) and term.geometry.groups == 1:
        return term.outer()
    return term.rows() if isinstance(term, BagGrads) else term


def _concatenated(terms: Sequence[Kind]) -> Kind:
    """Terms of one kind, whose tensors are [B, positions, ...], as one."""
    if len(terms) == 1:
        return terms[0]
    found = copy.copy(terms[0])
    for name in found.TENSORS:
        setattr(found, name, torch.cat([getattr(term, name) for term in terms], dim=1))
    if isinstance(found, OuterProduct):
        found.several = True
    return found


def cross(outer: OuterProduct, rows: LookupGrads) -> tuple[Tensor, Tensor]:
    """Inner products [B] of both gradients of a tied table, ``sum_{s,t} left[t, index[s]] right[t] . grad[s]``.

    The table's rows are the outputs of the head, so only the columns of ``left`` that the indices name take part.

    Returns:
        The products, and at least the sum of the absolute values that they are added up from.
    """
    left, right, gradients = to_float32(outer.left), to_float32(outer.right), to_float32(rows.gradients)
    out, sizes = left.new_empty(left.shape[0]), left.new_empty(left.shape[0])
    positions, lookups = left.shape[1], rows.indices.shape[1]
    for part in chunks(left.shape[0], 3 * positions * lookups * left.element_size()):
        picked = left[part].gather(2, rows.indices[part].unsqueeze(1).expand(-1, positions, -1))
        lengths = right[part].norm(dim=2).unsqueeze(1) @ picked.abs() @ gradients[part].norm(dim=2).unsqueeze(2)
        sizes[part] = lengths.flatten()
        picked *= torch.bmm(right[part], gradients[part].mT)
        out[part] = picked.sum(dim=(1, 2))
    return out, sizes


@dataclass(eq=False)
class Tied(PerExampleGrads):
    """A table that is both an embedding (``rows``) and the weight of a linear head (``outer``)."""

    outer: OuterProduct
    rows: LookupGrads

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.outer.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.outer.tensors, *self.rows.tensors)

    def _joined(self, outer: NormResult) -> NormResult:
        """Squared norms of the sums of both uses; where the two cancel, of the gradients themselves."""
        looked_up, _ = lookup_squared_norms(self.rows.indices, to_float32(self.rows.gradients))
        apart = outer.squared_norms + looked_up
        products, scale = cross(self.outer, self.rows)
        squared, scale = apart + 2 * products, CANCELLING_USES * apart + scale
        squared = reliable(squared, scale, partial(self._measured_again, squared, scale))
        # For each lookup, products of both uses may hide as much as those of the head with itself, or with ones.
        ones = self.outer.left.shape[1] * self.rows.width * hidden(squared.dtype)
        sizes = self.outer.sizes() if outer.sizes is None else outer.sizes
        lost = (self.outer.hidden(sizes) + ones) * (1 + 2 * self.rows.indices.shape[1])
        return NormResult(squared, absolute=self.absolute(sizes) + lost)

    def exact_squared_norms(self) -> Tensor:
        rows = [squared_norms(self.pick(slice(at, at + 1)).per_example()) for at in range(self.examples)]
        return torch.cat(rows) if rows else to_float32(self.outer.left).new_zeros(0)

    def _measured_again(self, squared: Tensor, scale: Tensor) -> Tensor:
        """``squared`` [B] with what `_joined` can't rely on replaced; one gradient is materialised at a time."""
        squared = squared.clone()
        for at in (~gram_is_reliable(squared, scale)).nonzero().flatten().tolist():
            squared[at] = squared_norms(self.pick(slice(at, at + 1)).per_example())[0]
        return squared

    def closed_form(self, keep: bool) -> NormResult | None:
        outer = self.outer.closed_form(False)
        return None if outer is None else self._joined(outer)

    def candidates(self) -> dict[str, Strategy]:
        return {name: Strategy(way.family, partial(Tied._by, way.run), way.flops)
                for name, way in self.outer.candidates().items()}  # fmt: skip

    @staticmethod
    def _by(run: StrategyRun, term: Tied, /, keep: bool = False) -> NormResult:
        return term._joined(run(term.outer))

    def absolute(self, sizes: Sizes | None = None) -> Tensor:
        return 2 * (self.outer.squared_sizes(sizes) + squared_norms(self.rows.gradients) * self.rows.indices.shape[1])

    def per_example(self) -> Tensor:
        return self.outer.per_example() + self.rows.per_example()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.outer.weighted_sum(weights) + self.rows.weighted_sum(weights)

    def replaced(self, function: Callable[[Tensor], Tensor]) -> Tied:
        return Tied(self.outer.replaced(function), self.rows.replaced(function))

    def split_rows(self, count: int, row_order: str) -> Tied:
        outer = self.outer.split_rows(count, row_order)
        assert isinstance(outer, OuterProduct)
        return Tied(outer, self.rows.split_rows(count, row_order))
