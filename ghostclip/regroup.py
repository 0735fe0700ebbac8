"""Whose row is whose: what was proved of a model's layers on meeting them, and where a layer sees the examples.

By the proof of `ghostclip.proof` a layer's batch dimension is where it is said to be and in the order of the losses;
rows folded into the batch (positions, windows, heads) are grouped by example or by row. Layers that saw no examples,
and parameters used outside of layers, are followed to where they meet the examples (`ghostclip.search`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ghostclip.errors import LossShapeError, UnsupportedModelError
from ghostclip.graph import Uses
from ghostclip.index import ModelIndex
from ghostclip.nn.base import Call
from ghostclip.positions import are_positions
from ghostclip.proof import decide, majors_of
from ghostclip.seams import Edge
from ghostclip.search import Candidate, Decision, NotShared, Places, Search, settle
from ghostclip.shared import Region, from_below
from ghostclip.tail import Tail

__all__ = ["Grouping", "row_count"]

# So many graphs are remembered as a whole.
MOST_GRAPHS = 1000
# After so many updates a layer that nothing reached is tried again: a head that starts with zeros opens with the first.
UPDATES = 8


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


def _key(call: Call, count: int) -> tuple:
    """What a layer's use with so many rows an example has in common in all batches."""
    return (id(call.layer), call.parameters, call.batch_dim, len(call.shape), count)


class Grouping:
    """Remembers which uses of which layers have been proved to keep examples apart, and how their rows are grouped."""

    def __init__(self) -> None:
        self._proved: dict[tuple, str] = {}
        # What the last rehearsal met.
        self._rehearsed: set[tuple] = set()
        self._seen: dict[tuple, int] = {}
        # When a key was tried last: the versions of the parameters, and how many updates it was tried after.
        self._tried: dict[tuple, tuple[int, int]] = {}
        self._positions: set[tuple] = set()
        # How the calls' rows are grouped for a batch size and a graph in which all is proved.
        self._settled: dict[tuple, list[str]] = {}
        self._places: dict[int, Places] = {}

    def is_settled(self, graph: tuple, uses: Uses) -> bool:
        """Whether all was proved of graphs with that key, and needn't be proved again for these ``uses``."""
        return graph in self._settled and not (uses.reorders or uses.leaves or self._positions)

    def prove(
        self, losses: Tensor, uses: Uses, index: ModelIndex, rehearsal: bool = False, tail: Tail | None = None
    ) -> tuple[list[Call], dict[int, str]]:
        """Every use of a parameter, and how each call's rows are grouped ("example" or "row" major), by id(call).

        Runs extra backwards on first meeting a layer with so many rows an example in a graph of so many nodes, and none
        afterwards, but for a graph that may order its examples differently every time.

        Args:
            losses: [B].
            uses: what is behind them.
            index: of the model.
            rehearsal: the graph is that of a few examples, and will be met again with more of them.
            tail: its lowest layers, if they can go by parts of the examples.

        Raises:
            UnsupportedModelError: rows of other examples move with one example's loss, or the grouping can't be told.
        """
        examples = losses.shape[0]
        calls, region = uses.calls, None
        graph = uses.key(examples)
        if self.is_settled(graph, uses):
            return calls, {id(call): major for call, major in zip(calls, self._settled[graph], strict=True)}
        odd = [call for call in calls if _is_odd(call, examples)]
        if self._positions:
            odd += [call for call in calls if call not in odd and self._is_table(call, examples)]
        if odd or uses.leaves:
            region = self._region(losses, uses, odd, index)
            shared = {id(call) for call in region.calls.values()}
            calls = [call for call in calls if id(call) not in shared]
        keys = {id(call): (uses.size, *self._key(call, examples, index)) for call in calls}
        if rehearsal:
            self._rehearsed = set(keys.values())
        if examples > 1 and (uses.reorders or not all(key in self._proved for key in keys.values())):
            versions = sum([parameter._version for _, parameter in index.trained()])
            pending = [call for call in calls if uses.reorders or self._is_open(keys[id(call)], rehearsal, versions)]
            if mixing := self._prove_calls(losses, uses, calls, pending, keys, None if rehearsal else versions, tail):
                self._take_as_positions(losses, mixing, keys, index)
                return self.prove(losses, uses, index, rehearsal, tail)
        majors = {id(call): self._major(call, keys[id(call)], examples, index) for call in calls}
        settled = region is None and all(key in self._proved for key in keys.values())
        if settled and len(self._settled) < MOST_GRAPHS:
            self._settled[graph] = list(majors.values())
        return (calls if region is None else [*calls, *region.uses]), majors

    def _prove_calls(
        self,
        losses: Tensor,
        uses: Uses,
        calls: Sequence[Call],
        pending: Sequence[Call],
        keys: dict[int, tuple],
        versions: int | None,
        tail: Tail | None,
    ) -> list[Call]:
        """Proves what is pending; returns the calls where examples mix. ``versions`` are None in a rehearsal."""
        found = majors_of(losses, calls, pending, False, tail) if pending else {}
        for call, major in found.items():
            if major:
                self._proved[keys[id(call)]] = major
        mixing = [call for call, major in found.items() if major is None]
        if versions is not None:
            # What is refused now is tried again, whoever goes on nevertheless.
            refused = {keys[id(call)] for call in mixing}
            for key in set(keys.values()) - refused:
                self._seen[key] = self._seen.get(key, 0) + 1
            for key in {keys[id(call)] for call in pending} - refused:
                last, updates = self._tried.get(key, (versions, 0))
                self._tried[key] = versions, updates + (versions != last)
        return mixing

    def _take_as_positions(self, losses: Tensor, mixing: list[Call], keys: dict[int, tuple], index: ModelIndex) -> None:
        """From now on, the calls are tables of positions as long as a batch; raises where examples mix in truth."""
        if not are_positions(losses, mixing):
            call = next((call for call in mixing if call.sources), mixing[0])
            narrow = ", or its float16 gradients are too small, which looks alike (give loss_scale=1024.0)"
            raise UnsupportedModelError(
                f"{index.layer(call)}: one example's loss depends on rows of this output that belong to others "
                f"({list(call.shape)}, examples in dimension {call.batch_dim}), so examples mix"
                f"{narrow if call.dtype == torch.float16 else ''}; compute each loss from its own example, or correct "
                "wrap(model, batch_dim={...})"
            )
        self._positions |= {keys[id(call)][1:] for call in mixing}

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

        def prove(candidates: list[Candidate]) -> dict[Edge, Decision]:
            return decide(losses, whole, candidates, index, places)

        try:
            return settle(search, prove)
        except NotShared as refused:
            call = refused.call
            raise not_a_batch(call, examples, index.layer(call)) from None

    def _key(self, call: Call, examples: int, index: ModelIndex) -> tuple:
        return _key(call, row_count(call, examples, index.layer(call)))

    @property
    def is_open(self) -> bool:
        """Whether the last rehearsal left something that another one may prove."""
        return not self._rehearsed <= self._proved.keys()

    def _is_open(self, key: tuple, rehearsal: bool, versions: int) -> bool:
        """Not proved; where nothing has reached the layer so far, tried at the 1st, 2nd, 4th, 8th ... batch.

        And after the first updates; a rehearsal takes the place of no batch: what reached nothing by a few examples may
        by the others.
        """
        met = self._seen.get(key, 0) + 1
        last, updates = self._tried.get(key, (versions, 0))
        due = met & (met - 1) == 0 or (versions != last and updates < UPDATES)
        return key not in self._proved and (rehearsal or due)

    def _major(self, call: Call, key: tuple, examples: int, index: ModelIndex) -> str:
        if key[-1] == 1 or examples <= 1:
            return "example"
        if key not in self._proved:
            raise UnsupportedModelError(
                f"{index.layer(call)}: {key[-1]} rows an example are folded into its batch dimension, and this batch "
                f"doesn't show how; give it inputs [B, positions, features] instead"
            )
        return self._proved[key]
