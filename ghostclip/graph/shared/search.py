"""The search for the shared part of a graph: a walk from what is shared towards the losses.

Which dimension of an operation's output holds the examples is not guessed but proved, by the test that layers pass too
(`ghostclip.graph.mixing_test`). An operation where none does is one of shared tensors still, or it mixed examples: it
counts as shared where nothing else entered but constants, and is refused otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ghostclip.errors import LossShapeError, UnsupportedModelError
from ghostclip.graph.mixing_test import USUAL, Verdict, verdicts
from ghostclip.graph.nodes import COPY_INTO_SLICES, Edge, from_below, inputs_of, saved_dimensions, shape_of
from ghostclip.graph.parameter_names import ParameterNames, serial_number
from ghostclip.graph.reader import Uses
from ghostclip.graph.shared.boundary import ELEMENTWISE, EXPAND, REPEAT, Alternatives, BroadcastBoundary, broadcasts
from ghostclip.graph.shared.subgraph import SharedSubgraph
from ghostclip.nn.base import LayerCall
from ghostclip.norms.ragged import RowIndex, RowOrder

__all__ = ["CREATORS", "TOO_SMALL", "Decision", "DecisionCache", "Search", "not_a_batch"]

# Operations on shared tensors alone whose result may have examples nevertheless: by its size, or by indices.
CREATORS = {
    f"{name}Backward0"
    for name in ("Cat", "Embedding", "Expand", "Index", "IndexSelect", "Repeat", "Stack", "Take")
}  # fmt: skip
BROADCASTING = ELEMENTWISE | {EXPAND}
# A product of rows sorted by expert with the weights of each.
GROUPED_PRODUCT = "GroupedMm"
PICKED = "no dimension of the result holds the examples"
TOO_SMALL = ", or float16 gradients are too small, which looks alike (give loss_scale=1024.0)"
BY_CHANCE = ", or, if no example has a part in it, begin with a batch of another size (clip and engine.step try one)"
# What a node's input is where it is no shared tensor: nothing autograd knows of, something that is no parameter's
# alone, or something that waits for a proof.
NOTHING, OTHER, OPEN = -1, -2, -3


@dataclass(frozen=True)
class Decision:
    """What an output that shared tensors went into was found to be: a boundary, or (``dim`` None) a shared tensor.

    Attributes:
        dim, count, row_order: as in `BroadcastBoundary`.
        batch: how many times the batch went into each dimension, and its number of examples; a shared tensor is looked
            at again where another batch has as many rows as it has.
        alternatives: as in `BroadcastBoundary`; of what was decided in another batch.
    """

    dim: int | None
    count: int = 0
    row_order: RowOrder = "example"
    batch: tuple[tuple[int, ...], int] = ((), 0)
    alternatives: Alternatives = ()


@dataclass
class DecisionCache:
    """What was found out in earlier batches, by places in the graph, which are numbered by how they are made.

    Attributes:
        decisions: by the graph's structure (as `Uses` has it), the node's number in it, and places.
        shared: (place, shape) of tensors that had this shape in a rehearsal, whose examples go into no dimension of it.
        doubtful: the same, at which finite gradients left more open than `BroadcastBoundary.alternatives` say.
        rehearses: whether the batch that is looked at is one.
    """

    decisions: dict[tuple, Decision] = field(default_factory=dict)
    shared: set[tuple] = field(default_factory=set)
    doubtful: set[tuple] = field(default_factory=set)
    rehearses: bool = False
    _numbers: dict[tuple, int] = field(default_factory=dict)

    def number(self, *made_of: Any) -> int:
        """The number of a place, the same in every batch."""
        return self._numbers.setdefault(made_of, len(self._numbers))

    def keep(self, place: tuple, found: Decision, sure: bool, verdict: Verdict) -> None:
        """Remembers what was found at a place, as far as it will hold."""
        known = self.decisions.get(place)
        if sure:
            self.decisions[place] = found
        elif known is not None and known.alternatives == ():
            return
        elif found.dim is None or verdict.alternatives == ():
            self.decisions.pop(place, None)
            if not verdict.spoilt:
                self.doubtful.add(place)
        elif not (self.rehearses or place in self.doubtful or (known is not None and verdict.alternatives is None)):
            self.decisions[place] = replace(found, alternatives=verdict.alternatives)

    def drop_open(self) -> None:
        """Forgets decisions that have alternatives."""
        self.decisions = {place: each for place, each in self.decisions.items() if each.alternatives == ()}


class Search:
    """The walk through one batch's graph. Candidates that nothing is known of stop it; once decided, it is done again.

    Args:
        losses: [B].
        odd: uses of layers whose batch dimension is no multiple of the batch.
        uses: what is behind the losses.
        index: of the model.
        places: what is known from other batches.

    Attributes:
        calls: {capturing node: call} of layers that were found to see no examples.
        dark: whether numbers that aren't finite, or one large example, left something open.
    """

    # By which the rows of a tensor may belong to examples, where not by their order.
    _indices: Sequence[RowIndex] = ()
    # What may be rounding in gradients.
    _rounding = USUAL

    def __init__(
        self, losses: Tensor, odd: Sequence[LayerCall], uses: Uses, index: ParameterNames, places: DecisionCache
    ) -> None:
        self._losses, self._index, self._places, self._structure = losses, index, places, uses.structure
        self._odd = {id(call) for call in odd}
        self._picked = uses.picked
        picked = () if uses.picked is None else uses.picked.calls
        self._batched = [call for call in uses.calls if id(call) not in self._odd and call not in picked]
        self._leaves = {node: node.variable for node in uses.leaves}
        self._nodes = from_below(losses.grad_fn)
        left = self._nodes if uses.picked is None else uses.picked.left
        self._numbers = {node: number for number, node in enumerate(left)}
        self._outputs: dict[Any, set[int]] = {losses.grad_fn: {losses.output_nr}}
        for node in self._nodes:
            for below, number in inputs_of(node):
                self._outputs.setdefault(below, set()).add(number)
        self._decided: dict[Edge, Decision] = {}
        self.dark = False

    def region(self) -> SharedSubgraph:
        """The shared part, after as many proofs as it takes.

        Raises:
            UnsupportedModelError, LossShapeError: examples mix, or this batch doesn't show whether; layers that read no
                examples are all there are, and nothing but the shape of the losses says so; no example enters at all.
        """
        while unknown := self._walk():
            dark = self.dark
            for edge, verdict in self._verdicts(unknown).items():
                self._decided[edge], sure = self._decide(edge, unknown[edge], verdict)
                dark = dark or (not sure and (verdict.spoilt or verdict.lone))
                self._places.keep(self._place(edge), self._decided[edge], sure, verdict)
            self.dark = dark
        shared, losses = self._status[self._losses.grad_fn] >= 0, len(self._losses)
        untold = [call for call in self.calls.values() if not call.sources]
        broadcast = all(_is_broadcast(each) for each in self._boundaries if each.node in self._by_layers)
        if untold and not self._reads_examples and (shared or not broadcast):
            raise not_a_batch(untold[0], losses, self._index.layer(untold[0]))
        if shared:
            raise UnsupportedModelError(
                f"the losses come from {self._names[self._losses.grad_fn]} without any example entering, as far as the "
                "graph tells; losses must have shape exactly [B], one per example"
            )
        return SharedSubgraph(losses, self._boundaries, self._leaves, self.calls)

    def _verdicts(self, unknown: dict[Edge, list[int]]) -> dict[Any, Verdict]:
        return verdicts(self._losses, self._batched, unknown, indices=self._indices, rounding=self._rounding)

    def _walk(self) -> dict[Edge, list[int]]:
        """Goes as far as what is known reaches; returns the outputs that have to be decided before it can go on.

        With the dimensions of each that may hold examples.
        """
        self._status: dict[Any, int] = {}
        self._names: dict[Any, str] = {}
        self.calls: dict[Any, LayerCall] = {}
        self._boundaries: list[BroadcastBoundary] = []
        self._by_layers: set[Any] = set()
        self._reads_examples = False
        unknown: dict[Edge, list[int]] = {}
        for node in self._nodes:
            if node in self._leaves:
                parameter = self._leaves[node]
                self._status[node] = self._places.number("parameter", serial_number(parameter))
                self._names[node] = self._index.name_of(parameter) or ""
                continue
            inputs = self._inputs(node)
            if OPEN in inputs:
                self._status[node] = OPEN
            elif isinstance(call := getattr(node, "call", None), LayerCall):
                self._status[node] = self._status_of_call(node, call, inputs)
            elif not inputs or max(inputs) < 0:
                self._status[node] = OTHER
            else:
                found = dict.fromkeys(self._names[e[0]] for e, i in zip(inputs_of(node), inputs, strict=True) if i >= 0)
                self._names[node] = ", ".join(found)[: 200 if len(found) > 1 else None]
                unknown |= self._enter(node, inputs)
        return unknown

    def _inputs(self, node: Any) -> tuple[int, ...]:
        """What went in: numbers of shared tensors' places, or one of NOTHING, OTHER and OPEN."""
        return tuple(NOTHING if below is None else self._status[below] for below, _ in inputs_of(node))

    def _status_of_call(self, node: Any, call: LayerCall, inputs: tuple[int, ...]) -> int:
        """Of a layer's output: shared if all it read is, or if it read nothing autograd knows of and no batch."""
        shared = [number >= 0 for number in inputs]
        if id(call) not in self._odd and not any(shared):
            self._reads_examples = True
            return OTHER
        name = self._index.layer(call)
        if not all(shared):
            raise not_a_batch(call, len(self._losses), name)
        self._names[node] = name
        self._by_layers.add(node)
        if call.own:
            self.calls[node] = call
        return self._places.number("layer", serial_number(call.layer), call.parameters, len(call.shape), *inputs)

    def _enter(self, node: Any, inputs: tuple[int, ...]) -> dict[Edge, list[int]]:
        """Takes in an operation that shared tensors go into; returns the outputs of which nothing is known."""
        self._status[node] = self._places.number(node.name(), *inputs)
        shared = [(slot, node.next_functions[slot]) for slot, status in enumerate(inputs) if status >= 0]
        if any(tensor[0] in self._by_layers for _, tensor in shared):
            self._by_layers.add(node)
        if min(inputs) >= 0 and node.name() not in CREATORS:
            return {}
        if getattr(node, "_saved_scale_grad_by_freq", False):
            raise UnsupportedModelError(
                f"{self._names[node]} is looked up with scale_grad_by_freq=True, which divides an example's gradient "
                "by how often others of the batch have the index, and so mixes examples; leave scale_grad_by_freq out",
                name=self._names[node], place=node,
            )  # fmt: skip
        known: dict[Edge, Decision] = {}
        unknown: dict[Edge, list[int]] = {}
        for edge in [(node, number) for number in sorted(self._outputs[node])]:
            if self._picked is not None and node in self._picked.owners:
                known[edge] = Decision(self._picked.dim(edge), 1, self._picked.index(node))
                continue
            dims = [dim for dim, count in enumerate(self._multiples(edge)) if count]
            if node.name() in BROADCASTING:
                dims = [d for d in dims if all(broadcasts(shape_of(each), shape_of(edge), d) for _, each in shared)]
            if node.name() == COPY_INTO_SLICES and inputs[0] >= 0:
                dims = []  # what is written into keeps its shape
            if not dims and OTHER in inputs:
                # What examples went into has more to hand down than shared tensors have.
                raise self._refusal(edge, PICKED)
            decision = Decision(None) if self._has_none(edge, dims) else self._known(edge, dims)
            if decision is None:
                unknown[edge] = dims
            else:
                known[edge] = decision
        if unknown:
            self._status[node] = OPEN
        elif any(decision.dim is not None for decision in known.values()):
            self._status[node] = OTHER
            for edge, found in known.items():
                if found.dim is None:
                    raise self._refusal(edge, "only some of its results are the examples'")
                boundary = BroadcastBoundary(*edge, found.dim, found.count, found.row_order, shared, found.alternatives)
                self._boundaries.append(boundary)
        return unknown

    def _has_none(self, edge: Edge, dims: list[int]) -> bool:
        """Whether an output is shared by its shape: the batch goes into no dimension, or a rehearsal's didn't."""
        seen = (self._key(edge), shape_of(edge))
        if self._places.rehearses and not dims:
            self._places.shared.add(seen)
        return not dims or seen in self._places.shared

    def _multiples(self, edge: Edge) -> tuple[int, ...]:
        """How many times the batch goes into each dimension, 0 where it doesn't."""
        examples = len(self._losses)
        return tuple([0 if size % examples else size // examples for size in shape_of(edge)])

    def _key(self, edge: Edge) -> tuple:
        """What the same output has in every batch's graph."""
        node, number = edge
        return self._places.number(node.name(), *self._inputs(node)), number, len(shape_of(edge))

    def _place(self, edge: Edge) -> tuple:
        """The same, and where the node is in graphs of this structure: a parameter may be added to the examples'
        tensors in two layouts."""
        return self._structure, self._numbers.get(edge[0]), self._key(edge)

    def _known(self, edge: Edge, dims: list[int]) -> Decision | None:
        """What was decided of the output in this batch or an earlier one, if it holds for this."""
        known = self._decided.get(edge) or self._places.decisions.get(self._place(edge))
        multiples = self._multiples(edge)
        if known is None:
            return None
        if known.dim is None:
            holds = known.batch == (multiples, len(self._losses))
        else:
            places = [(known.dim, known.count), *((dim, count) for dim, count, _ in known.alternatives or ())]
            holds = all(dim in dims and multiples[dim] == count for dim, count in places)
        return known if holds else None

    def _decide(self, edge: Edge, dims: list[int], verdict: Verdict) -> tuple[Decision, bool]:
        """What an output is, a boundary in a way not contradicted or else shared, and whether that was shown.

        Raises:
            UnsupportedModelError: it can be neither.
        """
        best, inputs = verdict.best, self._inputs(edge[0])
        constants = inputs.count(NOTHING)
        may_be_shared = OTHER not in inputs and (not constants or _constants_only(edge, constants, self._index))
        shared = Decision(None, batch=(self._multiples(edge), len(self._losses)))
        if not verdict.shown and may_be_shared and (verdict.reached or verdict.unclear or best is None):
            # Finite rows of examples' own would follow their factors. What isn't sure counts as shared, which is safe:
            # were it examples' own, each would be given its own rows' gradients all the same, or nothing that follows
            # takes it.
            told = best is None or (constants == 0 and _picks_by_own_indices(edge, self._index))
            return shared, told and not verdict.unclear
        if may_be_shared and verdict.lone:
            return shared, False
        if best is not None:
            return Decision(best.dim, best.count, best.row_order), verdict.sure
        if edge[0].name().startswith(GROUPED_PRODUCT) or (OTHER in inputs and shape_of(edge)[0] != 1 and 0 not in dims):
            raise self._refusal(edge, PICKED)
        too_small = TOO_SMALL if any(p.dtype == torch.float16 for _, p in self._index.trained()) else ""
        raise self._refusal(
            edge,
            f"the loss of one example depends on what belongs to others, so examples mix before or after it{too_small}",
            "" if OTHER in inputs else BY_CHANCE,
        )

    def _refusal(self, edge: Edge, why: str, more: str = "") -> UnsupportedModelError:
        """The error for an output that is neither a boundary nor shared."""
        operation, name = edge[0].name().removesuffix("Backward0"), self._names[edge[0]]
        return UnsupportedModelError(
            f"{name} is used outside of a layer with a gradient rule, in an operation ({operation}, "
            f"result of shape {list(shape_of(edge))}) where {why}. Give each example its own copy first "
            "(parameter.expand(B, ...)), register what is constant there as a buffer, write a rule "
            f"(class MyLayer(GhostLayer, wraps=...)), or freeze the parameter{more}",
            name=name, place=edge[0],
        )  # fmt: skip


def not_a_batch(call: LayerCall, examples: int, name: str) -> Exception:
    """The error for a layer whose batch dimension can't be the batch's."""
    rows = call.shape[call.batch_dim]
    if 1 < rows < examples and examples % rows == 0:
        return LossShapeError(
            f"losses must have shape exactly [B]; got [{examples}], but {name} saw {rows} (its output has shape "
            f"{list(call.shape)}). Reshape losses of several tokens or positions to [B, T] and average each "
            "over its own tokens, (losses * mask).sum(1) / mask.sum(1)"
        )
    return UnsupportedModelError(
        f"{name}: its output has shape {list(call.shape)} with {rows} rows in dimension {call.batch_dim}, for "
        f"{examples} losses; say where the examples are by wrap(model, batch_dim={{...}}), "
        "or give an input that all of them share (position ids of shape [1, T]) a row for each",
        name=name, place=call,
    )  # fmt: skip


def _is_broadcast(boundary: BroadcastBoundary) -> bool:
    """Whether the operation itself says that what it was given is every example's."""
    if boundary.node.name() != REPEAT:
        return boundary.node.name() in BROADCASTING
    return all(broadcasts(shape_of(edge), shape_of(boundary.edge), boundary.dim) for _, edge in boundary.shared)


def _constants_only(edge: Edge, constants: int, index: ParameterNames) -> bool:
    """Whether what the operation was given beside shared tensors, as large as a batch, is the model's own."""
    node = edge[0]
    if node.name() in ("CatBackward0", "StackBackward0"):
        return index.holds_shape(_size_of_constant(edge))
    kept = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    kept = [tensor for tensor in kept if isinstance(tensor, Tensor)]
    if sum([index.is_own(tensor) for tensor in kept if not tensor.requires_grad]) >= constants:
        return True  # whatever else it keeps it made itself
    return bool(kept) and all(index.holds(tensor) for tensor in kept)


def _picks_by_own_indices(edge: Edge, index: ParameterNames) -> bool:
    """Whether an operation picks by buffers of the model: what it picks of shared tensors is shared."""
    indices = getattr(edge[0], "_saved_indices", None) or (getattr(edge[0], "_saved_index", None),)
    return all(isinstance(each, Tensor) and index.is_own(each) for each in indices)


def _size_of_constant(edge: Edge) -> torch.Size | None:
    """The shape of the one constant among concatenated (or stacked) tensors; None where there are several."""
    node, whole = edge[0], shape_of(edge)
    shapes = [shape_of(edge) for edge in node.next_functions if edge[0] is not None]
    if len(node.next_functions) != len(shapes) + 1:
        return None
    if node.name() == "StackBackward0":
        return shapes[0]
    (dim,) = saved_dimensions(node, len(whole))
    rest = whole[dim] - sum(shape[dim] for shape in shapes)
    return torch.Size((*whole[:dim], rest, *whole[dim + 1 :]))
