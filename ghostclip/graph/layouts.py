"""When ownership is measured, and what is remembered of it: one layout for each structure of graphs.

A batch is measured when its structure is unknown; when it is the 2nd, 4th, 8th and so on of its structure, or every
128th (16th in float16); when it is at least twice as large as any that was measured; when operations in it move rows by
values; when a hook was registered since the forward; and when something shows up where all gradients were zero. What is
found is stored, from the 2nd batch on, only where it is regular (every example has as many rows, in order), was shown
by rows of two examples, which fit no other order, and no operation moved rows. Any other structure is measured in every
batch.

Rows of which a batch doesn't show whose they are (zero, tiny, not finite) count by their places where a layout is
stored, or would be. Elsewhere they are nobody's, as are those of a layer whose whole gradient is zero: they become
zeros, lest 0 * inf of one example be another's NaN.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.errors import LossShapeError, RowsMovedError, UnsupportedModelError
from ghostclip.graph import measuring
from ghostclip.graph.alarm import rings
from ghostclip.graph.measuring import Batch, Measured, may_move, movements_of, rows_of
from ghostclip.graph.moves import Movements
from ghostclip.graph.nodes import Edge, inputs_of
from ghostclip.graph.overwritten import FindForward
from ghostclip.graph.owners import spreads
from ghostclip.graph.parameter_names import ParameterNames
from ghostclip.graph.reader import Uses
from ghostclip.graph.row_layout import Regrouping, RowLayout, ZeroGradientCheck, check_calls, of_nobody, row_layout
from ghostclip.graph.rows import Owned, Rows, Subject
from ghostclip.graph.shared.known import KnownShared
from ghostclip.graph.shared.search import region_up_to_losses
from ghostclip.native.custom_ops import is_traced
from ghostclip.norms.ragged import RowIndex

__all__ = ["MOVED", "Layouts", "RowLayout"]

MOVED = (
    "in this batch one example's loss depends on rows of others, so examples mix, or rows lie in another order than in "
    "earlier batches of its kind; nothing was clipped. Compute each loss from its own example"
)
TOO_SMALL = (
    "some float16 gradients are too small beside the batch's largest (2**-16 of it) to be told whose they are, and "
    "this model may move rows; nothing was clipped. Use bfloat16 or float32"
)
SPREAD = (
    "examples of this batch are not finite, and an operation of the model gives NaN of one to others (0 * NaN is NaN, "
    "as where a mask keeps packed texts apart), so that one may leave out the others; nothing was clipped. Look for "
    "inputs that are not finite, or pad the examples in place of packing them"
)
# Every so many batches of a structure are measured, and so many where gradients are float16.
EVERY, EVERY_HALF = 128, 16
# Of batches that aren't measured one in so many, at random, is watched by marks, which takes half a step of a small
# network.
WATCHED = 16
# Structures whose largest norm is below it aren't watched: beside marks of 2 ** -15 squares would leave float32.
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
        single: whether each had one row of each example, which is in any order.
        silent_calls, silent_edges: whose gradients were zero.
        shared, met: what all examples share, and the rows of its boundaries.
        movements: what has to be looked at in each batch.
        largest: examples in the largest batch that was measured.
        half: whether some operation computes in float16.
    """

    rows: Sequence[Rows | None]
    single: Sequence[bool]
    silent_calls: Sequence[int]
    silent_edges: Sequence[tuple[int, int]]
    shared: KnownShared
    met: Sequence[Rows]
    movements: Movements
    largest: int
    half: bool

    def fits(self, uses: Uses, examples: int) -> bool:
        """Whether each use of a layer can have as many rows of each example."""
        for call, rows, single in zip(uses.calls, self.rows, self.single, strict=True):
            if rows is None:
                continue
            size = call.shape[rows.dim]
            if not size or size % examples or (single and size != examples):
                return False
        return True


@dataclass
class _Structure:
    """What is remembered of graphs of one structure.

    Attributes:
        batches: how many there were.
        layout: as it was found, where it is taken to hold; None: the next batch is measured.
        always: whether every batch is measured, since one was irregular, or refused.
        unsettled: whether the last full measurement, of all tensors, gave a layout that may not be stored.
        shared: what all examples share, where it was shown not to depend on them; None: that isn't known.
        largest_norm: of an example in a batch that was measured.
    """

    batches: int = 0
    layout: _Layout | None = None
    always: bool = False
    unsettled: bool = False
    shared: KnownShared | None = None
    largest_norm: float = 0.0

    @property
    def is_scheduled(self) -> bool:
        """Whether the schedule has this batch measured: the 1st, 2nd, 4th and so on, and every 128th."""
        every = EVERY_HALF if self.layout is not None and self.layout.half else EVERY
        return self.batches & (self.batches - 1) == 0 or self.batches % every == 0


@dataclass
class Layouts:
    """Remembers whose rows are whose, by the structures of graphs.

    Args:
        keep_resident: called with Parameters whose values are needed after a backward, too.
    """

    keep_resident: Callable[[list[nn.Parameter]], None]
    _structures: dict[int, _Structure] = field(default_factory=dict)
    _unstored: int = 0  # batches whose layout wasn't stored
    _spreads: bool = False  # whether what isn't finite gets from one example to others

    def lay_out(
        self, losses: Tensor, uses: Uses, names: ParameterNames, *, forward: FindForward = lambda: None,
        indices: Sequence[RowIndex] = (), anew: bool = False, hold: bool = False,
    ) -> RowLayout:  # fmt: skip
        """Every use of a parameter behind ``losses`` [B], and how each call's rows belong to the examples.

        Args:
            losses, uses, names: what `read_graph` was given and found.
            forward: finds what runs the forward again on other examples; None where nothing can.
            indices: owners of rows as the user gave them (``batch_index``); what is measured must agree with them.
            anew: measure this batch whatever is known.
            hold: where the layout isn't to be stored, hold the gradients of the backward from ones, so that no other is
                needed for the norms.

        Raises:
            UnsupportedModelError: examples mix, or an index doesn't agree.
            LossShapeError: no example enters before the losses.
        """
        if len(losses) < 2:
            return _of_one(losses, uses)
        structure = self._structure(uses.structure)
        structure.batches += 1
        if structure.layout is None or anew or indices or _is_due(structure, structure.layout, uses, len(losses)):
            if is_traced():
                raise UnsupportedModelError(
                    "whose rows are whose must be measured in every batch of this forward, so no step can be compiled"
                )
            layout = _measured(structure, Batch(losses, uses, names, forward, indices, self.keep_resident), hold)
            if structure.layout is None:
                self._look_for_spreading(losses, uses, layout)
            if layout.drops_odd and self._spreads:
                raise UnsupportedModelError(SPREAD)
            return layout
        return self._by_layout(structure.layout, uses, losses)

    def _structure(self, key: int) -> _Structure:
        if key not in self._structures:
            if len(self._structures) > REMEMBERED:
                self._structures.clear()
            self._structures[key] = _Structure()
        return self._structures[key]

    def measure_next(self, key: int) -> None:
        """The next batch of this structure is measured: this one wasn't laid out as was stored."""
        structure = self._structure(key)
        structure.layout = structure.shared = None

    def draws_watched(self, key: int) -> bool:
        """Draws whether the passes of a batch that isn't measured start from marks.

        None do where gradients of the structure are so small that their squares would leave float32 beside marks.
        """
        return _chance.random() * WATCHED < 1 and (self._structure(key).largest_norm or 1.0) >= SMALL

    def check_norms(
        self, key: int, found: Sequence[float], examples: int, *, measured: bool, again: bool, graph_stays: bool = False
    ) -> None:
        """Raises RowsMovedError where the norms of a batch that wasn't measured follow marks.

        Args:
            key: the structure.
            found: `figures` of the norms.
            examples: B.
            measured: whether the batch was.
            again: whether it can be tried again.
            graph_stays: whether it can be over the same graph.
        """
        structure = self._structure(key)
        if measured:
            if math.isfinite(found[0]):
                structure.largest_norm = max(found[0], structure.largest_norm)
        elif rings(found, examples, structure.largest_norm, again):
            self.measure_next(key)
            raise RowsMovedError(MOVED, graph_stays=graph_stays)

    def _look_for_spreading(self, losses: Tensor, uses: Uses, layout: RowLayout) -> None:
        """In the 2nd, 4th, 8th batch and so on of those without a stored layout."""
        self._unstored += 1
        if self._unstored > 1 and self._unstored & (self._unstored - 1) == 0:
            attempt = self._unstored.bit_length()
            self._spreads |= spreads(losses, layout.rows, uses.weights_alone, attempt)

    def _by_layout(self, known: _Layout, uses: Uses, losses: Tensor) -> RowLayout:
        """How a batch is laid out whose structure is known."""
        region = known.shared.region(uses, known.met, len(losses))
        if region is not None:
            self.keep_resident(region.parameters)
        silent = [uses.calls[number] for number in known.silent_calls]
        edges = [(uses.nodes[place], number) for place, number in known.silent_edges]
        found: dict[Subject, Rows] = {
            call: each for call, each in zip(uses.calls, known.rows, strict=True) if each is not None
        }
        found |= {call: of_nobody(call, found[call].dim, len(losses)) for call in silent if call in found}
        check = ZeroGradientCheck(silent, edges) if silent or edges else None
        return row_layout(uses, found, region, len(losses), half=known.half, check=check)


def _is_due(structure: _Structure, known: _Layout, uses: Uses, examples: int) -> bool:
    """Whether a batch of a known structure is measured again."""
    if is_traced():  # all its batches have one size
        return known.movements.moved(uses, examples)
    return (
        examples >= 2 * known.largest
        or structure.is_scheduled
        or uses.hooked
        or not known.fits(uses, examples)
        or known.movements.moved(uses, examples)
    )


def _measured(structure: _Structure, batch: Batch, hold: bool) -> RowLayout:
    """Measures a batch, and stores what was found where it will hold."""
    uses, examples = batch.uses, len(batch.losses)
    # Not in the first batch: the second is measured in any case.
    may_store = structure.batches > 1 and not (structure.always or batch.indices or uses.hooked)
    found = None
    try:
        # What all examples share is looked for again in the 1st, 2nd, 4th batch and so on, and with a stored layout.
        open_ = structure.layout is None and (structure.unsettled or not may_store)
        if open_ and structure.shared is not None and not structure.is_scheduled:
            found = measuring.measure_boundaries(batch, structure.shared, hold)
        if found is None:
            found = measuring.measure_all(batch, every_tensor=may_store, hold=hold)
            _remember(structure, batch, found, may_store)
        known, tried = structure.layout is not None, may_store or structure.unsettled or structure.always
        if not (known or tried or uses.hooked) and any(each.is_partly_shown for each in found.seen(uses.calls)):
            found = measuring.measure_all(batch, every_tensor=True, hold=False)
            known = _proven(batch, found, examples) is not None
        check_calls(uses, found.owned, found.shared_calls, batch.indices, batch.names)
    except (LossShapeError, UnsupportedModelError):
        structure.layout = structure.shared = None
        structure.always = True
        raise
    doubtful = [] if known else found.seen(uses.calls)
    if (too_small := [each for each in doubtful if each.too_small]) and may_move(batch, too_small):
        raise UnsupportedModelError(TOO_SMALL)
    rows: dict[Subject, Rows] = {call: rows_of(call, found.owned[call], known, batch) for call in uses.calls}
    for boundary in () if known or found.region is None else found.region.boundaries:
        boundary.rows = found.owned[boundary.edge].surely
    return row_layout(
        uses, rows, found.region, examples, stored=structure.layout is not None, measured=True,
        gradients=found.gradients, drops_odd=any(each.odd for each in doubtful),
    )  # fmt: skip


def _holds(known: _Layout, batch: Batch, found: Measured) -> bool:
    """Whether a batch that doesn't prove a layout by itself has the one that earlier batches proved."""
    uses, examples = batch.uses, len(batch.losses)
    if uses.hooked or batch.indices or examples >= 2 * known.largest or not known.fits(uses, examples):
        return False
    for call, rows in zip(uses.calls, known.rows, strict=True):
        own = found.owned[call]
        if rows is None or not (own.zero or (own.is_regular and own.rows == rows)):
            return False
    return found.region is None and not known.movements.moved(uses, examples)


def _remember(structure: _Structure, batch: Batch, found: Measured, may_store: bool) -> None:
    """Stores what all examples share; the layout, too, if all batches like this one have it."""
    uses, owned, region = batch.uses, found.owned, found.region
    reads = any(not call.sources and owned[call].rows is not None for call in uses.calls)
    if region is None or region.shown or not reads:  # else the next batch may show more
        structure.shared = KnownShared.of(uses, owned, region)
    before, structure.layout = structure.layout, None
    if may_store:
        structure.layout = _proven(batch, found, 0 if before is None else before.largest)
        if structure.layout is None and before is not None and _holds(before, batch, found):
            structure.layout = before
        structure.unsettled = structure.layout is None
        structure.always |= not all(each.is_regular for each in found.seen(uses.calls))


def _proven(batch: Batch, found: Measured, largest: int) -> _Layout | None:
    """The layout of a batch of which all tensors were measured, if rows are regular and no others may be in the next.

    None where rows fit another order, too, or an operation may move them. ``largest`` is the most examples so far.
    """
    uses, owned, region, examples = batch.uses, found.owned, found.region, len(batch.losses)
    seen = found.seen(uses.calls)
    if not all(each.is_regular for each in seen):
        return None
    moves = movements_of(batch, found)
    unseen = any(owned[call].zero for call in found.shared_calls) or not (region is None or region.shown)
    if unseen or moves is None or moves.moved(uses, examples):
        return None
    if any(not each.shown or each.ambiguous for each in seen):
        return None
    rows = [
        None if call in found.shared_calls else owned[call].rows or Rows(call.batch_dim, "example")
        for call in uses.calls
    ]
    return _Layout(
        rows,
        [each is not None and call.shape[each.dim] == examples for call, each in zip(uses.calls, rows, strict=True)],
        [number for number, call in enumerate(uses.calls) if owned[call].zero],
        [(uses.places[node], number) for node, number in _silent_edges(batch.losses, uses, found.at_edges(uses))],
        KnownShared.of(uses, owned, region),
        [] if region is None else [boundary.rows for boundary in region.boundaries],
        moves,
        max(examples, largest),
        batch.half,
    )


def _of_one(losses: Tensor, uses: Uses) -> RowLayout:
    """The layout of one example, to which all rows belong; or of none, where layers may still see rows."""
    examples = len(losses)
    odd = [] if examples else [call for call in uses.calls if call.shape[call.batch_dim]]
    region = region_up_to_losses(losses, uses, odd) if odd or uses.leaves else None
    shared = set() if region is None else set(region.calls.values())
    calls = [call for call in uses.calls if call not in shared]
    regrouping: dict[int, Regrouping] = {
        id(c): (rows, "example", None) for c in calls if (rows := c.shape[c.batch_dim]) > 1
    }
    empty = [call for call in calls if examples and not call.shape[call.batch_dim]]
    regrouping |= {id(c): (1, RowIndex(torch.zeros(0, dtype=torch.int64, device=c.device), 1), None) for c in empty}
    return RowLayout([*calls, *(() if region is None else region.uses)], regrouping, stored=not uses.calls)


def _silent_edges(losses: Tensor, uses: Uses, owned: Mapping[Edge, Owned]) -> list[Edge]:
    """Tensors with a gradient of zeros whose consumers had another: something multiplied it with zeros.

    Without those below all trained parameters, as an embedding whose output requires a gradient for the sake of
    checkpointing: the backwards that measure end above them.
    """
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
    return [edge for edge in fed if edge[0] in reached and edge[0] in uses.above_parameters]
