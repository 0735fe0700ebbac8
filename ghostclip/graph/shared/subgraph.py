"""What all examples share: from parameters used outside of layers, and layers that saw no examples, to where they meet.

A tensor is shared when it was made of parameters, constants and other shared tensors alone. Where the graph brings it
together with the examples is found by `ghostclip.graph.shared.search`; the gradient of each example there, by
`ghostclip.graph.shared.boundary`. From there it goes back down through the shared part here, once per example.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ghostclip.errors import UnsupportedModelError
from ghostclip.graph.shared.boundary import BroadcastBoundary, Edge, shape_of
from ghostclip.native.custom_ops import is_traced
from ghostclip.nn.base import CAPTURE, PROBE, LayerCall, place_of
from ghostclip.nn.fallback import FallbackCall, bare, one_example, product, spread, spread_one_by_one

__all__ = ["SharedSubgraph", "from_below", "inputs_of"]

Sink = Callable[[LayerCall, tuple[Tensor, ...], Tensor], None]


@dataclass
class SharedSubgraph:
    """The shared part of one batch's graph.

    Attributes:
        examples: B.
        boundaries: where it meets the examples.
        leaves: the parameters it starts from outside of layers: {accumulating node: parameter}.
        calls: {capturing node: call} of layers that saw no examples.
        uses: what stands for both in a pass, with their gradients by example.
    """

    examples: int
    boundaries: list[BroadcastBoundary]
    leaves: dict[Any, Tensor]
    calls: dict[Any, LayerCall]
    uses: list[FallbackCall] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._products: list[tuple[int, int, FallbackCall]] = []
        self._dense: list[list[tuple[int, Edge]]] = []
        for number, boundary in enumerate(self.boundaries):
            places = []
            for place, edge in boundary.shared:
                if (found := self._factor_of(edge)) is not None and boundary.is_product(place):
                    use = product(found[0], self.examples, boundary.count, boundary.row_order, found[1])
                    self._products.append((number, place, use))
                else:
                    places.append((place, edge))
            self._dense.append(places)
        starts = self._below([edge[0] for places in self._dense for _, edge in places])
        if not self.boundaries:
            starts = {*self.leaves, *self.calls}
        self._bare = {node: bare(p, self.examples) for node, p in self.leaves.items() if node in starts}
        self._spread = {
            node: (spread if node.name() == CAPTURE else spread_one_by_one)(call, self.examples)
            for node, call in self.calls.items()
        }
        self.uses = [use for _, _, use in self._products] + [*self._bare.values(), *self._spread.values()]
        for use in self.uses:
            use.region = self

    def _factor_of(self, edge: Edge) -> tuple[Tensor, bool] | None:
        """(parameter, whether transposed) of a tensor that is one of the parameters, or its transpose."""
        node, transposed = edge[0], False
        while node.name() in ("TBackward0", "ToCopyBackward0"):
            transposed ^= node.name() == "TBackward0"
            node = node.next_functions[0][0]
        return (self.leaves[node], transposed) if node in self.leaves else None

    def _below(self, nodes: list[Any]) -> set[Any]:
        """The nodes reached from ``nodes`` downwards, over the inside of layers."""
        seen, stack = set(), list(nodes)
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            stack += [below for below, _ in inputs_of(node)]
        return seen

    @torch.no_grad()
    def hand_over(self, grads: list[Any], losses: Tensor, seed: Tensor, sink: Sink) -> None:
        """Tells the sink of every use, given the gradients at the boundaries; the graph must be there still.

        Args:
            grads: one for each of ``boundaries``; None where none arrived.
            losses: [B].
            seed: their gradient, [B].
            sink: as in a first pass.
        """
        for number, place, use in self._products:
            grad, boundary = grads[number], self.boundaries[number]
            factor = boundary.factor(place)
            assert factor is not None
            sink(use, (factor,), factor.new_zeros(shape_of(boundary.edge)) if grad is None else grad)
        shares: dict[Edge, Tensor] = {}
        if not self.boundaries and self.examples:
            # All there is belongs to the one example.
            shares = {(losses.grad_fn, losses.output_nr): torch.diag(seed)}
        for boundary, grad, places in zip(self.boundaries, grads, self._dense, strict=True):
            for edge, share in boundary.per_example(grad, places) if grad is not None else ():
                shares[edge] = shares[edge] + share if edge in shares else share
        grads.clear()
        self._answer(shares, sink, losses.detach())

    def _answer(self, shares: dict[Edge, Tensor], sink: Sink, losses: Tensor) -> None:
        """Tells the sink of what the region starts from, given [B, *shape] gradients at tensors of it."""
        found = {node: shares.pop((node, 0)) for node in self._bare if (node, 0) in shares}
        found |= {
            node: shares.pop((node, 0))
            for node, call in self.calls.items()
            if (node, 0) in shares and not call.sources and node.name() == CAPTURE
        }
        for node, gathered in self._down(shares).items():
            found[node] = found[node] + gathered if node in found else gathered
        _refuse_spread(losses, list(found.values()))
        for node, use in self._bare.items():
            grad = found.pop(node, None)
            sink(use, (), torch.zeros(use.shape, dtype=use.dtype, device=use.device) if grad is None else grad)
        for node, use in self._spread.items():
            if node.name() != CAPTURE:
                sink(use, (), torch.zeros((), dtype=use.dtype, device=use.device))
                continue
            grad = found.pop(node, None)
            grad = torch.zeros(use.shape, dtype=use.dtype, device=use.device) if grad is None else grad
            sink(use, node.saved_tensors, grad.reshape(use.shape))

    def _down(self, shares: dict[Edge, Tensor]) -> dict[Any, Tensor]:
        """Each example's gradients at the region's start, [B, *shape] by node, by one backward for each example.

        A parameter that layers on the way multiplied with has more of a gradient than its uses outside of them; only
        what the operations outside hand down to it is taken.
        """
        if not shares:
            return {}
        outputs, grads = [GradientEdge(*edge) for edge in shares], list(shares.values())
        dtypes = [edge[0]._input_metadata[edge[1]].dtype for edge in shares]
        gathered: dict[Any, list[Tensor]] = {node: [] for node in (*self._bare, *self.calls)}
        node_of = {id(call): node for node, call in self.calls.items()}

        def collect(call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> None:
            node = node_of[id(call)]
            if node.name() == CAPTURE:
                gathered[node].append(grad)
            else:
                for name in call.parameters:
                    self._spread[node].gathered[name].append(one_example(call, name, inputs, grad))

        inputs = [PROBE, *(self.leaves[node] for node in self._bare)]
        handed_down: dict[Any, list[Tensor]] = {node: [] for node in self._bare}
        listening = self._listen([edge[0] for edge in shares], handed_down)
        for call in self.calls.values():
            call.sink = collect
        try:
            for example in range(self.examples):
                seeds = [grad[example].to(dtype) for grad, dtype in zip(grads, dtypes, strict=True)]
                torch.autograd.grad(outputs, inputs, seeds, retain_graph=True, allow_unused=True)
                for node, parts in handed_down.items():
                    gathered[node] += [sum(parts[1:], parts[0])] if parts else []
                    parts.clear()
        finally:
            for call in self.calls.values():
                call.sink = None
            for stop in listening:
                stop()
        return {node: torch.stack(each) for node, each in gathered.items() if each}

    def _listen(self, starts: list[Any], handed_down: dict[Any, list[Tensor]]) -> list[Callable[[], None]]:
        """Notes what operations below ``starts`` give to the bare parameters; returns what ends that.

        Of the operations inside a layer, those count that give to a parameter the layer read as its input.
        """
        ends = []
        for node in self._below(starts):
            call = getattr(node, "call", None)
            if isinstance(call, LayerCall):
                heard = {below for below in handed_down if any(self.leaves[below] is s for s in call.sources)}
                _refuse_own_weight(call, [self.leaves[below] for below in heard])
                operations = _inside(node, call) if heard else []
            else:
                heard, operations = set(handed_down), [node]
            for operation in operations:
                slots = [(slot, below) for slot, (below, _) in enumerate(operation.next_functions) if below in heard]
                if slots:
                    ends.append(operation.register_hook(partial(_note, slots, handed_down)).remove)
        return ends


def _refuse_spread(losses: Tensor, found: list[Tensor]) -> None:
    """Raises UnsupportedModelError where what isn't finite came from one example to another's gradients.

    Those of examples with finite losses [B] would be left out for another's, which no bound covers.
    """
    if is_traced() or bool((finite := losses.isfinite()).all()):
        return
    for gradients in found:
        own = gradients.isfinite().reshape(len(gradients), -1).all(1)
        if len(own) == len(finite) and bool((finite & ~own).any()):
            raise UnsupportedModelError(
                "an example whose loss is not finite spoils the gradients of others, through a parameter that is used "
                "outside of every layer with a rule, so that it can't be left out alone; give the module a rule (see "
                "CONTRIBUTING.md), or leave such examples out of the data"
            )


def _inside(node: Any, call: LayerCall) -> list[Any]:
    """The operations between a layer's node and what the layer read."""
    found: list[Any] = []
    stack = [below for below, _ in node.next_functions]
    while stack:
        below = stack.pop()
        if below is None or below in found or any(below is source for source in call.sources):
            continue
        found.append(below)
        stack += [further for further, _ in below.next_functions]
    return found


def _refuse_own_weight(call: LayerCall, read: list[Tensor]) -> None:
    own = [p for p in call.layer._parameters.values() if p is not None]
    if any(p is tensor for p in own for tensor in read):
        raise UnsupportedModelError(
            f"{place_of(call.layer)} read one of its own parameters as an input, where the two uses can't be told "
            "apart; give it a copy of the parameter (parameter.clone())"
        )


def _note(slots: list[tuple[int, Any]], handed_down: dict[Any, list[Tensor]], given: Any, received: Any) -> None:
    """Keeps what an operation gave to some of its inputs."""
    for slot, below in slots:
        if given[slot] is not None:
            handed_down[below].append(given[slot].detach())


def inputs_of(node: Any) -> list[Edge]:
    """What a node was given, over the inside of layers; for a layer, without the numbers of outputs."""
    call = getattr(node, "call", None)
    if isinstance(call, LayerCall):
        return [(get_gradient_edge(s).node if isinstance(s, Tensor) else s, 0) for s in call.sources]
    return node.next_functions


def from_below(losses: Tensor) -> list[Any]:
    """Every node behind ``losses``, each after all of its inputs."""
    ordered: list[Any] = []
    seen: set[Any] = set()
    stack: list[tuple[Any, bool]] = [(losses.grad_fn, False)]
    while stack:
        node, done = stack.pop()
        if done:
            ordered.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(below, False) for below, _ in inputs_of(node)]
    return ordered
