"""What one batch shows: whose the rows of each layer are, and what all examples share.

Marks are read at the layers, and at some tensors between them. For a layout that is to be stored these are all, since
any operation may move rows by values in a later batch (moves.py); else those from parameters used outside of layers up
to where examples enter (`measure_all`). Where what all examples share was found in an earlier batch of the structure,
they are the boundaries alone (`measure_boundaries`): below a boundary whose rows have one owner each, gradients are
those of that example.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ghostclip.errors import GhostClipError, LossShapeError, UnsupportedModelError
from ghostclip.graph.moves import Movements, movements
from ghostclip.graph.nodes import Edge
from ghostclip.graph.overwritten import FindForward, check_shared, computed
from ghostclip.graph.owners import Gradients, owners
from ghostclip.graph.parameter_names import ParameterNames
from ghostclip.graph.reader import Uses
from ghostclip.graph.row_layout import of_nobody
from ghostclip.graph.rows import Owned, Rows, Subject
from ghostclip.graph.shared.known import KnownShared
from ghostclip.graph.shared.search import (
    Doubt,
    edges_above,
    edges_near,
    edges_of,
    may_be_shared,
    reads_examples,
    shared_input_error,
    shared_part,
    unread_error,
)
from ghostclip.graph.shared.subgraph import SharedSubgraph
from ghostclip.nn.base import LayerCall
from ghostclip.norms.ragged import RowIndex

__all__ = ["Batch", "Measured", "may_move", "measure_all", "measure_boundaries", "movements_of", "rows_of"]


@dataclass(frozen=True)
class Batch:
    """A batch whose ownership is to be measured.

    Attributes:
        losses, uses, names: what `read_graph` was given and found.
        forward: returns what runs the forward again on other examples, or None where nothing can.
        indices: owners of rows as the user gave them (``batch_index``).
        keep_resident: called with Parameters whose values are needed after a backward, too.
    """

    losses: Tensor
    uses: Uses
    names: ParameterNames
    forward: FindForward
    indices: Sequence[RowIndex]
    keep_resident: Callable[[list[nn.Parameter]], None]

    @functools.cached_property
    def half(self) -> bool:
        """Whether the gradient of some tensor between the layers is float16."""
        types = {tensor.dtype for node in self.uses.nodes for tensor in getattr(node, "_input_metadata", ())}
        return torch.float16 in {self.losses.dtype, *types, *(call.dtype for call in self.uses.calls)}


@dataclass(frozen=True)
class Measured:
    """What marks showed of a batch.

    Attributes:
        owned: of every layer's use, and of those tensors that were looked at.
        region: what all examples share; None where nothing is.
        gradients: of a backward from ones, of all layers and boundaries; None where they weren't held.
    """

    owned: Mapping[Subject, Owned]
    region: SharedSubgraph | None
    gradients: Gradients | None = None

    def seen(self, calls: Sequence[LayerCall]) -> list[Owned]:
        """What was found of boundaries, and of uses of layers but shared ones, whose gradients weren't zero."""
        boundaries = () if self.region is None else self.region.boundaries
        subjects: list[Subject] = [*calls, *(boundary.edge for boundary in boundaries)]
        return [self.owned[each] for each in subjects if not (self.owned[each].zero or each in self.shared_calls)]

    def at_edges(self, uses: Uses) -> dict[Edge, Owned]:
        """``owned`` by tensors of the graph alone: a layer's output is (its node, 0)."""
        found = {subject: each for subject, each in self.owned.items() if not isinstance(subject, LayerCall)}
        return found | {(uses.capturing[call], 0): self.owned[call] for call in uses.calls}

    @property
    def shared_calls(self) -> set[LayerCall]:
        """Uses of layers that all examples share."""
        return set() if self.region is None else set(self.region.calls.values())


def measure_all(batch: Batch, every_tensor: bool, hold: bool) -> Measured:
    """What marks show of all layers, and of the tensors that matter.

    Args:
        batch: to be measured.
        every_tensor: whether all tensors do, as where the layout is to be stored; else those near what is shared.
        hold: hold the gradients of the backward from ones, unless more than one look is taken.

    Raises:
        UnsupportedModelError: examples mix.
        LossShapeError: no example enters before the losses.
    """
    losses, uses = batch.losses, batch.uses
    if every_tensor:
        owned = _owners(batch, uses.calls, edges_of(uses, uses.nodes, losses))
        return Measured(owned, _shared_by_all(batch, owned))
    # Parameters, layers that read something else than a row of each example, and what they meet first. As a rule that
    # is all: examples enter there.
    shared_calls = {call for call in uses.calls if not call.sources and call.shape[call.batch_dim] != len(losses)}
    held: Gradients | None = {} if hold and not batch.half else None
    owned = dict[Subject, Owned]()
    while True:
        near, entered = edges_near(uses, [*uses.leaves, *(uses.capturing[call] for call in shared_calls)], losses)
        left = [edge for edge in near if edge not in owned]
        owned |= _owners(batch, [] if owned else uses.calls, left, gradients=None if owned else held)
        shared = {call for call in uses.calls if may_be_shared(call, owned[call], Doubt.ALL)}
        if shared <= shared_calls:
            break
        shared_calls |= shared
        held = None  # boundaries may be missing
    if any(may_be_shared(edge, owned[edge], Doubt.ALL) and not owned[edge].is_of_one for edge in entered):
        above = edges_above(uses, [*uses.leaves, *(uses.capturing[call] for call in shared_calls)], losses)
        owned |= _owners(batch, [], [edge for edge in above if edge not in owned])
        held = None
    region = _shared_by_all(batch, owned, held)
    return Measured(owned, region, held or None)


def measure_boundaries(batch: Batch, known: KnownShared, hold: bool) -> Measured | None:
    """What marks show of the layers and the ``known`` boundaries; None where more has to be looked at.

    Args:
        batch: to be measured.
        known: what all examples shared in an earlier batch of this structure.
        hold: hold the gradients of the backward from ones.
    """
    uses, edges = batch.uses, known.edges(batch.uses)
    silent = [(uses.nodes[place], number) for place, number in known.silent]
    gradients: Gradients | None = {} if hold and not batch.half else None
    owned = _owners(batch, uses.calls, [*edges, *silent], known.dims(uses), gradients)
    shared_calls = {uses.calls[number] for number in known.shared_calls}
    given: dict[Subject, bool] = {call: bool(call.sources) for call in uses.calls if call not in shared_calls}
    given |= {edge: reads_examples(edge[0], own) for edge, own in zip(edges, known.shared_inputs(uses), strict=True)}
    for subject, reads in given.items():
        found = owned[subject]
        if found.rows is None or (found.uncertain and not (found.is_of_one and reads)):
            return None
    if not all(owned[each].zero for each in silent):
        return None
    rows = [owned[edge].rows for edge in edges]
    region = known.region(uses, [each for each in rows if each is not None], len(batch.losses))
    if region is not None:
        batch.keep_resident(region.parameters)
    return Measured(owned, region, gradients)


def _owners(
    batch: Batch, calls: Sequence[LayerCall], edges: Sequence[Edge], known: Mapping[Subject, int] | None = None,
    gradients: Gradients | None = None,
) -> dict[Subject, Owned]:  # fmt: skip
    uses = batch.uses
    own_code = uses.has_own_code
    try:
        return owners(
            batch.losses, calls, edges, uses.weights_alone, batch.indices, batch.half, known, gradients, own_code
        )
    except Exception as error:
        if not own_code or isinstance(error, (RuntimeError, MemoryError, GhostClipError)):
            raise
        raise UnsupportedModelError(
            f"a hook or torch.autograd.Function of your own raised {type(error).__name__}: to find whose "
            "rows are whose, it is called several times in a step, also with gradients that aren't finite; keep what "
            "a backward reads (ctx.save_for_backward), and let it take any gradient"
        ) from error


def _shared_by_all(
    batch: Batch, owned: Mapping[Subject, Owned], held: Gradients | None = None
) -> SharedSubgraph | None:
    """What all examples share, which must be the same whatever they are; None where nothing is shared.

    First with all that may be shared taken for shared; where that finds no boundary, with less (see `Doubt`).
    Gradients that are ``held`` make room where the forward is run again.
    """
    for doubt in Doubt:
        try:
            region = shared_part(batch.losses, batch.uses, owned, batch.names, doubt)
            if region is not None:
                batch.keep_resident(region.parameters)
                if held and computed(batch.uses, region):
                    held.clear()
                region.shown = check_shared(batch.uses, region, owned, batch.names, batch.forward)
                if region.given:
                    raise shared_input_error(region.given[0], batch.names)
            return region
        except (LossShapeError, UnsupportedModelError) as error:
            if doubt is not Doubt.NOTHING:
                continue
            for call in (each for each in batch.uses.calls if owned[each].unread):
                raise unread_error(call, batch.names.layer(call)) from error
            raise
    return None


def rows_of(call: LayerCall, own: Owned, known: bool, batch: Batch) -> Rows:
    """How the rows of a use belong to the examples, where the layout is ``known`` or not."""
    zero = own.zero or own.rows is None
    if call.layer.adds_beside and own.rows is not None:
        if not (known or zero) and own.blank:
            raise UnsupportedModelError(
                f"{batch.names.layer(call)}: gates of this LSTM with proj_size have gradients of zero, so that this "
                "batch doesn't show whose its projection's rows are; nothing was clipped. Leave proj_size out, and put "
                "a Linear layer behind it",
                name=batch.names.layer(call), place=call,
            )  # fmt: skip
        return own.rows if zero or known else own.surely
    if zero:
        return of_nobody(call, call.batch_dim, len(batch.losses))
    assert own.rows is not None
    return own.rows if known else own.surely


def may_move(batch: Batch, too_small: Sequence[Owned]) -> bool:
    """Whether rows that are ``too_small`` may be others' than the examples of their places: an operation may move rows.

    A hook of the user's hides what operations do; its batches are laid out by place, as all are measured.
    """
    if not all(each.is_regular for each in too_small):
        return True
    if batch.uses.hooked:
        return False
    found, examples = measure_all(batch, every_tensor=True, hold=False), len(batch.losses)
    moves = movements_of(batch, found)
    return moves is None or moves.moved(batch.uses, examples)


def movements_of(batch: Batch, found: Measured) -> Movements | None:
    """The operations to look at in batches like this one, of which all tensors were measured."""
    shared = () if found.region is None else found.region.shared
    return movements(batch.uses, found.at_edges(batch.uses), len(batch.losses), shared)
