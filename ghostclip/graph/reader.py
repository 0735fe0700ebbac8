"""Reading the autograd graph behind a vector of losses: which layers took part, and that nothing else did.

What a layer remembers lives in the graph only, so the graph is where a clipper finds it. The walk goes from the losses
down, jumps over the inside of each captured layer, and so meets a trained parameter only where one is used outside
of every rule: `ghostclip.graph.shared.search` then looks where its gradient can be had example by example.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.autograd.graph import _engine_run_backward as run_backward

from ghostclip.errors import UnsupportedModelError
from ghostclip.graph.nodes import (
    ACCUMULATE,
    Edge,
    inputs_first,
    inputs_of,
    is_own_function,
    number_of,
    ones_of,
    signature_of,
)
from ghostclip.graph.operations import EXPANDING, hides_constants, word_of
from ghostclip.graph.parameter_names import ParameterNames, serial_number
from ghostclip.native.custom_ops import is_traced
from ghostclip.nn.base import NOTHING, PROBE, LayerCall
from ghostclip.nn.fallback import FallbackCall
from ghostclip.sharding.hooks import hooked_since

__all__ = [
    "Uses",
    "backward_to_layers",
    "free_graph",
    "from_gradients",
    "read_graph",
    "without_hooks",
]

# Functions that normalize by the statistics of a batch, whatever module calls them.
BATCH_STATISTICS = {f"{name}BatchNormBackward0" for name in ("Native", "Cudnn", "Miopen")}
# Nodes behind which there is more than the graph has, and what to do about them.
HIDING = {
    "CheckpointFunctionBackward": "reentrant activation checkpointing hides the layers inside it; "
    "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
    "CompiledFunctionBackward": "torch.compile compiled the model, or a function in it, which hides what happens to "
    "each example; leave torch.compile out, and call engine.compile() (or GhostClipper(..., compile=True)) for "
    "compiled steps",
    # What torch gives a gradient that a once_differentiable backward made: it raises when a gradient comes to it, and
    # leads nowhere, so that none would.
    "Error": "the losses contain a gradient that went through an autograd.Function marked with @once_differentiable, "
    "whose second derivative is unknown; make its backward of differentiable operations, or leave the gradient out of "
    "the losses",
}

log = logging.getLogger("ghostclip")


@dataclass(frozen=True)
class Uses:
    """What a walk through the graph found.

    Attributes:
        calls: every use of a wrapper layer that the losses depend on.
        leaves: nodes at which trained parameters enter outside of every layer.
        nodes: all nodes, over the inside of layers, in the order of the walk; the same place in the same structure.
        structure: a hash of the graph's operations, of what each was given, of what each says of how it moves entries
            (`signature_of`), and of the layers and parameters that they belong to. It doesn't depend on the batch's
            size.
        hooked: whether a hook was registered in the forward, on a tensor perhaps.
    """

    calls: list[LayerCall]
    leaves: list[Any]
    nodes: list[Any]
    structure: int
    hooked: bool

    @functools.cached_property
    def has_own_code(self) -> bool:
        """Whether hooks or functions of somebody's own run in a backward."""
        return self.hooked or any(is_own_function(node) for node in self.nodes)

    @functools.cached_property
    def places(self) -> Mapping[Any, int]:
        """{node: its place in ``nodes``}."""
        return {node: place for place, node in enumerate(self.nodes)}

    @functools.cached_property
    def consumers(self) -> Mapping[Any, list[Any]]:
        """{node: the nodes that its outputs are inputs of}, each as often as it has one."""
        found: dict[Any, list[Any]] = {node: [] for node in self.nodes}
        for node in self.nodes:
            for below, _ in inputs_of(node):
                if below is not None:
                    found[below].append(node)
        return found

    @functools.cached_property
    def capturing(self) -> Mapping[LayerCall, Any]:
        """{call: its node}."""
        return {node.call: node for node in self.nodes if isinstance(getattr(node, "call", None), LayerCall)}

    @functools.cached_property
    def above_parameters(self) -> set[Any]:
        """The nodes of layers and of parameters outside of them, and all nodes that these lead to."""
        found = {*self.leaves, *self.capturing.values()}
        for node in inputs_first(self.nodes[0]) if self.nodes else ():
            if any(below in found for below, _ in inputs_of(node)):
                found.add(node)
        return found

    @functools.cached_property
    def made_of_parameters(self) -> set[Any]:
        """The nodes to which nothing led but parameters: no constant, no index, no mask, and no layer."""
        return self._made_of_parameters(lambda node: not hides_constants(node))

    @functools.cached_property
    def weights(self) -> set[Any]:
        """`made_of_parameters` without what was expanded or repeated: none of their rows are for one example."""
        return self._made_of_parameters(lambda node: not (hides_constants(node) or word_of(node) in EXPANDING))

    def _made_of_parameters(self, by: Callable[[Any], bool]) -> set[Any]:
        found = set(self.leaves)
        for node in inputs_first(self.nodes[0]) if found else ():
            below = [each for each, _ in inputs_of(node)]
            if below and found.issuperset(below) and by(node):
                found.add(node)
        return found

    @functools.cached_property
    def weights_alone(self) -> list[Edge]:
        """Edges at which a weight enters an operation with no layer below it, as ``p * x`` of data x.

        A backward that ends there, and at layers, visits all other nodes above parameters.
        """
        ends, reached = dict[Edge, None](), set(self.capturing.values())
        for node in inputs_first(self.nodes[0]) if self.leaves else ():
            if node in self.weights or node in reached:
                continue
            own = [edge for edge in inputs_of(node) if edge[0] in self.weights]
            if any(below in reached for below, _ in inputs_of(node)):
                reached.add(node)
            elif own:
                reached.add(node)
                ends |= dict.fromkeys(own)
        return list(ends)


def read_graph(losses: Tensor, index: ParameterNames, is_hooked: Callable[[int], bool] | None = None) -> Uses:
    """Every use of a layer or parameter that ``losses`` [B] depend on.

    Args:
        losses: [B].
        index: names of the model.
        is_hooked: whether a hook was registered in the forward whose first node has that number. None: one that was
            registered since the first layer was called counts.

    Raises:
        UnsupportedModelError: reentrant checkpointing or torch.compile hides what is behind them, or a function mixes
            examples.
    """
    index.watch()
    calls: list[LayerCall] = []
    leaves = list[Any]()
    # The walk in words: another graph, or the same with its inputs in another order, gives others.
    words: list[Any] = [index.version]
    places: dict[Any, int] = {}
    first: int = losses.grad_fn._sequence_nr()  # type: ignore[union-attr]
    stack: list[Edge] = [(losses.grad_fn, losses.output_nr)]
    while stack:
        node, number = stack.pop()
        if number:
            words.append(~number)  # Python's hashes of -1 and -2 are one
        if node in places or node is None:
            words.append(places.get(node))
            continue
        if isinstance(node, Tensor):  # a layer's input that nothing computed
            stack.append((get_gradient_edge(node).node, 0))
            continue
        places[node] = len(places)
        first = min(first, node._sequence_nr())
        kind: Any = type(node)
        if (word := _word_for(kind)) is None and kind is ACCUMULATE:
            words.append(kind)
            if index.name_of(node.variable) is not None:
                words.append(serial_number(node.variable))
                leaves.append(node)
        elif word is None and isinstance(call := getattr(node, "call", None), LayerCall):
            calls.append(call)
            words += (serial_number(call.layer), len(call.sources), ones_of(call.shape))
            stack += call.sources
        else:
            if word is None:
                _refuse_hiding(node)
            edges, signature = node.next_functions, signature_of(kind)
            words += (word or kind, len(edges), signature and number_of(signature(node)))
            stack += edges
    own = index.own_calls(calls)
    if is_hooked is None:
        hooked = bool(calls) and hooked_since(min([call.registered for call in calls]))
    else:
        hooked = is_hooked(first)
    return Uses(own, leaves, list(places), hash(tuple(words)), hooked)


@functools.cache
def _word_for(kind: type) -> Any:
    """The word in the hash for a node of torch's own: its type. None where `read_graph` must look at the node.

    Both types of reshapes are "view": which of them a forward has depends on whether it is compiled.
    """
    if kind.__module__ != "builtins" or kind is ACCUMULATE or kind.__name__ in BATCH_STATISTICS | HIDING.keys():
        return None
    return "view" if kind.__name__ in ("ReshapeAliasBackward0", "ViewBackward0") else kind


def _refuse_hiding(node: Any) -> None:
    """Raises UnsupportedModelError for a node that hides what is behind it, or normalizes by a batch's statistics."""
    name = type(node).__name__
    if name in HIDING:
        raise UnsupportedModelError(HIDING[name], place=node)
    # F.instance_norm has such a node, too, which sees a batch of one.
    if name in BATCH_STATISTICS and node._saved_training and node._saved_input.shape[0] > 1:
        raise UnsupportedModelError(
            f"a batch of shape {list(node._saved_input.shape)} is normalized by its own mean and variance "
            "(F.batch_norm with training=True), which mixes examples; use F.group_norm, F.layer_norm or "
            "F.instance_norm",
            place=node,
        )


def backward_to_layers(
    losses: Tensor,
    calls: Sequence[LayerCall],
    sink: Any,
    seed: Tensor | None = None,
    *,
    retain_graph: bool,
    wanted: Collection[LayerCall] | None = None,
    edges: Sequence[Any] = (),
) -> list[Any]:
    """A backward from ``losses`` [B] to the pre-activations and no further; ``sink`` is told of each as it arrives.

    Args:
        losses: [B].
        calls: uses of layers, as `RowLayout.calls` has them: uses of parameters outside of layers last.
        sink: called with (call, inputs, gradient at the pre-activation).
        seed: gradient of the losses, [B]; None for ones.
        retain_graph: as torch's.
        wanted: the calls whose gradients the sink needs: the pass ends at the lowest of them, so that ``retain_graph``
            must be true. None for all.
        edges: leaves, or tensors of the graph.

    Returns:
        The gradients at ``edges``, None where none arrived.
    """
    seed = _ones(losses.detach()) if seed is None else seed
    if calls and isinstance(calls[-1], FallbackCall):
        return _backward_with_region(losses, calls, sink, seed, retain_graph, wanted, edges)
    below = [PROBE] if wanted is None else list(_edges_below(losses, wanted))
    ends = (*below, *(edge if isinstance(edge, Tensor) else GradientEdge(*edge) for edge in edges))
    try:
        for call in calls:
            call.sink = sink
        # What torch.autograd.grad does, without its checks of what is right here.
        found = run_backward((losses,), (seed,), retain_graph, False, ends, True, accumulate_grad=False)
        return list(found[len(below) :])
    finally:
        for call in calls:
            call.sink, call.ends = None, False


def _ones(losses: Tensor) -> Tensor:
    """Ones [B], the gradient of the losses; in a graph that is compiled for a CPU they are computed from ``losses``.

    That keeps the backward behind the forward. Without it inductor computes losses and gradients in one kernel, where
    gradients can't overwrite the logits: a step of a Llama of 10,000 words takes 1.03 to 1.10 of the time.
    """
    if is_traced() and not losses.is_cuda:
        return (losses.argsort() >= 0).to(losses.dtype)
    return torch.ones_like(losses)


def _backward_with_region(
    losses: Tensor, calls: Sequence[LayerCall], sink: Any, seed: Tensor, retain_graph: bool,
    wanted: Collection[LayerCall] | None, edges: Sequence[Any],
) -> list[Any]:  # fmt: skip
    """The same where parameters are used outside of layers, too; it goes over all of the graph."""
    region = calls[-1].region  # type: ignore[attr-defined]
    layers = [call for call in calls if not isinstance(call, FallbackCall)]
    found: list[Any] = []
    if sink is not NOTHING:
        own = [boundary.edge for boundary in region.boundaries]
        found = backward_to_layers(losses, layers, sink, seed, retain_graph=True, edges=[*own, *edges])
        grads = found[: len(own)]
        del found[: len(own)]
        region.hand_over(grads, losses, sink, wanted)
    if not retain_graph:
        leaves = list(region.leaves.values())
        with without_hooks(leaves):
            free_graph(losses, layers, leaves)
    return found


@torch.no_grad()
def from_gradients(losses: Tensor, calls: Sequence[LayerCall], sink: Any, gradients: dict[Any, Any]) -> None:
    """Tells ``sink`` what `backward_to_layers` would, given the gradients of one from ones; each goes once told.

    Args:
        losses, calls, sink: as for `backward_to_layers`.
        gradients: {call: (inputs, gradient at the pre-activation)}, and of boundaries {tensor of the graph: ((), its)}.
    """
    wanted = {id(call) for call in calls}
    for subject in list(gradients):
        if id(subject) in wanted:
            sink(subject, *gradients.pop(subject))
    if calls and isinstance(calls[-1], FallbackCall):
        region = calls[-1].region
        grads = [gradients.pop(boundary.edge, ((), None))[1] for boundary in region.boundaries]
        region.hand_over(grads, losses, sink, None)
    gradients.clear()


def _edges_below(losses: Tensor, wanted: Collection[LayerCall]) -> Iterator[GradientEdge]:
    """Where a backward to the wanted calls ends: an edge just below each one that has none further down."""
    ids = {id(call) for call in wanted}
    above: set[Any] = set()
    for node in inputs_first(losses.grad_fn):
        reaches = any(below in above for below, _ in inputs_of(node))
        call = getattr(node, "call", None)
        if isinstance(call, LayerCall) and id(call) in ids:
            call.ends = not reaches
            if call.ends:
                # To a pre-activation, which only the node of a layer leads to; of a recurrent layer, to a weight.
                yield GradientEdge(*next(edge for edge in node.next_functions if edge[0] is not None))
            reaches = True
        if reaches:
            above.add(node)


@contextmanager
def without_hooks(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Inside, no hook of these parameters runs: they are for finished sums, and nothing is delivered."""
    hooks = [(leaf._backward_hooks, dict(leaf._backward_hooks)) for leaf in leaves if leaf._backward_hooks]
    for live, _ in hooks:
        live.clear()
    try:
        yield
    finally:
        for live, own in hooks:
            live.update(own)


class _NoGradient(torch.autograd.Function):
    """Identity without a gradient: what comes before it gets none."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor) -> Tensor:
        return losses.view_as(losses)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def free_graph(losses: Tensor, calls: Sequence[LayerCall], edges: Sequence[Any] = ()) -> None:
    """Frees what the graph behind ``losses`` holds, as a backward does in passing, without computing anything.

    Autograd frees each node it comes through, and nodes that get no gradient have nothing to compute. Hooks of tensors
    get None; what one raises about that is logged, and what is left of the graph goes with the losses.

    Args:
        losses, calls, edges: as for `backward_to_layers`.
    """
    try:
        backward_to_layers(_NoGradient.apply(losses), calls, NOTHING, retain_graph=False, edges=edges)
    except RuntimeError:
        raise
    except Exception as error:
        log.debug("a hook, given None while the graph was freed, raised %s: %s", type(error).__name__, error)
