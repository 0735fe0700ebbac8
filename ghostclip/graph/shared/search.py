"""Where what all examples share meets them: a walk from it towards the losses, over gradients whose owners are known.

A parameter used outside of layers is shared, and so is a layer that gives the same rows for all examples, as a table of
positions does. The first tensors on the way to the losses whose every row has one owner are the boundaries. In the
example of this folder the owners of p, q, h and the losses are: both, both, [0, 1], [0, 1]. So p and q are shared, and
h is the boundary. Below mixed examples every row has several owners, too: `ghostclip.graph.overwritten` tells the two
apart.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Mapping, Sequence
from typing import Any

from torch import Tensor

from ghostclip.errors import LossShapeError, UnsupportedModelError
from ghostclip.graph.nodes import ACCUMULATE, Edge, inputs_of, shape_of
from ghostclip.graph.operations import EXPANDING, hides_constants, word_of
from ghostclip.graph.parameter_names import ParameterNames
from ghostclip.graph.reader import Uses
from ghostclip.graph.rows import Owned, Rows, Subject
from ghostclip.graph.shared.boundary import BroadcastBoundary
from ghostclip.graph.shared.subgraph import SharedSubgraph, parameters_of
from ghostclip.nn.base import LayerCall

__all__ = [
    "Doubt",
    "edges_above",
    "edges_near",
    "edges_of",
    "may_be_shared",
    "mixing_error",
    "reads_examples",
    "region_up_to_losses",
    "shared_input_error",
    "shared_part",
    "unread_error",
]


class Doubt(enum.Enum):
    """Which tensors count as shared though their rows fit one owner, where mixing isn't ruled out (`Owned.uncertain`).

    ALL: each of them.
    IRREGULAR: those with rows in no order. Also those with rows in order of which none could be read (`Owned.unread`),
    but for outputs of layers that have an input in the graph.
    NOTHING: those with rows in no order, some of which fit only within the tolerance. Also outputs of layers without an
    input in the graph, of which no row could be read.
    """

    ALL = enum.auto()
    IRREGULAR = enum.auto()
    NOTHING = enum.auto()


def edges_of(uses: Uses, nodes: Sequence[Any], losses: Tensor) -> list[Edge]:
    """The tensors that some nodes give, without the first ones of layers, and those that parameters alone give.

    The others of layers are the last states of recurrent ones.
    """
    wanted = {node for node in nodes if type(node) is not ACCUMULATE and node not in uses.weights}
    layers = {node for node in wanted if isinstance(getattr(node, "call", None), LayerCall)}
    edges = [(losses.grad_fn, losses.output_nr), *(edge for node in uses.nodes for edge in inputs_of(node))]
    found = dict.fromkeys(edge for edge in edges if edge[0] in wanted and (edge[1] or edge[0] not in layers))
    # The ragged size of a nested tensor is no number.
    return [edge for edge in found if all(isinstance(size, int) for size in shape_of(edge))]


def edges_above(uses: Uses, starts: Sequence[Any], losses: Tensor) -> list[Edge]:
    """The tensors between some nodes and the losses, and what else these nodes are given."""
    seen, stack = dict[Any, None](), list(starts)
    while stack:
        for node in uses.consumers[stack.pop()]:
            if node not in seen:
                seen[node] = None
                stack.append(node)
    given = [below for node in seen for below, _ in inputs_of(node) if below is not None]
    return edges_of(uses, [*seen, *given], losses)


def edges_near(uses: Uses, starts: Sequence[Any], losses: Tensor) -> tuple[list[Edge], list[Edge]]:
    """The tensors from some nodes up to those at which another tensor of the graph enters; and these alone."""
    seen, entered, stack = dict.fromkeys(starts), dict[Any, None](), list(starts)
    while stack:
        for node in uses.consumers[stack.pop()]:
            if node in seen:
                continue
            if all(below is None or below in seen for below, _ in inputs_of(node)):
                entered.pop(node, None)
                seen[node] = None
                stack.append(node)
            else:
                entered[node] = None
    return edges_of(uses, [*seen, *entered], losses), edges_of(uses, list(entered), losses)


def shared_part(
    losses: Tensor, uses: Uses, owned: Mapping[Subject, Owned], names: ParameterNames, doubt: Doubt
) -> SharedSubgraph | None:
    """What all examples of a batch share, up to where it meets them; None where nothing is shared.

    Args:
        losses: [B].
        uses: what is behind them.
        owned: of every layer's use, and of every tensor above what may be shared.
        names: of the model.
        doubt: what is taken for shared without having been seen to be.

    Raises:
        UnsupportedModelError: examples mix.
        LossShapeError: no example enters before the losses.
    """
    outputs: dict[Any, list[Edge]] = {}
    for subject in owned:
        if not isinstance(subject, LayerCall):
            outputs.setdefault(subject[0], []).append(subject)
    tables = {uses.capturing[call]: call for call in uses.calls if may_be_shared(call, owned[call], doubt)}
    shared = dict.fromkeys([*uses.leaves, *tables])
    # What is made of parameters alone, as W.t() for F.linear(x, W), is no boundary even if each of its rows has one
    # owner (each unit is active for one example): the node W.t() may be a layer's own, too, and its gradient then has
    # what the layer's rule gives already.
    made = {node for node in uses.made_of_parameters if word_of(node) not in EXPANDING}
    met: dict[Any, None] = {}
    stack = list(shared)
    while stack:
        for node in uses.consumers[stack.pop()]:
            if node in shared:
                continue
            call = getattr(node, "call", None)
            subjects = [call] if isinstance(call, LayerCall) and call in owned else outputs.get(node, ())
            doubted = [owned[each] for each in subjects if may_be_shared(each, owned[each], doubt)]
            # This layer has a shared input and rows that nobody is sure of: it counts as shared, too.
            if isinstance(call, LayerCall) and call in owned and (owned[call].zero or owned[call].uncertain):
                tables[node] = call
            of_one = all(each.is_of_one for each in doubted) and reads_examples(node, shared)
            unread = any(owned[each].unread for each in subjects) and _adds_nothing(node, shared)
            if node in tables or not subjects or node in made or unread or (doubted and not of_one):
                met.pop(node, None)
                shared[node] = None
                stack.append(node)
            else:
                met[node] = None
    if not shared:
        return None
    _refuse_mixed(losses, uses, shared, owned, names)
    boundaries = [
        boundary for node in met for boundary in _boundaries(node, outputs.get(node, ()), shared, owned, len(losses))
    ]
    return SharedSubgraph(
        len(losses), boundaries, {node: node.variable for node in uses.leaves}, tables,
        shared=[node for node in uses.nodes if node in shared],
        given=[call for node in met if isinstance(call := getattr(node, "call", None), LayerCall)],
        silent=[edge for node in met for edge in outputs.get(node, ()) if owned[edge].zero],
    )  # fmt: skip


def shared_input_error(call: LayerCall, names: ParameterNames) -> UnsupportedModelError:
    """The error about a layer that is given what all examples share."""
    return UnsupportedModelError(
        f"{names.layer(call)} is given a tensor that all examples share, in the place of one with examples; expand it "
        "to the batch before (h.expand(B, ...))",
        name=names.layer(call), place=call,
    )  # fmt: skip


def reads_examples(node: Any, shared: Container[Any]) -> bool:
    """Whether a node is given a tensor of the graph that isn't shared.

    Suppose that all rows of its output belong to one example, as those of an expert that got rows of one example only.
    If other examples had a part in them, rows of its inputs would have several owners, and the inputs were shared. So
    an input that isn't shared rules mixing out.
    """
    return any(below is not None and below not in shared for below, _ in inputs_of(node))


def _is_table(subject: Subject) -> bool:
    """Whether it is a layer's use without an input in the graph."""
    return isinstance(subject, LayerCall) and not subject.sources


def _adds_nothing(node: Any, shared: Container[Any]) -> bool:
    """Whether an operation was given only what all examples share, and expands it to no number of examples."""
    alone = all(below in shared for below, _ in node.next_functions)
    return alone and not hides_constants(node) and word_of(node) not in EXPANDING


def may_be_shared(subject: Subject, found: Owned, doubt: Doubt) -> bool:
    """Whether several examples have a part in its rows, or may have (`Owned.uncertain`) and ``doubt`` says so."""
    if not found.uncertain:
        return found.is_shared
    if doubt is Doubt.NOTHING:
        return not found.is_regular and (found.loose or (found.unread and _is_table(subject)))
    given = isinstance(subject, LayerCall) and bool(subject.sources)
    if doubt is Doubt.IRREGULAR and found.is_regular and (given or not found.unread):
        return False
    if not isinstance(subject, LayerCall):
        return True
    # Rows that could not be read, as beside a huge example or where none is finite, may be anybody's.
    if found.unread or not (found.is_regular or found.shown or (given and found.is_of_one)):
        return True
    # A layer with an input in the graph has its examples in rows.
    return not given and subject.layer.reads_indices


def _boundaries(
    node: Any, edges: Sequence[Edge], shared: Mapping[Any, None], owned: Mapping[Subject, Owned], examples: int
) -> list[BroadcastBoundary]:
    """One for each output of an operation at which shared tensors meet the examples."""
    if getattr(node, "_saved_scale_grad_by_freq", False):
        raise UnsupportedModelError(
            "a table is looked up with scale_grad_by_freq=True, which divides an example's gradient by how often "
            "others of the batch have the index, and so mixes examples; leave scale_grad_by_freq out",
            place=node,
        )
    slots = [slot for slot, (below, _) in enumerate(node.next_functions) if below in shared]
    found = []
    for edge in edges:
        rows = owned[edge].rows
        if owned[edge].zero or rows is None:
            continue
        found.append(BroadcastBoundary(*edge, rows, examples, slots))
    return found


def _refuse_mixed(
    losses: Tensor, uses: Uses, shared: Mapping[Any, None], owned: Mapping[Subject, Owned], names: ParameterNames
) -> None:
    """Raises where something that has the examples goes into what they share, or nothing is between it and the losses.

    Several examples' losses then depend on the rows of one.
    """
    if losses.grad_fn in shared:
        raise LossShapeError(
            "the losses come from parameters, or layers that gave the same rows for all examples, without any example "
            "entering, as far as the graph tells; losses must have shape exactly [B], one per example"
        )
    for node in shared:
        for edge in inputs_of(node):
            call = getattr(edge[0], "call", None)
            found = owned.get(call if isinstance(call, LayerCall) else edge)
            if edge[0] not in shared and found is not None and found.rows is not None and not found.zero:
                raise mixing_error(node, names)


def unread_error(call: LayerCall, name: str) -> UnsupportedModelError:
    """The error about a layer of whose gradient no row is finite, where it matters whether all examples share it."""
    return UnsupportedModelError(
        f"{name}: this batch doesn't show which example's gradient is not finite, or whether examples mix; nothing was "
        "clipped. Look for what is not finite in its inputs or its backward (a square root of 0, a division by 0), or "
        "take larger physical batches",
        name=name, place=call,
    )  # fmt: skip


def mixing_error(node: Any, names: ParameterNames) -> UnsupportedModelError:
    """The error about a tensor whose rows several examples' losses depend on."""
    if not isinstance(call := getattr(node, "call", None), LayerCall):
        return UnsupportedModelError(
            f"one example's loss depends on rows of others in what {node.name()} gives "
            f"({list(shape_of((node, 0)))}), so examples mix; compute each loss from its own example",
            place=node,
        )
    name = names.layer(call)
    small = (
        ", or float16 gradients are too small, which looks alike (give loss_scale=1024.0)"
        if str(call.dtype) == "torch.float16"
        else ""
    )
    first = (
        "build it with batch_first=True if its input has examples in dimension 0, else "
        if getattr(call.layer, "batch_first", None) is False
        else ""
    )
    return UnsupportedModelError(
        f"{name}: one example's loss depends on rows of this output that belong to others ({list(call.shape)}, "
        f"examples in dimension {call.batch_dim}), so examples mix{small}; {first}compute each loss from its own "
        "example",
        name=name, place=call,
    )  # fmt: skip


def region_up_to_losses(losses: Tensor, uses: Uses, shared: list[LayerCall]) -> SharedSubgraph:
    """What parameters outside of layers, and those of ``shared``, reach, with the losses as the only boundary.

    For a batch of one example, to which everything belongs; for one of none, in which nothing has a gradient.
    """
    leaves = {node: node.variable for node in uses.leaves}
    while True:
        parameters = set(map(id, leaves.values())).union(*map(parameters_of, shared))
        users = [call for call in uses.calls if not parameters.isdisjoint(parameters_of(call))]
        if len(users) == len(shared):
            break
        shared = users
    node: Any = losses.grad_fn
    slots = [slot for slot, (below, _) in enumerate(node.next_functions) if below is not None]
    boundary = BroadcastBoundary(node, losses.output_nr, Rows(0, "example"), 1, slots)
    calls = {uses.capturing[call]: call for call in users}
    return SharedSubgraph(len(losses), [boundary] if len(losses) else [], leaves, calls)
