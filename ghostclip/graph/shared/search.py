"""The search for the shared part of a graph: a walk from what is shared towards the losses.

Which dimension of an operation's output holds the examples is not guessed but proved, by the test that layers pass too
(`ghostclip.graph.row_layout`). An operation where none does is one of shared tensors still, or it mixed examples: it
counts as shared where nothing else entered but constants, and is refused otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ghostclip.errors import UnsupportedModelError
from ghostclip.graph.parameter_names import ParameterNames
from ghostclip.graph.reader import Edge, from_below, inputs_of, shape_of
from ghostclip.graph.serial import serial_number
from ghostclip.graph.shared.boundary import ELEMENTWISE, EXPAND, REPEAT, BroadcastBoundary, broadcasts
from ghostclip.graph.shared.subgraph import SharedSubgraph
from ghostclip.nn.base import LayerCall

__all__ = [
    "OTHER",
    "PICKED",
    "TOO_SMALL",
    "BoundaryCandidate",
    "Decision",
    "DecisionCache",
    "NotShared",
    "Search",
    "constants_only",
    "refusal",
    "settle",
]  # fmt: skip

# Operations on shared tensors alone whose result may have examples nevertheless: by its size, or by indices.
CREATORS = {
    f"{name}Backward0"
    for name in ("Cat", "Embedding", "Expand", "Index", "IndexSelect", "Repeat", "Stack", "Take")
}  # fmt: skip
BROADCASTING = ELEMENTWISE | {EXPAND}
PICKED = (
    "no dimension of the result holds the examples (rows picked by index, as a mixture of experts picks them, aren't "
    "followed: compute all rows, and weigh them by a mask)"
)
TOO_SMALL = ", or float16 gradients are too small, which looks alike (give loss_scale=1024.0)"
# What a node's input is where it is no shared tensor: nothing autograd knows of, something that is no parameter's
# alone, or something that waits for a proof.
NOTHING, OTHER, OPEN = -1, -2, -3


@dataclass(frozen=True)
class Decision:
    """What an output that shared tensors went into was found to be: a boundary, or (``dim`` None) a shared tensor.

    Attributes:
        dim, count, row_order: as in `BroadcastBoundary`.
        multiples: how many times the batch went into each dimension.
        examples: of the batch; a shared tensor is looked at again where another batch has as many rows as it has.
    """

    dim: int | None
    count: int = 0
    row_order: str = "example"
    multiples: tuple[int, ...] = ()
    examples: int = 0

    def stands_for(self, shape: torch.Size, multiples: tuple[int, ...], examples: int) -> bool:
        """Whether it holds for another batch's output of that shape."""
        if self.dim is None:
            return (multiples, examples) == (self.multiples, self.examples)
        return self.dim < len(shape) and multiples[self.dim] == self.count


@dataclass(eq=False)
class BoundaryCandidate:
    """An output that may be a boundary, until it is known.

    Attributes:
        edge: of the graph.
        key: what the same output has in every batch's graph.
        multiples: how many times the batch goes into each dimension, 0 where it doesn't.
        dims: dimensions that may hold examples.
        inputs: what went in: numbers of shared tensors' places, NOTHING or OTHER.
        names: of the parameters it comes from.
    """

    edge: Edge
    key: tuple
    multiples: tuple[int, ...]
    dims: list[int]
    inputs: tuple[int, ...]
    names: str

    @property
    def shape(self) -> torch.Size:
        """Of the output."""
        return shape_of(self.edge)


@dataclass
class DecisionCache:
    """What was found out in earlier batches, by places in the graph, which are numbered by how they are made."""

    decisions: dict[tuple, Decision] = field(default_factory=dict)
    _numbers: dict[tuple, int] = field(default_factory=dict)

    def number(self, *made_of: Any) -> int:
        """The number of a place, the same in every batch."""
        return self._numbers.setdefault(made_of, len(self._numbers))


class Search:
    """One batch's walk. Candidates that nothing is known of stop it; once decided, it is done again.

    Args:
        losses: [B].
        odd: uses of layers whose batch dimension is no multiple of the batch.
        leaves: {accumulating node: parameter used outside of layers}.
        index: of the model.
        places: what is known from other batches.

    Attributes:
        dark: whether numbers that aren't finite left something open.
    """

    def __init__(
        self,
        losses: Tensor,
        odd: Sequence[LayerCall],
        leaves: dict[Any, Tensor],
        index: ParameterNames,
        places: DecisionCache,
    ) -> None:
        self._losses, self._index, self._places, self._leaves = losses, index, places, leaves
        self._odd = {id(call) for call in odd}
        self._examples = losses.shape[0]
        self._nodes = from_below(losses)
        self._outputs = self._used_outputs()
        self.decided: dict[Edge, Decision] = {}
        self.dark = False

    def _used_outputs(self) -> dict[Any, set[int]]:
        used: dict[Any, set[int]] = {self._losses.grad_fn: {self._losses.output_nr}}
        for node in self._nodes:
            for below, number in inputs_of(node):
                used.setdefault(below, set()).add(number)
        return used

    def walk(self) -> list[BoundaryCandidate]:
        """Goes as far as what is known reaches; returns what has to be decided before it can go on."""
        self.status: dict[Any, int] = {}
        self.names: dict[Any, str] = {}
        self.calls: dict[Any, LayerCall] = {}
        self.boundaries: list[BroadcastBoundary] = []
        self._by_layers: set[Any] = set()
        self._batched = False
        candidates: list[BoundaryCandidate] = []
        for node in self._nodes:
            if node in self._leaves:
                parameter = self._leaves[node]
                self.status[node] = self._places.number("parameter", serial_number(parameter))
                self.names[node] = self._index.name_of(parameter) or ""
                continue
            edges = inputs_of(node)
            inputs = tuple(NOTHING if below is None else self.status[below] for below, _ in edges)
            if isinstance(call := getattr(node, "call", None), LayerCall):
                self.status[node] = self._status_of_call(node, call, inputs)
            elif OPEN in inputs:
                self.status[node] = OPEN
            elif not inputs or max(inputs) < 0:
                self.status[node] = OTHER
            else:
                found = list(dict.fromkeys(self.names[e[0]] for e, i in zip(edges, inputs, strict=True) if i >= 0))
                self.names[node] = found[0] if len(found) == 1 else ", ".join(found)[:200]
                candidates += self._enter(node, inputs)
        return candidates

    def _status_of_call(self, node: Any, call: LayerCall, inputs: tuple[int, ...]) -> int:
        """Of a layer's output: shared if all it read is, or if it read nothing autograd knows of and no batch."""
        if OPEN in inputs:
            return OPEN
        shared = [number >= 0 for number in inputs]
        if id(call) not in self._odd and not any(shared):
            self._batched = True
            return OTHER
        name = self._index.layer(call)
        if not all(shared):
            raise NotShared(call)
        self.names[node] = name
        self._by_layers.add(node)
        if self._index.own_parameters(call):
            self.calls[node] = call
        return self._places.number("layer", serial_number(call.layer), call.parameters, len(call.shape), *inputs)

    def _enter(self, node: Any, inputs: tuple[int, ...]) -> list[BoundaryCandidate]:
        """Takes in an operation that shared tensors go into; returns what is not known of it."""
        name = node.name()
        place = self._places.number(name, *inputs)
        self.status[node] = place
        shared = [(slot, node.next_functions[slot]) for slot, status in enumerate(inputs) if status >= 0]
        if any(tensor[0] in self._by_layers for _, tensor in shared):
            self._by_layers.add(node)
        if min(inputs) >= 0 and name not in CREATORS:
            return []
        if getattr(node, "_saved_scale_grad_by_freq", False):
            raise UnsupportedModelError(
                f"{self.names[node]} is looked up with scale_grad_by_freq=True, which divides an example's gradient by "
                "how often others of the batch have the index, and so mixes examples; leave scale_grad_by_freq out"
            )
        decisions, unknown = {}, []
        for number in sorted(self._outputs[node]):
            candidate = self._candidate((node, number), place, inputs, shared)
            if not candidate.dims:
                if OTHER in inputs:
                    # What examples went into has more to hand down than shared tensors have.
                    raise refusal(candidate, PICKED)
                decisions[number] = Decision(None)
            elif (known := self._known(candidate)) is not None:
                decisions[number] = known
            else:
                unknown.append(candidate)
        if unknown:
            self.status[node] = OPEN
        elif any(decision.dim is not None for decision in decisions.values()):
            self.status[node] = OTHER
            for number, decision in decisions.items():
                if decision.dim is None:
                    raise refusal(candidate, "only some of its results are the examples'")
                self.boundaries.append(
                    BroadcastBoundary(node, number, decision.dim, decision.count, decision.row_order, shared)
                )
        return unknown

    def _candidate(
        self, edge: Edge, place: int, inputs: tuple[int, ...], shared: list[tuple[int, Edge]]
    ) -> BoundaryCandidate:
        shape = shape_of(edge)
        multiples = tuple([0 if size % self._examples else size // self._examples for size in shape])
        dims = [dim for dim, count in enumerate(multiples) if count]
        if edge[0].name() in BROADCASTING:
            dims = [d for d in dims if all(broadcasts(shape_of(tensor), shape, d) for _, tensor in shared)]
        return BoundaryCandidate(edge, (place, edge[1], len(shape)), multiples, dims, inputs, self.names[edge[0]])

    def _known(self, candidate: BoundaryCandidate) -> Decision | None:
        if (now := self.decided.get(candidate.edge)) is not None:
            return now
        earlier = self._places.decisions.get(candidate.key)
        if earlier is None or not earlier.stands_for(candidate.shape, candidate.multiples, self._examples):
            return None
        return earlier if earlier.dim is None or earlier.dim in candidate.dims else None

    def region(self) -> SharedSubgraph:
        """The shared part, once nothing is left to decide.

        Raises:
            NotShared: layers that read no examples are all there are, and nothing but the shape of the losses says so.
            UnsupportedModelError: no example enters at all.
        """
        untold = [call for call in self.calls.values() if not call.sources]
        if untold and not self._batched:
            broadcast = all(_is_broadcast(boundary) for boundary in self.boundaries if boundary.node in self._by_layers)
            if not broadcast or self.status[self._losses.grad_fn] >= 0:
                raise NotShared(untold[0])
        if self.status[self._losses.grad_fn] >= 0:
            raise UnsupportedModelError(
                f"the losses come from {self.names[self._losses.grad_fn]} without any example entering, as far as the "
                "graph tells; losses must have shape exactly [B], one per example"
            )
        return SharedSubgraph(self._examples, self.boundaries, self._leaves, self.calls)


def _is_broadcast(boundary: BroadcastBoundary) -> bool:
    """Whether the operation itself says that what it was given is every example's."""
    if boundary.node.name() != REPEAT:
        return boundary.node.name() in BROADCASTING
    return all(broadcasts(shape_of(edge), shape_of(boundary.edge), boundary.dim) for _, edge in boundary.shared)


class NotShared(Exception):
    """A layer that was given both examples and what all of them share has no batch dimension where it is said to be."""

    def __init__(self, call: LayerCall) -> None:
        super().__init__()
        self.call = call


def constants_only(candidate: BoundaryCandidate, index: ParameterNames) -> bool:
    """Whether what the operation was given beside shared tensors, as large as a batch, is the model's own."""
    node = candidate.edge[0]
    if node.name() in ("CatBackward0", "StackBackward0"):
        return index.holds_shape(_size_of_constant(candidate))
    kept = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    kept = [tensor for tensor in kept if isinstance(tensor, Tensor)]
    if sum([index.is_own(tensor) for tensor in kept if not tensor.requires_grad]) >= candidate.inputs.count(NOTHING):
        return True  # whatever else it keeps it made itself
    return bool(kept) and all(index.holds(tensor) for tensor in kept)


def _size_of_constant(candidate: BoundaryCandidate) -> torch.Size | None:
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


def refusal(candidate: BoundaryCandidate, why: str) -> UnsupportedModelError:
    """The error for an output that is neither a boundary nor shared."""
    operation = candidate.edge[0].name().removesuffix("Backward0")
    return UnsupportedModelError(
        f"{candidate.names} is used outside of a layer with a gradient rule, in an operation ({operation}, result of "
        f"shape {list(candidate.shape)}) where {why}. Give each example its own copy first (parameter.expand(B, ...)), "
        "register what is constant there as a buffer, write a rule (class MyLayer(GhostLayer, wraps=...)), or freeze "
        "the parameter"
    )


Prove = Callable[[list[BoundaryCandidate]], tuple[dict[Edge, Decision], bool]]


def settle(search: Search, lay_out: Prove) -> SharedSubgraph:
    """The region, after as many proofs as it takes."""
    while candidates := search.walk():
        decided, dark = lay_out(candidates)
        search.decided.update(decided)
        search.dark = search.dark or dark
    return search.region()
