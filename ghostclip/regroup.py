"""Whose row is whose: a first-batch proof that examples do not mix, and where a layer sees them.

The gradient of one example's loss at a layer's pre-activation is zero on every row that belongs to another example, and
so a row's gradient grows with the factor its own example's loss is given, and with no other. A few backwards from
losses given factors that tell the examples apart show, layer by layer, that the batch dimension is where it is said to
be and in the order of the losses; that rows folded into the batch (positions, windows, heads) are grouped by example or
by row; or that examples mix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ghostclip.errors import LossShapeError, UnsupportedModelError
from ghostclip.graph import first_pass
from ghostclip.index import ModelIndex
from ghostclip.nn.base import Call

__all__ = ["Grouping", "row_count"]

# How far a row's factor may be from its example's, relative, and what share of its gradient may follow another factor,
# before the row counts as another's. Factors are powers of two, which scale every rounding error along with the
# gradient in any floating point format, so that only sums in a varying order leave a difference.
FACTOR_TOLERANCE = REST_TOLERANCE = 1e-3
# Factors 1, 2, 4 and 8 tell four examples apart.
BASE = 4
# Rows this much smaller than the largest of all layers are rounding where there should be nothing: they show nothing.
NOISE = {torch.float64: 1e-10, torch.float32: 1e-3}


def row_count(call: Call, examples: int, name: str) -> int:
    """Rows of each of ``examples`` examples in the batch dimension of ``call``; raises where that isn't whole."""
    rows = call.shape[call.batch_dim]
    if examples == 0:
        return 1
    if 1 < rows < examples and examples % rows == 0:
        raise LossShapeError(
            f"losses must have shape exactly [B]; got [{examples}], but {name} saw {rows} (its output has shape "
            f"{list(call.shape)}). Reshape losses of several tokens or positions to [B, T] and average them by .mean(1)"
        )
    if rows % examples or rows == 0:
        raise UnsupportedModelError(
            f"{name}: its output has shape {list(call.shape)} with {rows} rows in dimension {call.batch_dim}, for "
            f"{examples} losses; {_remedy(call)}"
        )
    return rows // examples


def _remedy(call: Call) -> str:
    return (
        "if the examples are in another dimension, say so by wrap(model, batch_dim={...}) or batch_first; if an input "
        "is shared by all examples (position ids of shape [1, T]), expand it to one row per example"
    )


class Grouping:
    """Remembers which uses of which layers have been proved to keep examples apart, and how their rows are grouped."""

    def __init__(self) -> None:
        self._proved: dict[tuple, str] = {}
        self._seen: dict[tuple, int] = {}

    def prove(self, losses: Tensor, calls: Sequence[Call], index: ModelIndex, *, again: bool = False) -> dict[int, str]:
        """How each call's rows are grouped ("example" or "row" major), by id(call).

        Runs extra backwards on first meeting a layer with so many rows an example, and none afterwards.

        Args:
            losses: [B].
            calls: every use of a layer behind them.
            index: of the model.
            again: prove what was proved before anew, for a graph that may order its examples differently every time.

        Raises:
            UnsupportedModelError: rows of other examples move with one example's loss, or the grouping can't be told.
        """
        examples = losses.shape[0]
        keys = {id(call): self._key(call, examples, index) for call in calls}
        if examples > 1 and (again or not all(key in self._proved for key in keys.values())):
            pending = [call for call in calls if again or self._is_open(keys[id(call)])]
            if pending:
                for call, major in _majors(losses, calls, pending, index).items():
                    if major:
                        self._proved[keys[id(call)]] = major
            for key in set(keys.values()):
                self._seen[key] = self._seen.get(key, 0) + 1
        return {id(call): self._major(call, keys[id(call)], examples, index) for call in calls}

    def _key(self, call: Call, examples: int, index: ModelIndex) -> tuple:
        count = row_count(call, examples, index.layer(call))
        return (id(call.layer), call.parameters, call.batch_dim, len(call.shape), count)

    def _is_open(self, key: tuple) -> bool:
        """Not proved; where nothing has reached the layer so far, tried at the 1st, 2nd, 4th, 8th ... batch."""
        met = self._seen.get(key, 0) + 1
        return key not in self._proved and met & (met - 1) == 0

    def _major(self, call: Call, key: tuple, examples: int, index: ModelIndex) -> str:
        if key[-1] == 1 or examples <= 1:
            return "example"
        if key not in self._proved:
            raise UnsupportedModelError(
                f"{index.layer(call)}: {key[-1]} rows an example are folded into its batch dimension, and this batch "
                f"doesn't show how; give it inputs [B, positions, features] instead"
            )
        return self._proved[key]


def _majors(losses: Tensor, calls: Sequence[Call], pending: Sequence[Call], index: ModelIndex) -> dict[Call, str]:
    """How rows of the pending calls are grouped, "" where both ways fit; calls no gradient reached are left out."""
    examples = losses.shape[0]
    base = _sketches(losses, calls, torch.ones_like(losses))
    sizes = {call: torch.where(torch.isfinite(rows).all(1), rows.norm(dim=1), 0.0) for call, rows in base.items()}
    largest = max((float(size.max()) for size in sizes.values() if len(size)), default=0.0)
    readable = {call: size > NOISE[size.dtype] * largest for call, size in sizes.items()}
    fits = {call: {"example", "row"} for call in pending if call in readable and bool(readable[call].any())}
    for factors in _telling_factors(losses):
        seen = _sketches(losses, pending, factors)
        for call, ways in fits.items():
            for way in list(ways):
                owners = _owners(call.shape[call.batch_dim], examples, way, losses.device)
                if not _follow(base[call], seen[call], readable[call], factors[owners]):
                    ways.discard(way)
    for call, ways in fits.items():
        if not ways:
            raise UnsupportedModelError(
                f"{index.layer(call)}: the loss of one example depends on rows of its output (shape "
                f"{list(call.shape)}, dimension {call.batch_dim}) that belong to others, so examples mix before or "
                f"after it, change their order, or are not where they are said to be; {_remedy(call)}"
            )
    single = {call for call in calls if call.shape[call.batch_dim] == examples}
    return {
        call: "example" if call in single else "".join(ways) if len(ways) == 1 else "" for call, ways in fits.items()
    }


def _sketches(losses: Tensor, calls: Sequence[Call], factors: Tensor) -> dict[Call, Tensor]:
    """Four fixed random projections of every row of each pre-activation's gradient, [rows, 4], for weighted losses."""
    found: dict[Call, Tensor] = {}

    def look(call: Call, inputs: tuple[Tensor, ...], grad: Tensor) -> None:
        rows = grad.movedim(call.batch_dim, 0).flatten(1)
        rows = rows if rows.dtype == torch.float64 else rows.float()
        generator = torch.Generator().manual_seed(rows.shape[1])
        directions = torch.randn(rows.shape[1], 4, generator=generator, dtype=rows.dtype).to(rows.device)
        found[call] = rows @ directions

    first_pass(losses, calls, look, factors, retain_graph=True)
    return found


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
    base, seen, factors = base[rows], seen[rows], factors[rows].to(base.dtype)
    if bool((seen[factors == 0] != 0).any()):
        return False
    size = base.square().sum(1)
    found = (seen * base).sum(1) / size
    rest = (seen - found[:, None] * base).square().sum(1)
    near = (found - factors).abs() <= FACTOR_TOLERANCE * factors
    return bool((near & (rest <= (REST_TOLERANCE * factors) ** 2 * size)).all())
