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
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ghostclip.graph.parameter_names import ParameterNames
from ghostclip.graph.reader import Edge, first_pass
from ghostclip.graph.shared.search import (
    OTHER,
    PICKED,
    TOO_SMALL,
    BoundaryCandidate,
    Decision,
    DecisionCache,
    constants_only,
    refusal,
)
from ghostclip.nn.base import LayerCall

__all__ = ["Verdict", "check_mixing", "decide"]

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
class Verdict:
    """What was found of a layer that a gradient reached.

    Attributes:
        row_order: how its rows are grouped, "example" or "row" (see `ghostclip.graph.row_layout`); None where rows mix
            examples.
        sure: whether that holds for other batches, too.
        shown: whether anything was shown; where it was, but isn't sure, the gradients there are fit all other ways.
        dark: nothing was, and some numbers weren't finite.
        spreads: so were numbers of every example whose loss is.
        lone: rows of a single example were shown. A table's row that one large example dominates looks like that.
    """

    row_order: str | None
    sure: bool = True
    shown: bool = True
    dark: bool = False
    spreads: bool = False
    lone: bool = False


def check_mixing(losses: Tensor, calls: Sequence[LayerCall], pending: Sequence[LayerCall]) -> dict[LayerCall, Verdict]:
    """How rows of the pending calls are grouped; calls no gradient reached are left out.

    Args:
        losses: [B].
        calls: of layers whose batch dimension is a multiple of B.
        pending: those of them to be proved.
    """
    found = _row_orders(losses, calls, pending, 1.0)
    most = 2.0 ** (math.frexp(torch.finfo(losses.dtype).max)[1] - 1)
    for lift in LIFTS if any(call.dtype == torch.float16 for call in calls) else ():
        if mixing := [call for call, verdict in found.items() if verdict.row_order is None]:
            again = _row_orders(losses, calls, mixing, min(lift, most))
            found |= {call: verdict for call, verdict in again.items() if verdict.row_order is not None}
    return found


def _row_orders(
    losses: Tensor, calls: Sequence[LayerCall], pending: Sequence[LayerCall], lift: float
) -> dict[LayerCall, Verdict]:
    """The same, for losses ``lift`` times as large."""
    examples, finite = losses.shape[0], torch.isfinite(losses.detach())
    base = _sketches(losses, calls, torch.full_like(losses, lift))
    scale = _scale(base, examples)
    ways = {
        call: [_Rows(base[call], finite, way, scale) for way in _ways(call.shape[call.batch_dim] // examples)]
        for call in pending
        if call in base and base[call].reached
    }
    for factors in _telling_factors(losses):
        seen = _sketches(losses, pending, lift * factors, base)
        for call, possible in ways.items():
            for rows in possible:
                rows.compare(seen[call], factors)
    return {call: _verdict(base[call], possible, lift) for call, possible in ways.items()}


def _verdict(base: _Sketch, ways: list[_Rows], lift: float) -> Verdict:
    if lift != 1.0 and bool(base.spoilt.any()):
        return Verdict(None)  # what overflowed for the lift alone shows nothing
    if not (left := [rows for rows in ways if not rows.contradicted]):
        return Verdict(None)
    # Of what both ways say the same, the one that shows more examples, and leaves more of them what they are.
    best = min(left, key=lambda rows: (-rows.owners, rows.harmed, rows.spoilt, rows.faint))
    shown = any(rows.shown for rows in left)
    unclear = best.faint or bool(base.spoilt.any())
    spreads = all(rows.spreads for rows in left)
    sure = len(left) == 1 and shown and not unclear
    return Verdict(best.way, sure, shown, not shown and unclear, spreads, shown and best.lone)


def decide(
    losses: Tensor,
    calls: Sequence[LayerCall],
    candidates: Sequence[BoundaryCandidate],
    index: ParameterNames,
    places: DecisionCache,
) -> tuple[dict[Edge, Decision], bool]:
    """Which dimension of each candidate holds the examples, or none; what is sure is remembered in ``places``.

    Args:
        losses: [B].
        calls: of layers whose batch dimension is a multiple of B.
        candidates: to be decided.
        index: of the model.
        places: remembers.

    Returns:
        The decisions, and whether numbers that aren't finite, or one large example, left one of them open.

    Raises:
        UnsupportedModelError: examples mix, or this batch doesn't show it.
    """
    ones, finite = torch.ones_like(losses), torch.isfinite(losses.detach())
    base = _edge_sketches(losses, candidates, ones)
    scale = _scale(_sketches(losses, calls, ones), len(losses))
    ways: dict[Edge, list[tuple[Decision, _Rows]]] = {}
    for candidate in candidates:
        possible = [
            (dim, count, way) for dim in candidate.dims for count in [candidate.multiples[dim]] for way in _ways(count)
        ]
        ways[candidate.edge] = [
            (Decision(dim, count, way), _Rows(base[candidate.edge, dim], finite, way, scale))
            for dim, count, way in possible
        ]
    for factors in _telling_factors(losses):
        seen = _edge_sketches(losses, candidates, factors, base)
        for candidate in candidates:
            for decision, rows in ways[candidate.edge]:
                rows.compare(seen[candidate.edge, decision.dim], factors)
    found: dict[Edge, Decision] = {}
    dark = False
    for candidate in candidates:
        found[candidate.edge], sure = _choice(candidate, ways[candidate.edge], len(losses), index)
        dark = dark or (not sure and any(rows.spoilt or rows.lone for _, rows in ways[candidate.edge]))
        if sure:
            places.decisions[candidate.key] = found[candidate.edge]
    return found, dark


def _choice(
    candidate: BoundaryCandidate, ways: list[tuple[Decision, _Rows]], examples: int, index: ParameterNames
) -> tuple[Decision, bool]:
    """What a candidate is, and whether that was shown: one of the ways not contradicted, else a shared tensor.

    Raises:
        UnsupportedModelError: it can be neither.
    """
    left = [(decision, rows) for decision, rows in ways if not rows.contradicted]
    shown = [(decision, rows) for decision, rows in left if rows.shown]
    shared = Decision(None, multiples=candidate.multiples, examples=examples)
    may_be_shared = OTHER not in candidate.inputs and (min(candidate.inputs) >= 0 or constants_only(candidate, index))
    unclear = any(rows.spoilt for _, rows in ways) or any(rows.faint for _, rows in shown or left)
    if not shown and may_be_shared and (unclear or not left):
        # Finite rows of examples' own would follow their factors. What isn't sure counts as shared, which is safe: were
        # it examples' own, each would be given its own rows' gradients all the same, or nothing that follows takes it.
        return shared, not (left or unclear)
    if may_be_shared and shown and all(rows.lone for _, rows in shown):
        return shared, False
    if left:
        # Of what all ways say the same, the one that shows more examples, and leaves more of them what they are.

        def cost(way: tuple[Decision, _Rows]) -> tuple[int, int, int, bool, bool]:
            decision, rows = way
            return -rows.owners, rows.harmed, rows.spoilt, rows.faint, decision.count != 1

        best, _ = min(shown or left, key=cost)
        return best, len(shown) == len(left) == 1 and not unclear
    if OTHER in candidate.inputs and candidate.shape[0] != 1 and 0 not in candidate.dims:
        raise refusal(candidate, PICKED)
    too_small = TOO_SMALL if any(parameter.dtype == torch.float16 for _, parameter in index.trained()) else ""
    raise refusal(
        candidate,
        f"the loss of one example depends on what belongs to others, so examples mix before or after it{too_small}",
    )


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

    @property
    def reached(self) -> bool:
        """Whether the gradient isn't zero."""
        return bool((self.rows != 0).any() | self.spoilt.any())


def _sketch(grad: Tensor, dim: int, base: _Sketch | None = None) -> _Sketch:
    """Of the entries that are finite, in the gradient ``base`` is of, too."""
    if grad.is_complex():
        grad = torch.view_as_real(grad)
    grad = grad.movedim(dim, 0).flatten(1) if grad.dim() > 1 else grad.unsqueeze(1)
    grad = grad if grad.dtype == torch.float64 else grad.float()
    generator = torch.Generator("cpu").manual_seed(grad.shape[1])
    directions = torch.randn(grad.shape[1], 4, generator=generator, dtype=grad.dtype, device="cpu")
    directions = directions.to(grad.device)
    finite = None if base is None else base.finite
    rows = grad @ directions
    if finite is None and bool(torch.isfinite(rows).all()):
        return _Sketch(rows.double(), torch.zeros(len(rows), dtype=torch.bool, device=rows.device), None, grad.dtype)
    # Close to overflow sums of finite entries are not finite.
    near = grad.abs() <= torch.finfo(grad.dtype).max * 2.0**-20
    finite = near if finite is None else finite & near
    return _Sketch((torch.where(finite, grad, 0.0) @ directions).double(), ~finite.all(1), finite, grad.dtype)


class _Rows:
    """Whether rows follow the factors of the examples they would belong to, were they grouped in one way.

    Args:
        base: the rows for losses that all have the same factor.
        finite: [B] bool, of the losses.
        way: "example" or "row".
        scale: [B], the size of each example's gradients elsewhere.

    Attributes:
        contradicted: a row that is more than noise follows no factor, or another example's.
        faint: a row follows none, but may be rounding below the smallest normal number.
        spoilt: how many examples would have entries that aren't finite.
        harmed: of these, how many have a finite loss.
    """

    def __init__(self, base: _Sketch, finite: Tensor, way: str, scale: Tensor) -> None:
        examples, numbers = len(finite), torch.arange(len(base.rows), device=base.rows.device)
        self.way, self.contradicted, self.faint = way, False, False
        self._owners = numbers // max(1, len(numbers) // examples) if way == "example" else numbers % examples
        self._sizes = _sizes(base.rows)
        self._unit = torch.where(self._sizes > 0, self._sizes, 1.0)[:, None]
        self._base = base.rows / self._unit
        self._follow = self._sizes > 0
        own = scale.scatter_reduce(0, self._owners, self._sizes, "amax")
        self._noise = NOISE[base.dtype] * own[self._owners]
        self._floor = ABOVE_SUBNORMAL * torch.finfo(base.dtype).tiny
        self._spoilt = self._owners[base.spoilt].unique()
        self.spoilt, self.harmed = len(self._spoilt), int(finite[self._spoilt].sum())
        others = (scale > 0) & finite
        others[self._spoilt] = False
        self._finite, self._with_gradients = finite, int(others.sum())

    @property
    def shown(self) -> bool:
        """Whether a row followed its own example's factors."""
        return not self.contradicted and bool(self._follow.any())

    @property
    def spreads(self) -> bool:
        """Whether each example with a finite loss would have entries that aren't; False where there is no such loss."""
        return 0 < int(self._finite.sum()) == self.harmed

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

    def compare(self, seen: _Sketch, factors: Tensor) -> None:
        """Takes the same rows for losses given these factors; zeros must be exact."""
        own = factors[self._owners].double()
        rows = seen.rows / self._unit
        apart = _sizes(rows - own[:, None] * self._base)
        fits = torch.where((own == 0) | (self._sizes == 0), _sizes(rows) == 0, apart <= TOLERANCE * own)
        self._follow &= fits
        sizes = torch.maximum(self._sizes, _sizes(seen.rows))
        off = (sizes > self._noise) & ~fits
        if bool(off.any()):
            self.faint = True
            self.contradicted = self.contradicted or bool((off & (sizes > self._floor)).any())


def _sizes(rows: Tensor) -> Tensor:
    """[rows], the largest number of each: squares of what float64 can hold need not be held by it."""
    return rows.abs().amax(1) if rows.numel() else rows.new_zeros(len(rows))


def _scale(sketches: dict[Any, _Sketch], examples: int) -> Tensor:
    """[B], the largest row of each example where it has just one."""
    single = [_sizes(each.rows) for each in sketches.values() if len(each.rows) == examples]
    if single:
        return torch.stack(single).amax(0)
    some = next(iter(sketches.values())).rows if sketches else None
    return torch.zeros(examples, dtype=torch.float64, device=None if some is None else some.device)


def _ways(count: int) -> tuple[str, ...]:
    """How so many rows an example may be grouped."""
    return ("example",) if count == 1 else ("example", "row")


def _sketches(
    losses: Tensor,
    calls: Sequence[LayerCall],
    factors: Tensor,
    base: Mapping[Any, _Sketch] = MappingProxyType({}),
) -> dict[Any, _Sketch]:
    """The sketch of each pre-activation's gradient, for weighted losses; ``base`` are those for other weights."""
    found: dict[Any, _Sketch] = {}

    def look(call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> None:
        found[call] = _sketch(grad, call.batch_dim, base.get(call))

    first_pass(losses, calls, look, factors, retain_graph=True)
    return found


def _edge_sketches(
    losses: Tensor,
    candidates: Sequence[BoundaryCandidate],
    factors: Tensor,
    base: Mapping[Any, _Sketch] = MappingProxyType({}),
) -> dict[Any, _Sketch]:
    """The same for each candidate and each of its dimensions, by (edge, dimension)."""
    edges = [candidate.edge for candidate in candidates]
    grads = first_pass(losses, (), None, factors, retain_graph=True, edges=edges)
    grads = [losses.new_zeros(()).expand(c.shape) if g is None else g for c, g in zip(candidates, grads, strict=True)]
    return {
        (candidate.edge, dim): _sketch(grad, dim, base.get((candidate.edge, dim)))
        for candidate, grad in zip(candidates, grads, strict=True)
        for dim in candidate.dims
    }


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
