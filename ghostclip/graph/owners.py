"""Whose row is whose, measured: which example each row of a gradient belongs to.

A backward is linear in the gradient that it starts from, and multiplying with a power of two commutes with rounding. So
each loss is given a *mark*, a power of two, and a backward starts from the marks in place of ones. A row that only one
example's loss reaches comes out multiplied with exactly that example's mark. A row that several losses reach does not
come out multiplied with any one power of two. Three examples, and a layer that gave four rows:

    examples                  0      1      2
    marks                     1/8    1/2    1/4

    rows                      0      1      2      3
    largest entry, unmarked   4.0    6.0    5.0    3.0
    largest entry, marked     0.5    3.0    0.625  1.125
    ratio                     1/8    1/2    1/8    0.375
    owner                     0      1      0      several: 1.0 of example 0, 2.0 of example 1

So two backwards, a plain one and a marked one, show for every row whether it belongs to the example that it should
belong to if the rows are in order. More examples than marks take a marked one for each digit of their numbers; float16
and gradients of very unequal sizes take one more. A row that belongs elsewhere shows by its marks whose it is, and one
more backward under other marks confirms it: the mean of two rows with marks 2 ** -1 and 2 ** -20 comes out with
about 2 ** -2, which may be a third example's mark, but hardly is under other marks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ghostclip.errors import UnsupportedModelError
from ghostclip.graph.marks import MarkScheme, codes, compared, numbers, numbers_by_dim
from ghostclip.graph.nodes import ACCUMULATE, Edge, shape_of
from ghostclip.graph.reader import backward_to_layers, without_hooks
from ghostclip.graph.rows import Owned, Rows, Subject, rows_in_order
from ghostclip.nn.base import LayerCall
from ghostclip.norms.ragged import RowIndex

__all__ = ["Gradients", "owners", "spreads"]

# {(subject, dimension): `numbers` of the rows along it, [2, rows]; of n backwards, [n, 2, rows]}.
Found = dict[tuple[Subject, int], Tensor]
# {subject: the dimensions that may hold examples, the likeliest first}.
Dims = Mapping[Subject, Sequence[int]]
# {subject: what a layer remembered (of a tensor nothing), and the gradient} of a backward that started from ones.
Gradients = dict[Subject, tuple[tuple[Tensor, ...], Tensor]]


def owners(
    losses: Tensor, calls: Sequence[LayerCall], edges: Sequence[Edge] = (), ends: Sequence[Edge] = (),
    indices: Sequence[RowIndex] = (), half: bool = False, known: Mapping[Subject, int] | None = None,
    gradients: Gradients | None = None, own_code: bool = False,
) -> dict[Subject, Owned]:  # fmt: skip
    """Whose the rows are of the gradients at ``calls`` and ``edges``; the graph is kept.

    Args:
        losses: [B] with B >= 2.
        calls: of the layers behind them.
        edges: tensors of the graph.
        ends: where these backwards end, beside layers; every tensor of ``edges`` is above one of both.
        indices: orders in which rows may be, beside those of `rows_in_order`.
        half: whether some operation computes in float16.
        known: the dimensions that had the examples in an earlier batch, alone of which numbers are taken.
        gradients: takes those of the plain backward, in the order in which they come; None: they aren't held.
        own_code: whether hooks or functions of somebody's own run in these backwards: they may drop or rescale all
            gradients where one is large or isn't finite, which marks alone don't show.

    Raises:
        UnsupportedModelError: code of somebody's own does so.
    """
    subjects: list[Subject] = [*calls, *edges]
    dims, examples = {each: _dims(each, known or {}) for each in subjects}, len(losses)
    sized = {each: dims[each][0] for each in subjects[: len(calls)] or subjects}
    backward = functools.partial(_backward, losses, calls, dims, ends)
    first = backward(torch.ones_like(losses)) if half else {}
    scheme = MarkScheme.of_half(_largest(sized, first), losses.dtype) if half else MarkScheme.of_batch(examples)
    plain = backward(torch.full_like(losses, scheme.plain), gradients)
    while half and _overflows(first, plain):
        scheme = scheme.lowered()
        plain = backward(torch.full_like(losses, scheme.plain))
    sizes = None if half else _sizes(sized, plain, examples)
    marks = scheme.drawn_apart(losses, sizes)
    seen, finite = _stacked([backward(each) for each in marks]), losses.detach().isfinite()
    measured = _Measured(scheme, dims, plain, marks, seen, examples, None if bool(finite.all()) else finite, first)
    found = measured.in_order(indices)
    if None in found.values():
        again = scheme.drawn(losses, sizes)[None]
        measured.add(again, _stacked([backward(each) for each in again]))
    owned = {subject: each or measured.in_any_order(subject) for subject, each in found.items()}
    owned = {subject: measured.with_hidden(subject, each) for subject, each in owned.items()}
    for start in scheme.starts_with_one_odd(losses) if own_code else ():
        with torch.autograd.set_detect_anomaly(False):
            now = backward(start)
        for subject in (each for each, own in owned.items() if measured.touched(each, own, start, now)):
            raise UnsupportedModelError(
                "a hook or torch.autograd.Function of your own changes every example's gradient where one example's is "
                "large or not finite, so examples mix; let it handle each row by itself",
                place=subject if isinstance(subject, LayerCall) else subject[0],
            )
    return owned


def spreads(losses: Tensor, rows: Mapping[Subject, Rows], ends: Sequence[Edge], attempt: int) -> bool:
    """Whether gradients that aren't finite get from one example to others, though these have no part in its rows.

    0 * NaN is NaN: attention with a mask between texts that share a row, or a product with a matrix of zeros and ones,
    gives NaN to all examples beside one that has it, in the forward as in the backward.

    Args:
        losses: [B].
        rows: of layers.
        ends: as `owners` has them.
        attempt: its number. Half of the examples are made NaN, by a binary digit of their numbers, another each time.
    """
    found = {call: each for call, each in rows.items() if isinstance(call, LayerCall)}
    odd = torch.arange(len(losses), device=losses.device) >> attempt % (len(losses) - 1).bit_length() & 1 == 1
    dims: Dims = {call: [each.dim] for call, each in found.items()}
    backward = functools.partial(_backward, losses, list(found), dims, ends)
    ones = torch.ones_like(losses)
    with torch.autograd.set_detect_anomaly(False):
        plain, now = backward(ones), backward(ones.masked_fill(odd, math.nan))
    for call, each in found.items():
        before, after = plain[call, each.dim][0], now[call, each.dim][0]
        others = ~odd[each.owners(len(before), len(losses), losses.device)]
        if each.used is not None:  # what all examples share is nobody's
            others &= each.used
        # Of a row of zeros it isn't known whose it is.
        if bool((before.isfinite() & (before > 0) & ~after.isfinite() & others).any()):
            return True
    return False


def _backward(
    losses: Tensor, calls: Sequence[LayerCall], dims: Dims, ends: Sequence[Edge], seed: Tensor,
    gradients: Gradients | None = None,
) -> Found:  # fmt: skip
    """The numbers of all gradients in a backward that starts from ``seed`` [B]; ``gradients`` gets these, too."""
    found: Found = {}

    def see(subject: Subject, inputs: tuple[Tensor, ...], grad: Tensor | None) -> None:
        if grad is None:
            return
        own = dims[subject]
        by_dim: Any = numbers_by_dim(grad) if len(own) > 1 else {own[0]: numbers(grad, own[0])}
        found.update({(subject, dim): by_dim[dim] for dim in own})
        if gradients is not None:
            gradients[subject] = inputs, grad

    leaves: list[Any] = [node for node, _ in ends if type(node) is ACCUMULATE]
    edges = [subject for subject in dims if not isinstance(subject, LayerCall)]
    hooks = [edge[0].register_prehook(lambda grads, edge=edge: see(edge, (), grads[edge[1]])) for edge in edges]
    try:
        with without_hooks([node.variable for node in leaves]):
            backward_to_layers(losses, calls, see, seed, retain_graph=True, edges=ends)
    finally:
        for hook in hooks:
            hook.remove()
    for key in [(subject, dim) for subject, own in dims.items() for dim in own]:
        found.setdefault(key, torch.zeros((), device=losses.device).expand(2, _size(*key)))
    return found


def _stacked(found: Sequence[Found]) -> Found:
    return {key: torch.stack([each[key] for each in found]) for key in found[0]}


def _dims(subject: Subject, known: Mapping[Subject, int]) -> Sequence[int]:
    """The dimensions that may hold examples, the likeliest first; the one that is known alone."""
    if subject in known:
        return [known[subject]]
    if not isinstance(subject, LayerCall):
        return range(max(1, len(shape_of(subject))))
    dims = subject.layer.example_dims(subject) or [subject.batch_dim]
    return sorted(dims, key=lambda dim: dim != subject.batch_dim)


def _size(subject: Subject, dim: int) -> int:
    return (*(subject.shape if isinstance(subject, LayerCall) else shape_of(subject)), 1)[dim]


def _sizes(subjects: Mapping[Subject, int], plain: Found, examples: int) -> Tensor | None:
    """[n, B], about how large each example's gradients are at subjects whose rows may be in order; None without any."""
    found = [plain[key][0] for key in subjects.items()]
    found = [each.double().view(examples, -1).amax(1) for each in found if len(each) and not len(each) % examples]
    return torch.stack(found) if found else None


def _overflows(first: Found, plain: Found) -> bool:
    """Whether some row that was finite in a ``first`` backward isn't in another one."""
    return any(bool((each[0].isfinite() & ~plain[key][0].isfinite()).any()) for key, each in first.items())


def _dims_of(found: Sequence[Owned], most: int) -> tuple[int, ...]:
    """The dimensions in which as many examples as in any are shown; () where that is one.

    Where one example is far larger than all others, rows of a wrong dimension may all look like its own.
    """
    dims = sorted({each.rows.dim for each in found if each.rows is not None and each.examples == most > 0})
    return tuple(dims) if len(dims) > 1 else ()


def _largest(subjects: Mapping[Subject, int], plain: Found) -> float:
    """The largest entry of all gradients that is finite; 0 where none is."""
    found = [plain[key][0] for key in subjects.items()]
    return max([float(each.nan_to_num(0, 0, 0).max()) for each in found if len(each)], default=0.0)


@dataclass
class _Measured:
    """The numbers of rows in a plain backward and in some marked ones, and what they show.

    Attributes:
        scheme: whose marks they are.
        dims: of each subject, the dimensions that may hold examples.
        plain: numbers in the plain backward.
        marks: that the others started from, [n, B].
        seen: numbers in these.
        examples: B.
        finite: [B], whose loss is; None where all are.
        first: numbers in a backward from ones, in float16; {} else.
    """

    scheme: MarkScheme
    dims: Dims
    plain: Found
    marks: Tensor
    seen: Found
    examples: int
    finite: Tensor | None
    first: Found

    def add(self, marks: Tensor, seen: Found) -> None:
        """Adds marked backwards."""
        self.marks = torch.cat([self.marks, marks])
        self.seen = {key: torch.cat([each, seen[key]]) for key, each in self.seen.items()}

    def in_order(self, indices: Sequence[RowIndex]) -> dict[Subject, Owned | None]:
        """What the subjects' rows are that are in order, or in that of an index; None for those that are not.

        All that may have as many rows in one order are compared at once.
        """
        candidates = [(subject, rows) for subject in self.dims for rows in self._candidates(subject, indices)]
        alike: dict[Any, list[int]] = {}
        for number, (subject, rows) in enumerate(candidates):
            base = self.plain[subject, rows.dim]
            alike.setdefault((base.shape, base.dtype, rows.order), []).append(number)
        found: dict[int, Owned | None] = {}
        for places in alike.values():
            found |= dict(zip(places, self._fitting([candidates[each] for each in places]), strict=True))
        fitting: dict[Subject, list[Owned]] = {subject: [] for subject in self.dims}
        for number, (subject, _) in enumerate(candidates):
            if (owned := found[number]) is not None:
                fitting[subject].append(owned)
        return {subject: self._chosen(subject, own) for subject, own in fitting.items()}

    def _fitting(self, candidates: Sequence[tuple[Subject, Rows]]) -> list[Owned | None]:
        """What some subjects' rows are if they are in one order, each with as many; None for those that are not.

        Rows that aren't finite fit any marks. They are not in order where they would be those of an example whose loss
        is finite, beside one whose loss is not: an expert that is sent the tokens [1, 1, 2, 3] of four examples, of
        which those of example 1 are NaN, has rows in order but for the first one, which would leave out example 0.
        """
        base = torch.stack([self.plain[subject, rows.dim] for subject, rows in candidates])
        now = torch.stack([self.seen[subject, rows.dim] for subject, rows in candidates], 1)
        owner = candidates[0][1].owners(base.shape[-1], self.examples, self.marks.device)
        off, loose, clear = compared(base, now, self.marks[:, None, owner], self.scheme)
        wrong = off.any(0).any(1)
        if self.finite is not None and not isinstance(candidates[0][1].order, RowIndex):
            wrong |= (~base[:, 0].isfinite() & self.finite[owner]).any(1)
        none = owner.new_zeros(len(base), self.examples)
        counts = none.index_add_(1, owner, clear.all(0).to(none.dtype))
        zero = ~(base[:, 0].any(1) | now[:, :, 0].any(2).any(0))
        whole = clear.all(0).all(1)
        found = torch.stack([wrong, counts.count_nonzero(1), zero, loose.any(0).any(1), whole], 1).tolist()
        return [
            None if is_wrong else Owned(rows, 0 if zero else shown, bool(zero), bool(loose), whole=bool(whole))
            for (_, rows), (is_wrong, shown, zero, loose, whole) in zip(candidates, found, strict=True)
        ]

    def _chosen(self, subject: Subject, fitting: Sequence[Owned]) -> Owned | None:
        """What a subject's rows are, given those of its orders that fit."""
        first = subject, self.dims[subject][0]
        if fitting and fitting[0].zero:
            return fitting[0]
        if not fitting and not bool(self.plain[first][0].any() or self.seen[first][:, 0].any()):
            return Owned(None, zero=True)
        found = [each for each in fitting if each.examples]  # where none is finite, any marks fit
        said = [each for each in found if not each.is_regular]
        best = said[0] if said else max(found, key=lambda each: each.examples, default=None)
        return best and replace(best, ambiguous=len(found) > 1, crossed=_dims_of(found, best.examples))

    def _candidates(self, subject: Subject, indices: Sequence[RowIndex]) -> Iterator[Rows]:
        """What a subject's rows may be."""
        for dim in self.dims[subject]:
            size = _size(subject, dim)
            yield from (Rows(dim, order) for order in rows_in_order(size, self.examples))
            yield from (Rows(dim, index) for index in indices if len(index) == size)

    def in_any_order(self, subject: Subject) -> Owned:
        """Whose a subject's rows are, by the marks that they came out with, along the dimension that shows most."""
        found = [self._one_by_one(subject, dim) for dim in self.dims[subject]]
        fitting = [each for each in found if each is not None]
        best = max(fitting, key=lambda each: each.examples, default=Owned(None))
        best = replace(best, crossed=_dims_of(fitting, best.examples))
        # Where no row could be read, all are in order, if they can be; `with_hidden` notes that none was shown.
        if not best.unread:
            return best
        candidates = ((subject, rows) for rows in self._candidates(subject, ()))
        in_order = (each for one in candidates if (each := self._fitting([one])[0]) is not None)
        return next(in_order, best)

    def with_hidden(self, subject: Subject, own: Owned) -> Owned:
        """What is known of a subject, and which of its rows are hidden: zero, tiny or not finite, so that they fit any.

        A row that was shown beside them to be its place's example's is so. A hidden one need not be: an expert that is
        sent the tokens [1, 1, 2, 3] of four examples has the rows of four in order, but for the first one.
        """
        if own.zero and any(bool(self.first[subject, dim][0].any()) for dim in self.dims[subject] if self.first):
            return replace(own, zero=False, too_small=True)
        if own.rows is None or own.zero or own.whole:
            return own
        base, seen = self.plain[subject, own.rows.dim], self.seen[subject, own.rows.dim]
        owner = own.rows.owners(base.shape[-1], self.examples, self.marks.device)
        clear = compared(base, seen, self.marks[:, owner], self.scheme).clear.all(0)
        hidden = base[0, ~clear]
        first = self.first[subject, own.rows.dim][0, ~clear] if self.first else None
        too_small = first is not None and bool((hidden.isfinite() & (first > 0)).any())
        finite = hidden.isfinite()
        return replace(own, shown_rows=clear, too_small=too_small, odd=not bool(finite.all()), blank=bool(finite.any()))

    def touched(self, subject: Subject, own: Owned, start: Tensor, now: Found) -> bool:
        """Whether what was done to some examples changed rows of others.

        Args:
            subject, own: whose the rows are.
            start: [B], what a backward started from: the scheme's ``plain`` for those that nothing was done to.
            now: numbers in this backward.
        """
        if own.rows is None:
            return False
        base = self.plain[subject, own.rows.dim]
        owner = own.rows.owners(base.shape[1], self.examples, start.device)
        off = compared(base, now[subject, own.rows.dim], start[owner], self.scheme).off
        return bool((off & (start == self.scheme.plain)[owner]).any())

    def _one_by_one(self, subject: Subject, dim: int) -> Owned | None:
        """Whose each row along a dimension is; None where some row has several owners.

        A row of two examples may look like one of a third under some marks, not under all of several backwards.
        """
        base, seen = self.plain[subject, dim], self.seen[subject, dim]
        by_code, order = codes(self.marks / self.scheme.plain).sort()
        # The example that came out with such marks, or some example, whose marks these don't fit.
        owner = order[torch.searchsorted(by_code, codes(seen[:, 0] / base[0])).clamp(max=self.examples - 1)]
        off, loose, clear = (each.any(0) for each in compared(base, seen, self.marks[:, owner], self.scheme))
        if bool(off.any()):
            return None
        used = None if bool(clear.all()) else clear
        rows = Rows(dim, RowIndex(torch.where(clear, owner, 0), self.examples, used))
        return Owned(rows, len(owner[clear].unique()), loose=bool(loose.any()), whole=used is None)
