"""When ownership is measured, and what is remembered of it: one layout for each structure of graphs.

A batch is measured when its structure is unknown; when it is the 2nd, 4th, 8th and so on of its structure, or every
128th; when it is at least twice as large as any that was measured; when operations in it move rows by values; and when
something shows up where all gradients were zero. What is found is stored only where it is regular (every example has as
many rows, in order) and was shown by rows of two examples, which fit no other order. Any other structure is measured in
every batch.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.errors import LossShapeError, RowsMovedError, UnsupportedModelError
from ghostclip.graph.alarm import rings
from ghostclip.graph.moves import Movements, movements
from ghostclip.graph.nodes import Edge, inputs_of
from ghostclip.graph.overwritten import FindForward, check_shared
from ghostclip.graph.owners import Gradients, Owned, Rows, Subject, owners
from ghostclip.graph.parameter_names import ParameterNames
from ghostclip.graph.reader import Uses
from ghostclip.graph.row_layout import RowLayout, WatchedZeros, check_calls, nobody, row_layout
from ghostclip.graph.shared.known import KnownShared
from ghostclip.graph.shared.search import (
    Doubt,
    edges_above,
    edges_of,
    given_shared,
    may_be_shared,
    shared_part,
    without_boundaries,
)
from ghostclip.graph.shared.subgraph import SharedSubgraph
from ghostclip.native.custom_ops import is_traced
from ghostclip.nn.base import LayerCall
from ghostclip.norms.ragged import RowIndex, RowOrder

__all__ = ["MOVED", "Layouts", "RowLayout"]

MOVED = (
    "in this batch one example's loss depends on rows of others, so examples mix, or rows lie in another order than in "
    "earlier batches of its kind; nothing was clipped. Compute each loss from its own example"
)
# Every so many batches of a structure are measured, and so many where gradients are float16.
EVERY, EVERY_HALF = 128, 16
# Of the others one in so many, at random, is watched by marks. In a small network that takes as long as half a step.
WATCHED = 16
# Of the largest norm: below it squares of gradients would leave float32 beside marks.
SMALL = 1e-8
# Where so many structures are remembered, all are forgotten: a forward that cuts its inputs at random makes new ones
# for ever.
REMEMBERED = 10_000


# Not Python's own, which users seed.
_chance = random.Random()


@dataclass(frozen=True)
class _Layout:
    """What is stored of a structure; places are those of nodes in the walk, numbers those of uses of layers.

    Attributes:
        rows: of each use of a layer; None where it is shared.
        silent_calls, silent_edges: whose gradients were zero.
        shared, met: what all examples share, and the rows of its boundaries.
        movements: what has to be looked at in each batch.
        largest: of how many examples the largest batch was that was measured.
        half: whether some operation computes in float16.
    """

    rows: Sequence[Rows | None]
    silent_calls: Sequence[int]
    silent_edges: Sequence[tuple[int, int]]
    shared: KnownShared
    met: Sequence[Rows]
    movements: Movements
    largest: int
    half: bool

    def fits(self, uses: Uses, examples: int) -> bool:
        """Whether each use of a layer can have as many rows of each example."""
        for call, rows in zip(uses.calls, self.rows, strict=True):
            if rows is not None and (not (size := call.shape[rows.dim]) or size % examples):
                return False
        return True


@dataclass
class Layouts:
    """Measures and remembers whose rows are whose, by the structures of graphs.

    Args:
        hold: called with Parameters whose values are needed after a backward, too.
    """

    hold: Callable[[list[nn.Parameter]], None]
    _known: dict[int, _Layout] = field(default_factory=dict)
    # Structures of which a batch was irregular, or refused.
    _always: set[int] = field(default_factory=set)
    _batches: Counter[int] = field(default_factory=Counter)
    # The largest norm of an example in a batch that was measured.
    _largest: dict[int, float] = field(default_factory=dict)
    _shared: dict[int, KnownShared] = field(default_factory=dict)

    def lay_out(
        self, losses: Tensor, uses: Uses, names: ParameterNames, *, forward: FindForward = lambda: None,
        indices: Sequence[RowIndex] = (), anew: bool = False, hold: bool = False,
    ) -> RowLayout:  # fmt: skip
        """Every use of a parameter behind ``losses`` [B], and how each call's rows belong to the examples.

        Args:
            losses, uses, names: what `read_graph` was given and found.
            forward: finds what runs the forward again on other examples; None where nothing can.
            indices: whose the rows are that somebody says; they must agree.
            anew: measure this batch whatever is known.
            hold: where every batch of a structure is measured, hold the gradients of the backward from ones, so that
                no other is needed for the norms.

        Raises:
            UnsupportedModelError: examples mix, or an index doesn't agree.
        """
        examples, key = len(losses), uses.structure
        if examples < 2:
            return self._of_one(losses, uses)
        known = self._known.get(key)
        self._batches[key] += 1
        if known is None or anew or indices or self._is_due(known, uses, examples):
            if is_traced():
                raise UnsupportedModelError("whose rows are whose is measured in every batch of this forward")
            return self._measured(losses, uses, names, forward, indices, hold)
        return self._by_layout(known, uses, examples)

    def measure_always(self, key: int) -> None:
        """Every batch of this structure is measured from now on: one of them was irregular, or refused."""
        self.measure_next(key)
        self._always.add(key)

    def measure_next(self, key: int) -> None:
        """The next batch of this structure is measured: this one wasn't laid out as was stored."""
        self._known.pop(key, None)
        self._shared.pop(key, None)

    def is_watched(self, key: int) -> bool:
        """Whether the passes of a batch that isn't measured start from marks.

        None do where gradients of the structure are so small that their squares would leave float32 beside marks.
        """
        return _chance.random() * WATCHED < 1 and self._largest.get(key, 1.0) >= SMALL

    def check_norms(self, key: int, found: Sequence[float], examples: int, *, measured: bool, again: bool) -> None:
        """Raises RowsMovedError where the norms of a batch that wasn't measured follow marks.

        Args:
            key: the structure.
            found: `figures` of the norms.
            examples: B.
            measured: whether the batch was.
            again: whether it can be tried again.
        """
        if measured:
            if math.isfinite(found[0]):
                self._largest[key] = max(found[0], self._largest.get(key, 0.0))
        elif rings(found, examples, self._largest.get(key, 0.0), again):
            self.measure_next(key)
            raise RowsMovedError(MOVED)

    def _is_due(self, known: _Layout, uses: Uses, examples: int) -> bool:
        """Whether a batch of a known structure is measured again."""
        number = self._batches[uses.structure]
        every = EVERY_HALF if known.half else EVERY
        if is_traced():  # a trace can't look at an index; all its batches have one size
            return bool(known.movements.indexed)
        return (
            examples >= 2 * known.largest
            or number & (number - 1) == 0
            or number % every == 0
            or uses.hooked
            or not known.fits(uses, examples)
            or known.movements.moved(uses, examples)
        )

    def _of_one(self, losses: Tensor, uses: Uses) -> RowLayout:
        """The layout of one example, to which all rows belong; or of none, where layers may still see rows."""
        examples = len(losses)
        odd = [] if examples else [call for call in uses.calls if call.shape[call.batch_dim]]
        region = without_boundaries(losses, uses, odd) if odd or uses.leaves else None
        shared = set() if region is None else set(region.calls.values())
        calls = [call for call in uses.calls if call not in shared]
        folded: dict[int, tuple[int, RowOrder]] = {
            id(c): (rows, "example") for c in calls if (rows := c.shape[c.batch_dim]) > 1
        }
        empty = [call for call in calls if examples and not call.shape[call.batch_dim]]
        folded |= {id(c): (1, RowIndex(torch.zeros(0, dtype=torch.int64, device=c.device), 1)) for c in empty}
        return RowLayout([*calls, *(() if region is None else region.uses)], folded, stored=not uses.calls)

    def _measured(
        self,
        losses: Tensor,
        uses: Uses,
        names: ParameterNames,
        forward: FindForward,
        indices: Sequence[RowIndex],
        hold: bool,
    ) -> RowLayout:
        """Measures a batch, and stores what was found where it will hold."""
        examples, key = len(losses), uses.structure
        if len(self._batches) > REMEMBERED:
            self._known, self._always, self._batches, self._largest, self._shared = {}, set(), Counter(), {}, {}
        may_store = key not in self._always and not indices and not uses.hooked
        gradients: Gradients | None = {} if hold and not computes_in_half(losses, uses) else None
        try:
            owned, region = self._in_part(losses, uses, indices, gradients)
            whole = owned is None
            if owned is None:
                owned = self._owners(losses, uses, indices, may_store)
                region = self._region(losses, uses, owned, names, forward)
                reads = any(not call.sources and owned[call].rows is not None for call in uses.calls)
                if region is None or region.shown or not reads:  # else the next batch may show more
                    self._shared[key] = KnownShared.of(uses, region)
            shared = set() if region is None else set(region.calls.values())
            check_calls(uses, owned, shared, indices, names)
        except (LossShapeError, UnsupportedModelError):
            self.measure_always(key)
            raise
        if may_store and whole:
            self._store(losses, uses, owned, region)
        rows: dict[Subject, Rows] = {
            call: owned[call].rows or Rows(call.batch_dim, nobody(call, examples)) for call in uses.calls
        }
        held = None if whole else gradients
        return row_layout(uses, rows, region, examples, stored=key in self._known, measured=True, gradients=held)

    def _in_part(
        self, losses: Tensor, uses: Uses, indices: Sequence[RowIndex], gradients: Gradients | None
    ) -> tuple[dict[Subject, Owned], SharedSubgraph | None] | tuple[None, None]:
        """What marks show of the calls, and of the boundaries above what an earlier batch's examples shared.

        Whatever is below a boundary whose rows have one owner each, its gradients are those of that example. So where
        nothing is stored, nothing else is looked at, but in batches in which stored layouts are measured, too: the
        1st, 2nd, 4th and so on. (None, None) where all has to be.
        """
        key, examples = uses.structure, len(losses)
        known, number = self._shared.get(key), self._batches[key]
        if key in self._known or known is None or number & (number - 1) == 0 or number % EVERY == 0:
            return None, None
        edges, leaves, half = known.edges(uses), [node.variable for node in uses.leaves], computes_in_half(losses, uses)
        silent = [(uses.nodes[place], number) for place, number in known.silent]
        owned = owners(losses, uses.calls, [*edges, *silent], leaves, indices, half, gradients)
        tables = {uses.calls[number] for number in known.tables}
        rest: list[Subject] = [*(call for call in uses.calls if call not in tables), *edges]
        seen = [owned[each] for each in rest]
        if any(each.rows is None or each.open for each in seen) or not all(owned[each].zero for each in silent):
            return None, None
        rows = [owned[edge].rows for edge in edges]
        region = known.region(uses, [each for each in rows if each is not None], examples)
        if region is not None:
            self._hold(region)
        return owned, region

    def _hold(self, region: SharedSubgraph) -> None:
        """Keeps the Parameters below the boundaries for after a backward."""
        below = [parameter for call in region.calls.values() for parameter in call.layer.parameters()]
        self.hold([node.variable for node in region.leaves] + below)

    def _owners(self, losses: Tensor, uses: Uses, indices: Sequence[RowIndex], may_store: bool) -> dict[Subject, Owned]:
        """What marks show of all calls, and of the tensors that matter."""
        leaves, half = [node.variable for node in uses.leaves], computes_in_half(losses, uses)
        if may_store:
            return owners(losses, uses.calls, edges_of(uses, uses.nodes, losses), leaves, indices, half)
        edges = edges_above(uses, uses.leaves, losses) if uses.leaves else []
        owned = owners(losses, uses.calls, edges, leaves, indices, half)
        tables = [uses.capturing[call] for call in uses.calls if may_be_shared(call, owned[call], Doubt.ALL)]
        if left := [edge for edge in edges_above(uses, tables, losses) if edge not in owned] if tables else []:
            owned |= owners(losses, [], left, leaves, indices, half)
        return owned

    def _region(
        self,
        losses: Tensor,
        uses: Uses,
        owned: Mapping[Subject, Owned],
        names: ParameterNames,
        forward: FindForward,
    ) -> SharedSubgraph | None:
        """What all examples share, which must be the same whatever they are; None where nothing is shared."""
        # First with all that may be shared taken for shared; where that finds no boundary, with less (see `Doubt`).
        for doubt in Doubt:
            try:
                region = shared_part(losses, uses, owned, names, doubt)
                if region is not None:
                    self._hold(region)
                    region.shown = check_shared(uses, region, owned, names, forward)
                    for call in region.given:
                        raise given_shared(call, names)
                return region
            except (LossShapeError, UnsupportedModelError):
                if doubt is Doubt.NOTHING:
                    raise
        return None

    def _store(self, losses: Tensor, uses: Uses, owned: Mapping[Subject, Owned], region: SharedSubgraph | None) -> None:
        """Stores the layout if it is regular and was shown by two examples' rows, in one order alone."""
        examples, key, places = len(losses), uses.structure, uses.places
        boundaries = () if region is None else region.boundaries
        subjects: list[Subject] = [*uses.calls, *(boundary.edge for boundary in boundaries)]
        tables = set() if region is None else set(region.calls.values())
        found = [owned[subject] for subject in subjects if not (owned[subject].zero or subject in tables)]
        if not all(each.is_regular for each in found):
            self.measure_always(key)
            return
        at = {subject: each for subject, each in owned.items() if not isinstance(subject, LayerCall)}
        at |= {(uses.capturing[call], 0): owned[call] for call in uses.calls}
        moves = movements(uses, at, examples, () if region is None else region.shared)
        shown = region is None or region.shown
        moved = bool(moves.always) or moves.moved(uses, examples)
        unseen = any(owned[call].zero for call in tables)
        if moved or unseen or not shown or any(not each.shown or each.unclear for each in found):
            self._known.pop(key, None)
            return
        before = self._known.get(key)
        self._known[key] = _Layout(
            [None if call in tables else owned[call].rows or Rows(call.batch_dim, "example") for call in uses.calls],
            [number for number, call in enumerate(uses.calls) if owned[call].zero],
            [(places[node], number) for node, number in _silent_edges(losses, at)],
            KnownShared.of(uses, region),
            [boundary.rows for boundary in boundaries],
            moves,
            max(examples, 0 if before is None else before.largest),
            computes_in_half(losses, uses),
        )

    def _by_layout(self, known: _Layout, uses: Uses, examples: int) -> RowLayout:
        """How a batch is laid out whose structure is known."""
        region = known.shared.region(uses, known.met, examples)
        if region is not None:
            self._hold(region)
        silent = [uses.calls[number] for number in known.silent_calls]
        edges = [(uses.nodes[place], number) for place, number in known.silent_edges]
        found: dict[Subject, Rows] = {
            call: each for call, each in zip(uses.calls, known.rows, strict=True) if each is not None
        }
        check = WatchedZeros(silent, edges) if silent or edges else None
        if check is not None and is_traced():
            raise UnsupportedModelError("no gradient has reached some layer yet")
        return row_layout(uses, found, region, examples, half=known.half, check=check)


def computes_in_half(losses: Tensor, uses: Uses) -> bool:
    """Whether the gradient of some tensor between the layers is float16."""
    types = {tensor.dtype for node in uses.nodes for tensor in getattr(node, "_input_metadata", ())}
    return torch.float16 in {losses.dtype, *types, *(call.dtype for call in uses.calls)}


def _silent_edges(losses: Tensor, owned: Mapping[Edge, Owned]) -> list[Edge]:
    """Tensors with a gradient of zeros whose consumers had another: something multiplied it with zeros."""
    alive = {node for (node, _), each in owned.items() if not each.zero}
    silent = {edge for edge, each in owned.items() if each.zero}
    fed = {edge for node in alive for edge in inputs_of(node) if edge in silent}
    if not fed:
        return []
    # What a layer's rule reads may have a node of its own, which no backward comes to.
    reached, stack = set[Any](), [losses.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in reached:
            reached.add(node)
            stack += [below for below, _ in node.next_functions]
    return [edge for edge in fed if edge[0] in reached]
