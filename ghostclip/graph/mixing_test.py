"""The proof by factors that examples do not mix, layer by layer.

The gradient of one example's loss at a tensor is zero on every row that belongs to another example, and so a row's
gradient grows with the factor its own example's loss is given, and with no other. A few backwards from losses given
factors that tell the examples apart show where the examples are, or that they mix. Numbers that are not finite show
nothing: a decision is made by all others, whichever examples they belong to, or it is not sure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ghostclip.graph.nodes import shape_of
from ghostclip.graph.reader import first_pass
from ghostclip.nn.base import LayerCall
from ghostclip.norms.ragged import RowIndex, RowOrder

__all__ = [
    "EXACT",
    "NOISE",
    "TOLERANCE",
    "USUAL",
    "Rounding",
    "Verdict",
    "check_mixing",
    "projected",
    "row_orders",
    "verdicts",
]

# What share of a row's gradient may differ from what its example's factor makes of it, before the row counts as
# another's. Factors are powers of two, which scale every rounding error along with the gradient in any floating point
# format, so that only sums in a varying order leave a difference.
TOLERANCE = 1e-3
# Factors 1, 1/2, 1/4 and 1/8 tell four examples apart; none is above 1, lest what is finite without it overflow.
BASE = 4
# Below its normal numbers float16 scales no rounding error along; what seems to mix is tried on larger gradients.
LIFTS = (2.0**10, 2.0**20)
# A row this much smaller than the largest of its own example may be rounding where there should be nothing. One that
# follows its factor shows whose it is all the same; one that doesn't shows nothing.
NOISE = {torch.float64: 1e-10, torch.float32: 1e-3}
# Below the smallest normal number no factor scales rounding errors along, in gradients and in all they are made of:
# rows not this many times as large may be rounding, too. (float16 is lifted instead.)
ABOVE_SUBNORMAL = 2.0**14


@dataclass(frozen=True)
class Rounding:
    """What may be rounding in gradients for losses with factors.

    Attributes:
        share: of a row, by which it may differ from what its factor makes of it.
        noise: {dtype: share} of an example's largest row, up to which its rows aren't judged.
    """

    share: float
    noise: Mapping[torch.dtype, float]


USUAL = Rounding(TOLERANCE, NOISE)
# Where it is known that rows of two examples meet: a factor, a power of two, scales what is of one example exactly.
EXACT = Rounding(0.0, dict.fromkeys(NOISE, 0.0))


def check_mixing(
    losses: Tensor,
    calls: Sequence[LayerCall],
    pending: Sequence[LayerCall],
    indices: Sequence[RowIndex] = (),
    rounding: Rounding = USUAL,
) -> dict[LayerCall, Verdict]:
    """How rows of the ``pending`` among ``calls`` are grouped; calls that no gradient reached are left out."""
    found = verdicts(losses, calls, _batch_dims(pending), indices=indices, rounding=rounding)
    most = 2.0 ** (math.frexp(torch.finfo(losses.dtype).max)[1] - 1)
    for lift in LIFTS if any(call.dtype == torch.float16 for call in calls) else ():
        if mixing := [call for call, verdict in found.items() if verdict.best is None]:
            again = verdicts(losses, calls, _batch_dims(mixing), min(lift, most), indices, rounding)
            # What overflowed for the lift alone shows nothing.
            found |= {call: v for call, v in again.items() if v.best is not None and not v.spoilt}
    return {call: verdict for call, verdict in found.items() if verdict.reached}


def _batch_dims(calls: Sequence[LayerCall]) -> dict[Any, list[int]]:
    return {call: [call.batch_dim] for call in calls}


def row_orders(rows: int, examples: int, indices: Sequence[RowIndex]) -> list[RowOrder]:
    """In which ways so many rows may be those of the examples; with ``indices``, one for each or as these say."""
    if not indices:
        return ["example", "row"] if rows > examples else ["example"]
    one_each: list[RowOrder] = ["example"] if rows == examples else []
    return [*one_each, *(index for index in indices if len(index) == rows)]


def verdicts(
    losses: Tensor,
    calls: Sequence[LayerCall],
    subjects: Mapping[Any, list[int]],
    lift: float = 1.0,
    indices: Sequence[RowIndex] = (),
    rounding: Rounding = USUAL,
) -> dict[Any, Verdict]:
    """What is found of each of the subjects.

    Args:
        losses: [B].
        calls: of layers with rows for each example; by these it is known how large an example's gradients are.
        subjects: some of ``calls``, or edges, with the dimensions that may hold examples.
        lift: a power of two, that losses are multiplied with.
        indices: by which rows may belong to examples.
        rounding: what may be rounding.
    """
    base = _sketches(losses, {**_batch_dims(calls), **subjects}, torch.full_like(losses, lift), {})
    scale, finite = torch.zeros(losses.shape, dtype=torch.float64, device=losses.device), losses.detach().isfinite()
    for (subject, _), sketch in base.items():
        if not isinstance(subject, LayerCall):
            continue
        *_, last = *row_orders(len(sketch.rows), len(losses), indices), ""
        if len(sketch.rows) == len(losses):
            scale = torch.maximum(scale, _sizes(sketch.rows))
        elif isinstance(last, RowIndex):
            scale = scale.scatter_reduce(0, last.index, _sizes(sketch.rows), "amax")
    tests: dict[Any, list[RowTest]] = {subject: [] for subject in subjects}
    for (subject, dim), sketch in base.items():
        for row_order in row_orders(len(sketch.rows), len(losses), indices):
            if subject in tests:
                tests[subject].append(RowTest(sketch, dim, row_order, finite, scale, rounding))
    for factors in _telling_factors(losses):
        seen = _sketches(losses, subjects, lift * factors, base)
        for subject, each in tests.items():
            for test in each:
                test.compare(seen[subject, test.dim], factors)
    return {subject: Verdict(each) for subject, each in tests.items()}


class Verdict:
    """What the tests of a layer's use, or of another tensor of the graph, say together.

    Args:
        tests: one for each dimension and order of rows that is possible.

    Attributes:
        best: of those that no row contradicts; None where examples mix.
        reached: whether any gradient came.
        shown: whether anything was shown; where it was, but isn't sure, the gradients there are fit all other ways.
        spoilt: whether some numbers weren't finite.
        unclear: whether some numbers weren't finite, or too small.
        sure: whether the best holds for other batches, too.
        alternatives: (dimension, rows of each example, order) of others that all rows follow as well; None where there
            are no gradients. Where this isn't empty the best holds for other batches as long as gradients are zero
            where these differ from it.
        dark: nothing was shown, for what is unclear.
        spreads: numbers of every example whose loss is finite weren't.
        lone: rows of a single example were shown. A table's row that one large example dominates looks like that.
    """

    def __init__(self, tests: list[RowTest]) -> None:
        left = [test for test in tests if not test.contradicted]
        # What all rows follow needs no other way to be contradicted: elsewhere they may be too small for that.
        complete = [test for test in left if test.complete]
        # Of what several say the same, the one that shows more examples, and leaves more of them what they are.
        self.best = min(complete if len(complete) == 1 else left, key=RowTest.cost, default=None)
        shown = [test for test in left if test.shown]
        self.reached = any(test.reached for test in tests)
        self.shown = bool(shown)
        self.spoilt = any(test.spoilt for test in tests)
        self.unclear = self.spoilt or any(test.faint for test in shown or left)
        alone = len(shown) == len(left) == 1 and not self.unclear
        self.sure = alone or (len(complete) == 1 and not self.spoilt)
        self.alternatives: tuple[tuple[int, int, RowOrder], ...] | None = ()
        if self.best is not None and not self.unclear and not self.reached:
            self.alternatives = None
        elif not self.unclear and len(complete) == len(left) > 1:
            self.alternatives = tuple((t.dim, t.count, t.row_order) for t in left if t is not self.best)
        self.dark = self.best is not None and not shown and (self.spoilt or self.best.faint)
        self.spreads = all(test.spreads for test in left)
        self.lone = self.best is not None and self.best.lone


@dataclass(frozen=True)
class _Sketch:
    """A gradient's rows along one dimension, in a few numbers each.

    Attributes:
        rows: [rows, 4], float64: fixed random projections of the finite entries.
        spoilt: [rows] bool: some entries weren't finite.
        finite: of all entries, bool; None where all are.
        dtype: that the gradient's noise is of.
    """

    rows: Tensor
    spoilt: Tensor
    finite: Tensor | None
    dtype: torch.dtype


def projected(grad: Tensor, dim: int) -> Tensor:
    """[rows, 4], fixed random projections of a gradient's rows along one dimension, in float32 or float64."""
    grad = _as_rows(grad, dim)
    return grad @ _directions(grad)


def _as_rows(grad: Tensor, dim: int) -> Tensor:
    """[rows, numbers], real ones in float32 or float64."""
    if grad.is_complex():
        grad = torch.view_as_real(grad)
    grad = grad.movedim(dim, 0).flatten(1) if grad.dim() > 1 else grad.unsqueeze(1)
    return grad if grad.dtype == torch.float64 else grad.float()


def _directions(rows: Tensor) -> Tensor:
    """What rows are projected on, [numbers, 4]."""
    generator = torch.Generator("cpu").manual_seed(rows.shape[1])
    directions = torch.randn(rows.shape[1], 4, generator=generator, dtype=rows.dtype, device="cpu")
    return directions.to(rows.device)


def _sketch(grad: Tensor, dim: int, base: _Sketch | None) -> _Sketch:
    """Of the entries that are finite, in the gradient ``base`` is of, too."""
    grad = _as_rows(grad, dim)
    directions = _directions(grad)
    finite = None if base is None else base.finite
    rows = grad @ directions
    if finite is None and bool(torch.isfinite(rows).all()):
        return _Sketch(rows.double(), torch.zeros(len(rows), dtype=torch.bool, device=rows.device), None, grad.dtype)
    # Close to overflow sums of finite entries are not finite.
    near = grad.abs() <= torch.finfo(grad.dtype).max * 2.0**-20
    finite = near if finite is None else finite & near
    return _Sketch((torch.where(finite, grad, 0.0) @ directions).double(), ~finite.all(1), finite, grad.dtype)


class RowTest:
    """Whether rows follow the factors of the examples they would belong to, were they grouped in one way.

    Args:
        base: the rows for losses that all have the same factor.
        dim: which dimension's they are.
        row_order: "example" or "row", or an index.
        finite: [B] bool, of the losses.
        scale: [B], the size of each example's gradients elsewhere.
        rounding: what may be rounding.

    Attributes:
        count: rows of each example.
        contradicted: a row that is more than noise follows no factor, or another example's.
        faint: a row follows none, but may be rounding below the smallest normal number.
        spoilt: how many examples would have entries that aren't finite.
        harmed: of these, how many have a finite loss.
    """

    def __init__(
        self, base: _Sketch, dim: int, row_order: RowOrder, finite: Tensor, scale: Tensor, rounding: Rounding = USUAL
    ) -> None:
        examples, numbers = len(finite), torch.arange(len(base.rows), device=base.rows.device)
        self.dim, self.count, self.row_order = dim, len(numbers) // examples, row_order
        self.contradicted, self.faint = False, False
        if isinstance(row_order, RowIndex):
            self._owners = row_order.index
        else:
            self._owners = numbers // max(1, self.count) if row_order == "example" else numbers % examples
        self._sizes = _sizes(base.rows)
        self._unit = torch.where(self._sizes > 0, self._sizes, 1.0)[:, None]
        self._base = base.rows / self._unit
        self._follow = self._sizes > 0
        own = scale.scatter_reduce(0, self._owners, self._sizes, "amax")
        self._share, self._noise = rounding.share, rounding.noise[base.dtype] * own[self._owners]
        self._floor = ABOVE_SUBNORMAL * torch.finfo(base.dtype).tiny
        spoilt = self._owners[base.spoilt].unique()
        self.spoilt, self.harmed = len(spoilt), int(finite[spoilt].sum())
        self.reached = bool(self._follow.any()) or self.spoilt > 0
        # Whether each example with a finite loss would have entries that aren't finite.
        self.spreads = 0 < int(finite.sum()) == self.harmed
        others = (scale > 0) & finite
        others[spoilt] = False
        self._with_gradients = int(others.sum())

    @property
    def shown(self) -> bool:
        """Whether a row followed its own example's factors."""
        return not self.contradicted and bool(self._follow.any())

    @property
    def complete(self) -> bool:
        """Whether every row that isn't zero followed its own example's factors, and several examples have some."""
        return self.shown and self.owners > 1 and bool((self._follow == (self._sizes > 0)).all())

    @property
    def lone(self) -> bool:
        """Whether rows of just one example are shown, though others have gradients elsewhere."""
        return self.shown and self.owners == 1 and self._with_gradients > 1

    @property
    def owners(self) -> int:
        """How many examples have rows that followed their factors.

        Where several ways are possible, one that gives rows of small examples to a large one leaves those with none.
        """
        return len(self._owners[self._follow].unique())

    def cost(self) -> tuple[int, int, int, bool, bool]:
        """The smaller, the more examples it shows, and the fewer are spoilt by it."""
        return -self.owners, self.harmed, self.spoilt, self.faint, self.count != 1

    def compare(self, seen: _Sketch, factors: Tensor) -> None:
        """Takes the same rows for losses given these factors; zeros must be exact."""
        own = factors[self._owners].double()
        rows = seen.rows / self._unit
        apart = _sizes(rows - own[:, None] * self._base)
        fits = torch.where((own == 0) | (self._sizes == 0), _sizes(rows) == 0, apart <= self._share * own)
        self._follow &= fits
        sizes = torch.maximum(self._sizes, _sizes(seen.rows))
        off = (sizes > self._noise) & ~fits
        if bool(off.any()):
            self.faint = True
            self.contradicted = self.contradicted or bool((off & (sizes > self._floor)).any())


def _sizes(rows: Tensor) -> Tensor:
    """[rows], the largest number of each: squares of what float64 can hold need not be held by it."""
    return rows.abs().amax(1) if rows.numel() else rows.new_zeros(len(rows))


def _sketches(
    losses: Tensor, subjects: Mapping[Any, list[int]], factors: Tensor, base: Mapping[Any, _Sketch]
) -> dict[Any, _Sketch]:
    """{(subject, dimension): sketch of the gradient there} for weighted losses; ``base`` is for other weights."""
    found: dict[Any, _Sketch] = {}

    def look(call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> None:
        found[call, call.batch_dim] = _sketch(grad, call.batch_dim, base.get((call, call.batch_dim)))

    calls = [each for each in subjects if isinstance(each, LayerCall)]
    edges = [each for each in subjects if not isinstance(each, LayerCall)]
    grads = first_pass(losses, calls, look, factors, retain_graph=True, edges=edges)
    for edge, grad in zip(edges, grads, strict=True):
        grad = losses.new_zeros(()).expand(shape_of(edge)) if grad is None else grad
        for dim in subjects[edge]:
            found[edge, dim] = _sketch(grad, dim, base.get((edge, dim)))
    return found


def _telling_factors(losses: Tensor) -> Iterator[Tensor]:
    """Factors for the losses: together they differ for any two examples.

    Powers of two by the digits of an example's number; and the last example with a finite loss alone, which shows even
    the slightest mixing with it.
    """
    examples = losses.shape[0]
    numbers = torch.arange(examples, device=losses.device)
    while examples > 1:
        yield torch.exp2(-(numbers % BASE).to(losses.dtype))
        numbers, examples = numbers // BASE, math.ceil(examples / BASE)
    alone = torch.zeros_like(losses)
    finite = torch.isfinite(losses.detach()).nonzero()
    alone[int(finite[-1]) if len(finite) else -1] = 1.0
    yield alone
