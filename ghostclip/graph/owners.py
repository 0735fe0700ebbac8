"""Whose row is whose, measured: which example each row of a gradient belongs to.

A backward is linear in the gradient that it starts from, and multiplying with a power of two commutes with rounding. So
each loss is given a *mark*, a power of two, and a backward starts from the marks in place of ones. A row that only one
example's loss reaches comes out multiplied with exactly that example's mark; a row that several losses reach does not
come out multiplied with any one power of two. So two backwards, a plain one and a marked one, show for every row
whether it belongs to the example that it should belong to (three, for more examples than there are marks). Where it
doesn't, the marks that it came out with show whose it is, and one more backward confirms it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ghostclip.graph.marks import Marks, Numbers, compared, numbers
from ghostclip.graph.nodes import Edge, shape_of
from ghostclip.graph.reader import first_pass, without_hooks
from ghostclip.nn.base import LayerCall
from ghostclip.norms.ragged import RowIndex, RowOrder

__all__ = ["Owned", "Rows", "Subject", "owners", "rows_in_order"]

# A layer's use, by the gradient at its pre-activation; or a tensor of the graph.
Subject = LayerCall | Edge
Key = tuple[Subject, int]
# Numbers of gradients in n backwards, [n, rows] each, and the marks [n, B] that these started from.
Marked = tuple[dict[Key, Numbers], Tensor]


@dataclass(frozen=True)
class Rows:
    """How the rows of a gradient along one dimension belong to the examples.

    Attributes:
        dim: the dimension.
        order: "example" where the rows of one example lie together, "row" where every B-th row is one of the same
            example, and an index for any other order.
    """

    dim: int
    order: RowOrder

    def count(self, size: int, examples: int) -> int:
        """Rows of each example; an index says by itself."""
        return 1 if isinstance(self.order, RowIndex) or not examples else size // examples

    def owners(self, size: int, examples: int, device: torch.device) -> Tensor:
        """The example of each of so many rows, [size]."""
        return self.order.index if isinstance(self.order, RowIndex) else _in_order(size, examples, self.order, device)


@dataclass(frozen=True)
class Owned:
    """What marks showed of one subject.

    Attributes:
        rows: how its rows belong to the examples; None where rows of every dimension belong to several.
        zero: all of its gradient is zero, so that nothing was shown.
        shown: rows of at least two examples were shown.
        open: the rows fit, but mixing isn't ruled out: they fit to within `Marks.tolerance` only, so that small
            examples may have a part in the rows of a large one; or rows of a single example were shown.
        unclear: the rows fit another order or dimension as well, as where only a diagonal isn't zero.
        unread: no row is finite; ``rows`` are only those that it may have.
    """

    rows: Rows | None
    zero: bool = False
    shown: bool = False
    open: bool = False
    unclear: bool = False
    unread: bool = False

    def owners(self) -> int:
        """How many examples have readable rows that were found one by one."""
        assert self.rows is not None
        assert isinstance(self.rows.order, RowIndex)
        order = self.rows.order
        return len((order.index if order.used is None else order.index[order.used]).unique())

    @property
    def is_regular(self) -> bool:
        """Whether every example has as many rows, in order."""
        return self.rows is not None and not isinstance(self.rows.order, RowIndex)

    @property
    def is_shared(self) -> bool:
        """Whether several examples have a part in the rows, whichever dimension they are taken along."""
        return self.rows is None and not self.zero


def owners(
    losses: Tensor, calls: Sequence[LayerCall], edges: Sequence[Edge] = (), leaves: Sequence[Tensor] = (),
    indices: Sequence[RowIndex] = (), thorough: bool = False, half: bool = False,
    tried: Mapping[Subject, Sequence[int]] = MappingProxyType({}),
) -> dict[Subject, Owned]:  # fmt: skip
    """Whose the rows are of the gradients at ``calls`` and ``edges``; the graph is kept.

    Two backwards show it where every example has as many rows in order. Where not, a few more do.

    Args:
        losses: [B] with B >= 2.
        calls: of the layers behind them.
        edges: tensors of the graph.
        leaves: parameters that are used outside of layers, to which these backwards must go, too.
        indices: orders in which rows may be, beside those of `rows_in_order`.
        thorough: look at every dimension at once, which takes fewer backwards where rows are in no order.
        half: whether some operation computes in float16, which has few powers of two.
        tried: dimensions along which no order fits.
    """
    run = _Measurement(losses, calls, edges, leaves, half)
    subjects: list[Subject] = [*calls, *edges]
    first = {each: _first_dims(each, len(losses)) for each in subjects}
    dims = {each: _all_dims(each) for each in subjects} if thorough else first
    plain = run.numbers(dims, run.plain())
    marked = run.marked(dims, run.sizes(plain, first))
    found = {
        # No order fits along these: in the call before this one, marks refuted all of them.
        subject: run.in_order(
            subject, [d for d in dims[subject] if d not in tried.get(subject, ())], plain, marked, indices
        )
        for subject in subjects
    }
    left = [subject for subject, each in found.items() if each is None]
    known = {subject: each for subject, each in found.items() if each is not None}
    if not left:
        return known
    if not thorough:
        calls = [each for each in left if isinstance(each, LayerCall)]
        edges = [each for each in left if not isinstance(each, LayerCall)]
        return known | owners(losses, calls, edges, leaves, indices, True, half, {each: first[each] for each in left})
    again = run.marked_once({subject: dims[subject] for subject in left}, run.sizes(plain, first))
    for subject in left:
        ways = [run.one_by_one(subject, dim, plain, marked, again) for dim in dims[subject]]
        best = max([way for way in ways if way is not None], key=Owned.owners, default=Owned(None))
        # Where no row is finite, all are taken to be in order, if they can be: each example has what isn't finite.
        dark = best.rows is not None and not best.owners() and run.unread(subject, dims[subject], plain)
        known[subject] = dark or best
    return known


def rows_in_order(size: int, examples: int) -> list[str]:
    """In which orders so many rows may be those of the examples, as many of each."""
    if not examples or size % examples or not size:
        return []
    return ["example", "row"] if size > examples else ["example"]


def _hides(largest: Tensor, rows: Rows, examples: int) -> bool:
    """Whether others may have a part in rows, where those of a single example were shown.

    An example whose own rows are all infinite or nan has none: they would be, too.
    """
    owners, finite = rows.owners(len(largest), examples, largest.device), largest.isfinite()
    all_rows, spoilt = (torch.bincount(each, minlength=examples) for each in (owners, owners[~finite]))
    partly = (spoilt > 0) & (spoilt < all_rows)
    return bool(partly.any()) or int((spoilt < all_rows).sum()) > 1


@functools.lru_cache(maxsize=64)
def _in_order(size: int, examples: int, order: str, device: torch.device) -> Tensor:
    return RowIndex.in_order(size, examples, order, device)


def _candidates(
    dim: int, size: int, examples: int, indices: Sequence[RowIndex], device: torch.device
) -> Iterator[tuple[Rows, Tensor]]:
    """What rows along a dimension may be, each with the example of every row, [size]."""
    for order in rows_in_order(size, examples):
        yield Rows(dim, order), _in_order(size, examples, order, device)
    for index in indices:
        if len(index) == size:
            yield Rows(dim, index), index.index


def _shape(subject: Subject) -> torch.Size:
    return subject.shape if isinstance(subject, LayerCall) else shape_of(subject)


def _all_dims(subject: Subject) -> list[int]:
    """The dimensions that may hold examples, the likeliest first."""
    if isinstance(subject, LayerCall):
        dims = list(subject.layer.example_dims(subject)) or [subject.batch_dim]
        return sorted(dims, key=lambda dim: dim != subject.batch_dim)
    return list(range(max(1, len(shape_of(subject)))))


def _first_dims(subject: Subject, examples: int) -> list[int]:
    """Those along which all examples may have as many rows; and the likeliest."""
    shape = _shape(subject) or (1,)
    return [dim for place, dim in enumerate(_all_dims(subject)) if place == 0 or not shape[dim] % examples]


class _Measurement:
    """Backwards that start from given marks, and what they leave at each subject.

    Attributes:
        marks: that fit the narrowest type of any gradient.
        reached: subjects at which some gradient wasn't zero.
    """

    def __init__(
        self, losses: Tensor, calls: Sequence[LayerCall], edges: Sequence[Edge], leaves: Sequence[Tensor], half: bool
    ) -> None:
        self._losses, self._calls, self._leaves = losses, calls, list(leaves)
        self._sized: Sequence[Subject] = calls or edges
        self._edges: dict[Any, list[int]] = {}
        for node, number in edges:
            self._edges.setdefault(node, []).append(number)
        self.reached = set[Subject]()
        self.marks = Marks()
        if half:
            # float16 has few powers of two: the gradients are brought near 2 ** 8 first.
            dims: dict[Subject, list[int]] = {each: [_all_dims(each)[0]] for each in self._sized}
            found = self.numbers(dims, torch.ones_like(losses))
            sizes = torch.cat([largest.flatten() for largest, _ in found.values()] or [losses.new_zeros(1)])
            largest = float(sizes[sizes.isfinite()].max()) if bool(sizes.isfinite().any()) else 0.0
            most = math.frexp(torch.finfo(losses.dtype).max)[1] - 1
            power = 0 if largest == 0 else min(8 - math.frexp(largest)[1], most)
            self.marks = Marks(8, power - 8, 2.0**-7, 2.0**-8, 2.0**power)

    def plain(self) -> Tensor:
        """What an unmarked backward starts from, [B]."""
        return torch.full_like(self._losses, self.marks.plain)

    def sizes(self, plain: Mapping[Key, Numbers], dims: Mapping[Subject, Sequence[int]]) -> Tensor | None:
        """[n, B], about how large each example's gradients are at subjects whose rows may be in order.

        None in float16, or where there are none.
        """
        examples = len(self._losses)
        found = [plain[subject, dims[subject][0]][0] for subject in self._sized]
        found = [each.double().view(examples, -1).amax(1) for each in found if len(each) and not len(each) % examples]
        return torch.stack(found) if found and self.marks.floor is None else None

    def marked(self, dims: Mapping[Subject, Sequence[int]], sizes: Tensor | None) -> Marked:
        """Numbers in backwards that start from marks, in as many as it takes to tell any two examples apart."""
        return self._under(self.marks.drawn_apart(self._losses, sizes), dims)

    def marked_once(self, dims: Mapping[Subject, Sequence[int]], sizes: Tensor | None) -> Marked:
        """Numbers in one backward that starts from marks."""
        return self._under(self.marks.drawn(self._losses, sizes)[None], dims)

    def _under(self, marks: Tensor, dims: Mapping[Subject, Sequence[int]]) -> Marked:
        """Numbers in a backward from each of some marks, [n, B]."""
        found = [self.numbers(dims, each) for each in marks]
        keys = [(subject, dim) for subject, each in dims.items() for dim in each]
        return {
            key: (torch.stack([each[key][0] for each in found]), torch.stack([each[key][1] for each in found]))
            for key in keys
        }, marks

    def in_order(
        self, subject: Subject, dims: Sequence[int], plain: Mapping[Key, Numbers], marked: Marked,
        indices: Sequence[RowIndex],
    ) -> Owned | None:  # fmt: skip
        """What a subject's rows are if they are in order, or in that of an index; None where they are not."""
        losses, (seen, marks), ways = self._losses, marked, list[tuple[Rows, Tensor, Tensor]]()
        floor, rounding = self.floor(subject), self.rounding()
        for dim in dims:
            base = plain[subject, dim]
            for rows, index in _candidates(dim, len(base[0]), len(losses), indices, losses.device):
                off, loose, clear = compared(base, seen[subject, dim], marks[:, index], floor, self.marks, rounding)
                if not bool(off.any()):
                    ways.append((rows, index[clear.all(0)], loose))
        if subject not in self.reached:
            return Owned(ways[0][0] if ways else None, zero=True)
        ways = [way for way in ways if len(way[1])]  # a dimension along which no row is finite fits any marks
        if not ways:
            return None
        said = [way for way in ways if isinstance(way[0].order, RowIndex)]
        way = said[0] if said else max(ways, key=lambda way: len(way[1].unique())) if len(ways) > 1 else ways[0]
        best, own, loose = way
        several = bool((own != own[:1]).any())
        hidden = bool(loose.any()) or (not several and _hides(plain[subject, best.dim][0], best, len(losses)))
        return Owned(best, shown=several, open=hidden, unclear=len(ways) > 1)

    def unread(self, subject: Subject, dims: Sequence[int], plain: Mapping[Key, Numbers]) -> Owned | None:
        """A subject's rows as they would be in order, of which nothing is known; None where that can't be."""
        for dim in dims:
            if orders := rows_in_order(len(plain[subject, dim][0]), len(self._losses)):
                return Owned(Rows(dim, orders[0]), open=True, unread=True)
        return None

    def floor(self, subject: Subject) -> float:
        """The size up to which rows of a subject show nothing."""
        if self.marks.floor is not None:
            return self.marks.floor
        node = subject if isinstance(subject, LayerCall) else subject[0]._input_metadata[subject[1]]
        dtype = torch.float32 if node.dtype == torch.bfloat16 else node.dtype
        return torch.finfo(dtype).tiny * 2.0**60

    def rounding(self) -> float:
        """What share of its largest entry a row may be off that one example alone has a part in."""
        return 0.0 if self.marks.floor is None else self.marks.tolerance

    def numbers(self, dims: Mapping[Subject, Sequence[int]], seed: Tensor) -> dict[Key, Numbers]:
        """{(subject, dimension): `numbers`} of the gradients of a backward that starts from ``seed`` [B]."""
        found: dict[Key, Numbers] = {}

        def look(subject: Subject, grad: Tensor | None) -> None:
            if grad is None or subject not in dims:
                return
            for dim in dims[subject]:
                found[subject, dim] = numbers(grad, dim)
            if subject not in self.reached and bool((found[subject, dims[subject][0]][0] != 0).any()):
                self.reached.add(subject)

        def at_node(node: Any, wanted: Sequence[int], grads: tuple[Tensor | None, ...]) -> None:
            for number in wanted:
                look((node, number), grads[number])

        hooks = [
            node.register_prehook(functools.partial(at_node, node, wanted)) for node, wanted in self._edges.items()
        ]
        try:
            with without_hooks(self._leaves):
                first_pass(
                    self._losses, self._calls, lambda call, inputs, grad: look(call, grad), seed,
                    retain_graph=True, edges=self._leaves,
                )  # fmt: skip
        finally:
            for hook in hooks:
                hook.remove()
        nothing = torch.zeros((), device=self._losses.device)
        for subject, each in dims.items():
            for dim in each:
                if (subject, dim) not in found:
                    rows = nothing.expand((*_shape(subject), 1)[dim] if len(_shape(subject)) else 1)
                    found[subject, dim] = rows, rows
        return found

    def one_by_one(
        self, subject: Subject, dim: int, plain: Mapping[Key, Numbers], marked: Marked, again: Marked
    ) -> Owned | None:
        """Whose each row is, by the marks that it came out with; None where some row has several owners.

        Args:
            subject, dim: whose rows, along which dimension.
            plain, marked: their numbers in a plain backward, and in some that together tell any two examples apart.
            again: in one more. A row of two examples may look like one of a third under some marks, not under these,
                too.
        """
        base, (largest, projected), examples = plain[subject, dim], marked[0][subject, dim], len(self._losses)
        codes, order = _codes(marked[1] / self.marks.plain).sort()
        # The example that came out with such marks, or some example, whose marks these don't fit.
        owner = order[torch.searchsorted(codes, _codes(largest / base[0])).clamp(max=examples - 1)]
        seen = tuple(map(torch.cat, zip((largest, projected), again[0][subject, dim], strict=True)))
        marks = torch.cat([marked[1], again[1]])[:, owner]
        found = compared(base, seen, marks, self.floor(subject), self.marks, self.rounding())  # type: ignore[arg-type]
        off, loose, clear = (each.any(0) for each in found)
        if bool(off.any()):
            return None
        count = len(owner[clear].unique())
        rows = Rows(dim, RowIndex(torch.where(clear, owner, 0), examples, None if bool(clear.all()) else clear))
        return Owned(rows, shown=count > 1, open=count < 2 or bool(loose.any()))


def _codes(ratios: Tensor) -> Tensor:
    """One number for the powers of two that are nearest to some ratios, [n, ...]; [...]."""
    power = ratios.double().log2().round().nan_to_num(0, 0, 0).clamp(-255, 255).to(torch.int64) + 256
    code = torch.zeros_like(power[0])
    for each in power:
        code = code * 512 + each
    return code
