"""Reading the autograd graph behind a vector of losses: which layers took part, and that nothing else did.

What a layer remembers lives in the graph only, so the graph is where a clipper finds it. The walk goes from the losses
down, jumps over the inside of each captured layer, and so meets a trained parameter only where one is used outside
of every rule: `ghostclip.graph.shared.search` then looks where its gradient can be had example by example.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.autograd.graph import _engine_run_backward as run_backward

from ghostclip.errors import UnsupportedModelError
from ghostclip.graph.lengths import has_lengths, lengths_of
from ghostclip.graph.nodes import ACCUMULATE, COPY_INTO_SLICES, REORDERING, Edge, from_below, inputs_of, said_by
from ghostclip.graph.parameter_names import ParameterNames, serial_number
from ghostclip.nn.base import NOTHING, PROBE, LayerCall
from ghostclip.nn.fallback import FallbackCall

__all__ = [
    "AT_LEAST_FLOAT32",
    "Uses",
    "first_pass",
    "free_graph",
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
# Types in which sums may be formed.
AT_LEAST_FLOAT32 = (torch.float32, torch.float64, torch.complex64, torch.complex128)

log = logging.getLogger("ghostclip")


@dataclass(frozen=True)
class Uses:
    """What a walk through the graph found.

    Attributes:
        calls: every use of a wrapper layer that the losses depend on.
        layers: {call: serial number of its layer}.
        leaves: nodes at which trained parameters enter outside of every layer.
        moving: operations of `REORDERING` kinds between the layers, each with its number among them. Those that are
            known to leave the examples in place are left out later (`ghostclip.graph.moved_rows`).
        awaited: copies into parts of tensors with the numbers of inputs that no gradient has reached, so that nobody
            knows where these have the examples; such a one moves nothing until a gradient comes.
        picked: rows that are picked by index (`ghostclip.graph.picked_rows`); None before they are looked for.
        lengths: those of examples that proofs hold for (`ghostclip.graph.lengths`); None where they hold for all.
        size: how many nodes there are, by which a forward that took another way is told; and
            `ParameterNames.version`, by which another layer is told from the one in whose place it is.
        structure: a hash of the graph's operations, of what each was given, and of what each says of how it moves
            entries (`said_by`). What was proved holds where it is the same. It doesn't depend on the batch's size.
    """

    calls: list[LayerCall]
    layers: Mapping[LayerCall, int]
    leaves: list[Any]
    moving: list[tuple[int, Any]]
    size: tuple[int, int]
    structure: int
    lengths: Any = None
    awaited: Sequence[tuple[Any, list[int]]] = ()
    picked: Any = None


def read_graph(losses: Tensor, index: ParameterNames) -> Uses:
    """Every use of a layer or parameter that ``losses`` [B] depend on.

    Raises:
        UnsupportedModelError: reentrant checkpointing or torch.compile hides what is behind them, or a function mixes
            examples.
    """
    index.watch()
    calls: list[LayerCall] = []
    leaves, reordering, lengthy = list[Any](), list[Any](), list[Any]()
    # The walk in words: another graph, or the same with its inputs in another order, gives others.
    words: list[Any] = []
    places: dict[Any, int] = {}
    stack: list[Edge] = [(losses.grad_fn, losses.output_nr)]
    while stack:
        node, number = stack.pop()
        if number:
            words.append(~number)  # Python's hashes of -1 and -2 are one
        if node in places or node is None:
            words.append(places.get(node))
            continue
        places[node] = len(places)
        kind: Any = type(node)
        if (word := _word_for(kind)) is not None:
            edges = node.next_functions
            words += (word, len(edges), said_by(node))
            stack += edges
        elif kind is ACCUMULATE:
            words.append(kind)
            if index.name_of(node.variable) is not None:
                leaves.append(node)
        elif isinstance(node, Tensor):
            words.append(Tensor)
            stack.append((get_gradient_edge(node).node, 0))
        elif isinstance(call := getattr(node, "call", None), LayerCall):
            calls.append(call)
            if call.lengths:
                lengthy.append(call)
            words += (serial_number(call.layer), len(call.sources))
            stack += zip(call.sources, call.numbers, strict=True)
        else:
            if kind.__name__ in REORDERING and not _keeps_places(node):
                reordering.append(node)
            if has_lengths(kind):
                lengthy.append(node)
            if kind.__name__ in HIDING:
                raise UnsupportedModelError(HIDING[kind.__name__], place=node)
            if kind.__name__ in BATCH_STATISTICS:
                _refuse_statistics(node)
            words += (kind, len(node.next_functions), said_by(node))
            stack += node.next_functions
    own = index.own_calls(calls)
    lengths, size = lengths_of(lengthy, index) if lengthy else None, (len(places), index.version)
    return Uses(list(own), own, leaves, list(enumerate(reordering)), size, hash(tuple(words)), lengths)


def _keeps_places(node: Any) -> bool:
    """Whether an operation in place on a part of a tensor brings nothing there but constants and parameters."""
    sources = [below for below, _ in node.next_functions[1:]]
    return node.name() == COPY_INTO_SLICES and all(below is None or type(below) is ACCUMULATE for below in sources)


@functools.cache
def _word_for(kind: type) -> Any:
    """The type of torch's own nodes of which nothing has to be known but where they lead; None for others.

    Which of two that do the same it is may depend on whether the forward is compiled.
    """
    if (
        kind.__module__ != "builtins"
        or kind is ACCUMULATE
        or kind.__name__ in REORDERING | BATCH_STATISTICS | HIDING.keys()
    ):
        return None
    if has_lengths(kind):
        return None
    return "view" if kind.__name__ in ("ReshapeAliasBackward0", "ViewBackward0") else kind


def _refuse_statistics(node: Any) -> None:
    """Raises for F.batch_norm in training; as part of F.instance_norm it sees a batch of one."""
    if node._saved_training and node._saved_input.shape[0] > 1:
        raise UnsupportedModelError(
            f"a batch of shape {list(node._saved_input.shape)} is normalized by its own mean and variance "
            "(F.batch_norm with training=True), which mixes examples; use F.group_norm, F.layer_norm or "
            "F.instance_norm",
            place=node,
        )


def first_pass(
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
        losses, calls: as given to and found by `read_graph`, uses of parameters outside of layers last.
        sink: called with (call, inputs, gradient at the pre-activation); nothing is kept on its behalf.
        seed: gradient of the losses, [B]; None for ones.
        retain_graph: as torch's.
        wanted: the calls whose gradients the sink needs: the pass ends at the lowest of them, and the graph is kept.
            None for all.
        edges: leaves, or tensors of the graph.

    Returns:
        The gradients at ``edges``, None where none arrived.
    """
    seed = torch.ones_like(losses) if seed is None else seed
    if calls and isinstance(calls[-1], FallbackCall):
        _pass_with_region(losses, calls, sink, seed, retain_graph, wanted)
        return []
    for call in calls:
        call.sink = sink
    below = [PROBE] if wanted is None else list(_edges_below(losses, wanted))
    ends = (*below, *(edge if isinstance(edge, Tensor) else GradientEdge(*edge) for edge in edges))
    try:
        # What torch.autograd.grad does, without its checks of what is right here.
        found = run_backward((losses,), (seed,), retain_graph, False, ends, True, accumulate_grad=False)
        return list(found[len(below) :])
    finally:
        for call in calls:
            call.sink, call.ends = None, False


def _pass_with_region(
    losses: Tensor, calls: Sequence[LayerCall], sink: Any, seed: Tensor, retain_graph: bool,
    wanted: Collection[LayerCall] | None,
) -> None:  # fmt: skip
    """A first pass where parameters are used outside of layers, too; it goes over all of the graph."""
    region = calls[-1].region  # type: ignore[attr-defined]
    layers = [call for call in calls if not isinstance(call, FallbackCall)]
    if sink is not NOTHING:
        edges = [boundary.edge for boundary in region.boundaries]
        grads = first_pass(losses, layers, sink, seed, retain_graph=True, edges=edges)
        region.hand_over(grads, losses, seed, sink, wanted)
    if not retain_graph:
        leaves = list(region.leaves.values())
        with without_hooks(leaves):
            _let_go(losses, layers, leaves)


def _edges_below(losses: Tensor, wanted: Collection[LayerCall]) -> Iterator[GradientEdge]:
    """Where a backward to the wanted calls ends: an edge just below each one that has none further down."""
    ids = {id(call) for call in wanted}
    above: set[Any] = set()
    for node in from_below(losses.grad_fn):
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


def free_graph(losses: Tensor, calls: Sequence[LayerCall]) -> None:
    """Frees what the graph behind ``losses`` holds, as a backward does in passing, without computing anything.

    Args:
        losses, calls: as for `first_pass`.
    """
    _let_go(losses, calls)


def _let_go(losses: Tensor, calls: Sequence[LayerCall], edges: Sequence[Any] = ()) -> None:
    """A first pass without a gradient.

    Autograd frees each node it comes through, and nodes that get no gradient have nothing to compute. Hooks of tensors
    get None; what they raise about that is nobody's business, and what is left goes with the losses.
    """
    try:
        first_pass(_NoGradient.apply(losses), calls, NOTHING, retain_graph=False, edges=edges)
    except RuntimeError:
        raise
    except Exception as error:
        log.debug("a hook, given None while the graph was let go of, raised %s: %s", type(error).__name__, error)
