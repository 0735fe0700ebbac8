"""Whose row is whose: what was proved of a model's layers on meeting them, and where a layer sees the examples.

By the proof of `ghostclip.proof` a layer's batch dimension is where it is said to be and in the order of the losses;
rows folded into the batch (positions, windows, heads) are grouped by example or by row. Layers that saw no examples,
and parameters used outside of layers, are followed to where they meet the examples (`ghostclip.search`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from ghostclip.errors import LossShapeError, UnsupportedModelError
from ghostclip.graph import Uses
from ghostclip.index import ModelIndex
from ghostclip.nn.base import Call
from ghostclip.positions import are_positions
from ghostclip.proof import Verdict, decide, majors_of
from ghostclip.seams import Edge
from ghostclip.search import TOO_SMALL, Candidate, Decision, NotShared, Places, Search, settle
from ghostclip.serial import serial_number
from ghostclip.shared import Region, from_below
from ghostclip.tail import Tail

__all__ = ["Grouping", "Layout", "row_count"]

# So many graphs are remembered as a whole.
MOST_GRAPHS = 1000


def row_count(call: Call, examples: int, name: str) -> int:
    """Rows of each of ``examples`` examples in the batch dimension of ``call``; raises where that isn't whole."""
    rows = call.shape[call.batch_dim]
    if examples == 0:
        return 1
    if rows % examples or rows == 0:
        raise not_a_batch(call, examples, name)
    return rows // examples


def not_a_batch(call: Call, examples: int, name: str) -> Exception:
    """The error for a layer whose batch dimension can't be the batch's."""
    rows = call.shape[call.batch_dim]
    if 1 < rows < examples and examples % rows == 0:
        return LossShapeError(
            f"losses must have shape exactly [B]; got [{examples}], but {name} saw {rows} (its output has shape "
            f"{list(call.shape)}). Reshape losses of several tokens or positions to [B, T] and average them by .mean(1)"
        )
    return UnsupportedModelError(
        f"{name}: its output has shape {list(call.shape)} with {rows} rows in dimension {call.batch_dim}, for "
        f"{examples} losses; say where the examples are by wrap(model, batch_dim={{...}}), "
        "or give an input that all of them share (position ids of shape [1, T]) a row for each"
    )


def _is_odd(call: Call, examples: int) -> bool:
    rows = call.shape[call.batch_dim]
    return bool(rows % examples if examples else rows)


def _use(call: Call, uses: Uses) -> tuple:
    """What a layer's use that sees no examples has in common in all batches."""
    return (uses.size, serial_number(call.layer), call.parameters, call.batch_dim, call.shape)


def _alike(calls: list[Call], uses: Uses) -> dict[tuple, int]:
    """How many of the calls that read nothing autograd knows of are alike."""
    return Counter(_use(call, uses) for call in calls if not call.sources)


def _key(call: Call, count: int) -> tuple:
    """What a layer's use with so many rows an example has in common in all batches."""
    return (serial_number(call.layer), call.parameters, call.batch_dim, len(call.shape), count)


@dataclass(frozen=True)
class Layout:
    """Whose the rows behind a vector of losses are.

    Attributes:
        calls: every use of a parameter.
        majors: how each call's rows are grouped ("example" or "row" major), by id(call).
        watched: calls that no gradient had reached so far: once one does, they are to be proved, and nothing clipped
            before.
        proved: whether all calls are proved.
    """

    calls: list[Call]
    majors: dict[int, str]
    watched: list[Call]
    proved: bool


class Grouping:
    """Remembers which uses of which layers have been proved to keep examples apart, and how their rows are grouped."""

    def __init__(self) -> None:
        self._proved: dict[tuple, str] = {}
        # What the last rehearsal met.
        self._rehearsed: set[tuple] = set()
        # What was tried; if it isn't proved, no gradient reached it, or none that shows anything.
        self._tried: set[tuple] = set()
        self._positions: set[tuple] = set()
        # Uses, and how many alike, of a shape that a batch of another size had too: as no multiple of it, so that they
        # saw no examples.
        self._constant: set[tuple] = set()
        # How the calls' rows are grouped for a batch size and a graph in which all is proved.
        self._settled: dict[tuple, list[str]] = {}
        self._places: dict[tuple[int, int], Places] = {}

    def is_settled(self, graph: tuple, uses: Uses) -> bool:
        """Whether all was proved of graphs with that key, and needn't be proved again for these ``uses``."""
        return graph in self._settled and not (uses.reorders or uses.leaves or self._positions)

    def prove(
        self,
        losses: Tensor,
        uses: Uses,
        index: ModelIndex,
        rehearsal: bool = False,
        tail: Tail | None = None,
        reached: bool = False,
    ) -> Layout:
        """Every use of a parameter, and how each call's rows are grouped.

        Runs extra backwards on first meeting a layer with so many rows an example in a graph of so many nodes, and when
        a gradient reaches one that isn't proved; and none otherwise, but for a graph that may order its examples
        differently every time.

        Args:
            losses: [B].
            uses: what is behind them.
            index: of the model.
            rehearsal: the graph is that of a few examples, and will be met again with more of them.
            tail: its lowest layers, if they can go by parts of the examples.
            reached: this batch's gradient reached something that is open.

        Raises:
            UnsupportedModelError: rows of other examples move with one example's loss, or the grouping can't be told.
        """
        examples = losses.shape[0]
        graph = uses.key(examples)
        if self.is_settled(graph, uses):
            majors = {id(call): major for call, major in zip(uses.calls, self._settled[graph], strict=True)}
            return Layout(uses.calls, majors, [], True)
        tables = self._constant.intersection(_alike(uses.calls, uses).items()) if self._constant else ()
        known = {key for key, _ in tables}
        odd = [
            call
            for call in uses.calls
            if _is_odd(call, examples) or self._is_table(call, examples) or (known and _use(call, uses) in known)
        ]
        return self._prove(losses, uses, index, odd, rehearsal, tail, reached)

    def _prove(
        self,
        losses: Tensor,
        uses: Uses,
        index: ModelIndex,
        odd: list[Call],
        rehearsal: bool,
        tail: Tail | None,
        reached: bool,
    ) -> Layout:
        """The same, given the calls that saw no examples, as far as is known."""
        examples, region = losses.shape[0], None
        calls = uses.calls
        if odd or uses.leaves:
            region = self._region(losses, uses, odd, index)
            if examples > 1:
                self._constant |= _alike([call for call in odd if _is_odd(call, examples)], uses).items()
            shared = {id(call) for call in region.calls.values()}
            calls = [call for call in calls if id(call) not in shared]
        keys = {id(call): (uses.size, *self._key(call, examples, index)) for call in calls}
        found: dict[Call, Verdict] = {}
        if rehearsal:
            self._rehearsed = set(keys.values())
        pending = self._pending(uses, calls, keys, rehearsal, reached) if examples > 1 else []
        if pending:
            found = majors_of(losses, calls, pending, tail)
            if tables := self._tables(losses, found, keys, index):
                return self._prove(losses, uses, index, [*odd, *tables], rehearsal, tail, reached)
            self._proved |= {keys[id(call)]: str(verdict.major) for call, verdict in found.items() if verdict.sure}
            if not rehearsal:
                self._tried |= {keys[id(call)] for call in pending}
        majors = {id(call): self._major(call, keys[id(call)], found.get(call), examples, index) for call in calls}
        left = [call for call in calls if keys[id(call)] not in self._proved] if examples > 1 else []
        if region is None and all(key in self._proved for key in keys.values()) and len(self._settled) < MOST_GRAPHS:
            self._settled[uses.key(examples)] = list(majors.values())
        calls = calls if region is None else [*calls, *region.uses]
        return Layout(calls, majors, [call for call in left if call not in pending], not left)

    def _pending(
        self, uses: Uses, calls: list[Call], keys: dict[int, tuple], rehearsal: bool, reached: bool
    ) -> list[Call]:
        """The calls to be proved now; all of them where a gradient came a new way, which may lead through others."""
        if reached or rehearsal or uses.reorders:
            return calls
        known = self._proved.keys() | self._tried
        return [call for call in calls if keys[id(call)] not in known]

    def _tables(
        self, losses: Tensor, found: dict[Call, Verdict], keys: dict[int, tuple], index: ModelIndex
    ) -> list[Call]:
        """The calls that are tables of positions as long as a batch; raises where examples mix in truth."""
        # Of all examples, a table has a row that isn't finite where one example's is. As a tensor that all share,
        # examples' own rows have the same norms.
        dark = [call for call, verdict in found.items() if verdict.dark]
        dark = [call for call in dark if (found[call].spreads and not call.sources) or are_positions(losses, [call])]
        mixing = [call for call, verdict in found.items() if verdict.major is None]
        if not mixing:
            return dark
        if not are_positions(losses, mixing):
            call = next((call for call in mixing if call.sources), mixing[0])
            too_small = TOO_SMALL if call.dtype == torch.float16 else ""
            rows = call.shape[call.batch_dim]
            table = f", or, if it gives {rows} rows for all examples together, begin with a batch of another size"
            raise UnsupportedModelError(
                f"{index.layer(call)}: one example's loss depends on rows of this output that belong to others "
                f"({list(call.shape)}, examples in dimension {call.batch_dim}), so examples mix"
                f"{too_small}; compute each loss from its own example, or correct wrap(model, batch_dim={{...}})"
                f"{table if not call.sources and (len(call.shape) == 2 or rows > losses.shape[0]) else ''}"
            )
        self._positions |= {keys[id(call)][1:] for call in mixing}
        return [*mixing, *dark]

    def _is_table(self, call: Call, examples: int) -> bool:
        """Whether the call was found to be a table of positions, of as many rows an example as now."""
        return bool(examples) and _key(call, call.shape[call.batch_dim] // examples) in self._positions

    def _region(self, losses: Tensor, uses: Uses, odd: list[Call], index: ModelIndex) -> Region:
        """What all examples share, and where they meet it; of one example, or none, all is its own."""
        leaves = {node: node.variable for node in uses.leaves}
        examples = losses.shape[0]
        if examples <= 1:
            alone = {id(call) for call in odd}
            nodes = from_below(losses) if odd else []
            calls = {node: node.call for node in nodes if id(getattr(node, "call", None)) in alone}
            return Region(examples, [], leaves, calls)
        places = Places() if uses.reorders else self._places.setdefault(uses.size, Places())
        search = Search(losses, odd, leaves, index, places)

        alone = {id(call) for call in odd}
        whole = [call for call in uses.calls if id(call) not in alone]

        def prove(candidates: list[Candidate]) -> tuple[dict[Edge, Decision], bool]:
            return decide(losses, whole, candidates, index, places)

        try:
            return settle(search, prove)
        except (NotShared, UnsupportedModelError) as refused:
            if search.dark:
                # Nobody knows what one backward an example would not tell, and nothing is refused for what it is.
                return Region(examples, [], leaves, search.calls)
            if isinstance(refused, NotShared):
                raise not_a_batch(refused.call, examples, index.layer(refused.call)) from None
            raise

    def _key(self, call: Call, examples: int, index: ModelIndex) -> tuple:
        return _key(call, row_count(call, examples, index.layer(call)))

    @property
    def constants(self) -> int:
        """How many uses of layers are known to see no examples."""
        return len(self._constant)

    @property
    def is_open(self) -> bool:
        """Whether the last rehearsal left something that another one may prove."""
        return not self._rehearsed <= self._proved.keys()

    def _major(self, call: Call, key: tuple, verdict: Verdict | None, examples: int, index: ModelIndex) -> str:
        if key[-1] == 1 or examples <= 1:
            return "example"
        if key in self._proved:
            return self._proved[key]
        if verdict is None:
            return "example"  # all of its gradient is zero, or will be looked at when it isn't
        if not (verdict.shown or verdict.dark):
            raise UnsupportedModelError(
                f"{index.layer(call)}: {key[-1]} rows an example are folded into its batch dimension, and this batch "
                f"doesn't show how; give it inputs [B, positions, features] instead"
            )
        return str(verdict.major)
