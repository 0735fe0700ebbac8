"""The proof by factors that examples do not mix, layer by layer.

The gradient of one example's loss at a tensor is zero on every row that belongs to another example, and so a row's
gradient grows with the factor its own example's loss is given, and with no other. A few backwards from losses given
factors that tell the examples apart show where the examples are, or that they mix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ghostclip.graph import first_pass, gradients_at
from ghostclip.index import ModelIndex
from ghostclip.nn.base import Call
from ghostclip.seams import Edge, shape_of
from ghostclip.search import OTHER, PICKED, Candidate, Decision, Places, refusal
from ghostclip.tail import Tail

__all__ = ["decide", "majors_of"]

# How far a row's factor may be from its example's, relative, and what share of its gradient may follow another factor,
# before the row counts as another's. Factors are powers of two, which scale every rounding error along with the
# gradient in any floating point format, so that only sums in a varying order leave a difference.
FACTOR_TOLERANCE = REST_TOLERANCE = 1e-3
# Factors 1, 2, 4 and 8 tell four examples apart.
BASE = 4
# Below its normal numbers float16 scales no rounding error along; what seems to mix is tried on larger gradients.
LIFTS = (2.0**10, 2.0**20)
# Rows this much smaller than the largest of all layers are rounding where there should be nothing: they show nothing.
NOISE = {torch.float64: 1e-10, torch.float32: 1e-3}
# Where nothing between the layers takes differences in which all digits cancel (`ghostclip.graph.STEADY`), there is no
# such rounding, and a row shows something as long as factors scale it exactly.
STEADY_NOISE = 1e-10


def majors_of(
    losses: Tensor, calls: Sequence[Call], pending: Sequence[Call], steady: bool = False, tail: Tail | None = None
) -> dict[Call, str | None]:
    """How rows of the pending calls are grouped; calls no gradient reached are left out.

    Args:
        losses: [B].
        calls: of layers whose batch dimension is a multiple of B.
        pending: those of them to be proved.
        steady: whether scaled losses give scaled gradients, up to the rounding of each number.
        tail: the lowest layers, if they can go by parts of the examples.

    Returns:
        "example" or "row" (see `ghostclip.regroup`), "" where both fit, None where rows of several examples mix.
    """
    found = _majors(losses, calls, pending, 1.0, steady, tail)
    # Times the factors, it must be a number of the losses' type.
    most = 2.0 ** (math.floor(math.log2(torch.finfo(losses.dtype).max)) - BASE)
    for lift in LIFTS if any(call.dtype == torch.float16 for call in calls) else ():
        if mixing := [call for call, major in found.items() if major is None]:
            again = _majors(losses, calls, mixing, min(lift, most), steady, tail)
            found |= {call: major for call, major in again.items() if major is not None}
    return found


def _majors(
    losses: Tensor, calls: Sequence[Call], pending: Sequence[Call], lift: float, steady: bool, tail: Tail | None
) -> dict[Call, str | None]:
    """The same, for losses ``lift`` times as large."""
    examples = losses.shape[0]
    base = _sketches(losses, calls, torch.full_like(losses, lift), tail)
    largest = _largest(list(base.values()))
    readable = {call: _readable(rows, largest, steady) for call, rows in base.items()}
    fits = {call: {"example", "row"} for call in pending if call in readable and bool(readable[call].any())}
    for factors in _telling_factors(losses):
        seen = _sketches(losses, pending, lift * factors, tail)
        for call, ways in fits.items():
            if lift != 1.0 and not bool((base[call].isfinite() & seen[call].isfinite()).all()):
                ways.clear()  # what overflowed for the lift alone shows nothing
            _keep_what_follows(ways, base[call], seen[call], readable[call], factors)
    found: dict[Call, str | None] = {}
    for call, ways in fits.items():
        single = call.shape[call.batch_dim] == examples
        found[call] = None if not ways else "example" if single else "".join(ways) if len(ways) == 1 else ""
    return found


def decide(
    losses: Tensor, calls: Sequence[Call], candidates: Sequence[Candidate], index: ModelIndex, places: Places
) -> dict[Edge, Decision]:
    """Which dimension of each candidate holds the examples, or none; what is sure is remembered in ``places``.

    Args:
        losses: [B].
        calls: of layers whose batch dimension is a multiple of B.
        candidates: to be decided.
        index: of the model.
        places: remembers.

    Raises:
        UnsupportedModelError: examples mix, or this batch doesn't show it.
    """
    ones = torch.ones_like(losses)
    base = _edge_sketches(losses, candidates, ones)
    largest = _largest([*_sketches(losses, calls, ones).values(), *base.values()])
    readable = {key: _readable(rows, _largest([rows])) for key, rows in base.items()}
    fits: dict[Any, set[str]] = {(c.edge, dim): {"example", "row"} for c in candidates for dim in c.dims}
    for candidate in candidates:
        # Where examples have rows of their own, one that isn't finite spoils its own: this is what all of them share.
        if min(candidate.inputs) >= 0:
            for dim in candidate.dims:
                rows = base.get((candidate.edge, dim))
                if rows is not None and not bool(torch.isfinite(rows).all(1).any()):
                    fits[candidate.edge, dim].clear()
    for factors in _telling_factors(losses):
        seen = _edge_sketches(losses, candidates, factors)
        for key, ways in fits.items():
            if key in base:
                _keep_what_follows(ways, base[key], seen[key], readable[key], factors)
    found: dict[Edge, Decision] = {}
    for candidate in candidates:
        possible = [
            Decision(dim, candidate.multiples[dim], way)
            for dim in candidate.dims
            for way in (("example",) if candidate.multiples[dim] == 1 else ("example", "row"))
        ]
        left = [way for way in possible if way.major in fits[candidate.edge, way.dim]]
        size = max((_largest([base[c, d]]) for c, d in base if c == candidate.edge), default=0.0)
        faint = size <= NOISE[torch.float64 if losses.dtype == torch.float64 else torch.float32] * largest
        decision = _choice(candidate, left, possible if faint else [], index)
        found[candidate.edge] = decision
        if size > 0 and len(left) <= 1 and (left or not faint):
            places.decisions[candidate.key] = decision
    return found


def _choice(candidate: Candidate, ways: list[Decision], possible: list[Decision], index: ModelIndex) -> Decision:
    """One of the ways that were proved, else of the ``possible``, else a shared tensor; raises where nothing can be."""
    if ways:
        return next((way for way in ways if way.count == 1), ways[0])
    if single := [way for way in possible if way.count == 1]:
        return single[0]
    if OTHER not in candidate.inputs and (min(candidate.inputs) >= 0 or _constants_only(candidate, index)):
        return Decision(None, multiples=candidate.multiples)
    if OTHER in candidate.inputs and candidate.shape[0] != 1 and 0 not in candidate.dims:
        raise refusal(candidate, PICKED)
    raise refusal(
        candidate, "the loss of one example depends on what belongs to others, so examples mix before or after it"
    )


def _constants_only(candidate: Candidate, index: ModelIndex) -> bool:
    """Whether what the operation was given beside shared tensors, as large as a batch, is the model's own."""
    node = candidate.edge[0]
    if node.name() in ("CatBackward0", "StackBackward0"):
        return index.holds_shape(_size_of_constant(candidate))
    kept = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    kept = [tensor for tensor in kept if isinstance(tensor, Tensor)]
    return bool(kept) and all(index.holds(tensor) for tensor in kept)


def _size_of_constant(candidate: Candidate) -> torch.Size | None:
    """The shape of the one constant among concatenated (or stacked) tensors; None where there are several."""
    node, whole = candidate.edge[0], candidate.shape
    shapes = [shape_of(edge) for edge in node.next_functions if edge[0] is not None]
    if len(node.next_functions) != len(shapes) + 1:
        return None
    if node.name() == "StackBackward0":
        return shapes[0]
    dim = next(d for d in range(len(whole)) if (node._saved_dim - d) % (1 << 64) in (0, (1 << 64) - len(whole)))
    rest = whole[dim] - sum(shape[dim] for shape in shapes)
    return torch.Size((*whole[:dim], rest, *whole[dim + 1 :]))


def _largest(sketches: Sequence[Tensor]) -> float:
    """The largest finite norm of a row in any of them."""
    return max((float(_sizes(rows).max()) for rows in sketches if len(rows)), default=0.0)


def _sizes(rows: Tensor) -> Tensor:
    # In float64, as below: squares of what float32 can hold need not be.
    return torch.where(torch.isfinite(rows).all(1), rows.double().norm(dim=1).to(rows.dtype), 0.0)


def _readable(rows: Tensor, largest: float, steady: bool = False) -> Tensor:
    """[rows] bool: the ones that are more than the rounding of the largest."""
    sizes = _sizes(rows)
    return sizes > (STEADY_NOISE if steady else NOISE[sizes.dtype]) * largest


def _keep_what_follows(ways: set[str], base: Tensor, seen: Tensor, readable: Tensor, factors: Tensor) -> None:
    """Strikes out the ways to group rows that a change of the losses' factors contradicts."""
    for way in list(ways):
        owners = _owners(len(base), len(factors), way, factors.device)
        if not _follow(base, seen, readable, factors[owners]):
            ways.discard(way)


def _sketch(grad: Tensor, dim: int) -> Tensor:
    """Four fixed random projections of every row along ``dim``, [rows, 4]."""
    if grad.is_complex():
        grad = torch.view_as_real(grad)
    rows = grad.movedim(dim, 0).flatten(1) if grad.dim() > 1 else grad.unsqueeze(1)
    rows = rows if rows.dtype == torch.float64 else rows.float()
    generator = torch.Generator().manual_seed(rows.shape[1])
    directions = torch.randn(rows.shape[1], 4, generator=generator, dtype=rows.dtype, device="cpu").to(rows.device)
    return rows @ directions


def _sketches(losses: Tensor, calls: Sequence[Call], factors: Tensor, tail: Tail | None = None) -> dict[Any, Tensor]:
    """The sketch of each pre-activation's gradient, for weighted losses."""
    found: dict[Any, Tensor] = {}

    def look(call: Call, inputs: tuple[Tensor, ...], grad: Tensor) -> None:
        found[call] = _sketch(grad, call.batch_dim)

    by_parts = [] if tail is None else [call for call in calls if call in tail.calls]
    whole = [call for call in calls if call not in by_parts] if by_parts else calls
    with tail.stopped() if tail is not None and by_parts else nullcontext():
        first_pass(losses, whole, look, factors, retain_graph=True)
    if tail is not None and by_parts:
        rows: dict[Call, list[Tensor]] = {call: [] for call in tail.calls}
        for part in tail.parts:
            for call, (_, _, grad) in zip(tail.calls, tail.gradients(part, tail.calls_of(part)), strict=True):
                rows[call].append(_sketch(grad, 0))
        found |= {call: torch.cat(rows[call]) for call in by_parts}
    return found


def _edge_sketches(losses: Tensor, candidates: Sequence[Candidate], factors: Tensor) -> dict[Any, Tensor]:
    """The same for each candidate and each of its dimensions, by (edge, dimension)."""
    grads = gradients_at([candidate.edge for candidate in candidates], losses, factors)
    return {
        (candidate.edge, dim): _sketch(grad, dim)
        for candidate, grad in zip(candidates, grads, strict=True)
        if grad is not None
        for dim in candidate.dims
    }


def _telling_factors(losses: Tensor) -> Iterator[Tensor]:
    """Factors for the losses: together they differ for any two examples.

    Powers of two by the digits of an example's number; and the last example alone, which shows even the slightest
    mixing with it.
    """
    examples = losses.shape[0]
    numbers = torch.arange(examples, device=losses.device)
    while examples > 1:
        yield torch.exp2((numbers % BASE).to(losses.dtype))
        numbers, examples = numbers // BASE, math.ceil(examples / BASE)
    alone = torch.zeros_like(losses)
    alone[-1] = 1.0
    yield alone


def _owners(rows: int, examples: int, way: str, device: torch.device) -> Tensor:
    """The example each of ``rows`` rows belongs to, were they grouped this way."""
    numbers = torch.arange(rows, device=device)
    return numbers // (rows // examples) if way == "example" else numbers % examples


def _follow(base: Tensor, seen: Tensor, readable: Tensor, factors: Tensor) -> bool:
    """Whether readable rows of ``seen`` are those of ``base`` times their factors; zeros must be exact."""
    rows = readable & torch.isfinite(seen).all(1)
    base, seen, factors = base[rows].double(), seen[rows].double(), factors[rows].double()
    if bool((seen[factors == 0] != 0).any()):
        return False
    size = base.square().sum(1)
    found = (seen * base).sum(1) / size
    rest = (seen - found[:, None] * base).square().sum(1)
    near = (found - factors).abs() <= FACTOR_TOLERANCE * factors
    return bool((near & (rest <= (REST_TOLERANCE * factors) ** 2 * size)).all())
