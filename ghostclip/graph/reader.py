"""Reading the autograd graph behind a vector of losses: which layers took part, and that nothing else did.

What a layer remembers lives in the graph only, so the graph is where a clipper finds it. The walk goes from the losses
down, jumps over the inside of each captured layer, and so meets a trained parameter only where one is used outside
of every rule: `ghostclip.graph.shared.search` then looks where its gradient can be had example by example.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.autograd.graph import _engine_run_backward as run_backward

from ghostclip.errors import UnsupportedModelError
from ghostclip.graph.parameter_names import ParameterNames
from ghostclip.graph.serial import serial_number
from ghostclip.graph.shared.boundary import Edge
from ghostclip.graph.shared.subgraph import from_below, inputs_of
from ghostclip.nn.base import NOTHING, PROBE, LayerCall
from ghostclip.nn.fallback import FallbackCall

__all__ = ["AT_LEAST_FLOAT32", "Uses", "first_pass", "free_graph", "gradients_at", "read_graph"]

ACCUMULATE = type(torch.zeros((), device="cpu", requires_grad=True).expand(1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]

# Operations that may put the examples of a batch into another order, differently for every batch.
REORDERING = {
    f"{name}Backward0"
    for name in ("Embedding", "Flip", "Gather", "Index", "IndexAdd", "IndexCopy", "IndexPut", "IndexSelect", "Roll",
                 "Scatter", "ScatterAdd", "Sort", "Take")
}  # fmt: skip

# Functions that normalize by the statistics of a batch, whatever module calls them.
BATCH_STATISTICS = {f"{name}BatchNormBackward0" for name in ("Native", "Cudnn", "Miopen")}
# Types in which sums may be formed.
AT_LEAST_FLOAT32 = (torch.float32, torch.float64, torch.complex64, torch.complex128)
# Nodes of torch's own that more has to be known of than where they lead.
TOLD = REORDERING | BATCH_STATISTICS


log = logging.getLogger("ghostclip")


@dataclass(frozen=True)
class Uses:
    """What a walk through the graph found.

    Attributes:
        calls: every use of a wrapper layer that the losses depend on.
        leaves: nodes at which trained parameters enter outside of every layer.
        reorders: whether something between the layers may order the examples differently from batch to batch.
        size: how many nodes there are, by which a forward that took another way is told; and
            `ParameterNames.version`, by which another layer is told from the one in whose place it is.
    """

    calls: list[LayerCall]
    leaves: list[Any]
    reorders: bool
    size: tuple[int, int]

    def key(self, examples: int) -> tuple:
        """What graphs have in common of which one thing holds, for batches of that size."""
        uses = [
            (serial_number(c.layer), c.parameters, c.batch_dim, c.shape, c.dtype, c.has_saved_tensor_hooks)
            for c in self.calls
        ]
        return (examples, self.size, *uses)


def read_graph(losses: Tensor, index: ParameterNames) -> Uses:
    """Every use of a wrapper layer that ``losses`` depend on.

    Args:
        losses: [B], attached to the graph.
        index: of the model.

    Raises:
        UnsupportedModelError: reentrant checkpointing hides what is behind them, or a function mixes examples.
    """
    index.watch()
    calls: list[LayerCall] = []
    leaves: list[Any] = []
    reorders = False
    seen: set[Any] = set()
    stack: list[Any] = [losses.grad_fn]
    while stack:
        node = stack.pop()
        if node in seen or node is None:
            continue
        seen.add(node)
        kind: Any = type(node)
        if _is_plain(kind):
            stack += [edge[0] for edge in node.next_functions]
        elif kind is ACCUMULATE:
            if index.name_of(node.variable) is not None:
                leaves.append(node)
        elif isinstance(node, Tensor):
            stack.append(get_gradient_edge(node).node)
        elif isinstance(call := getattr(node, "call", None), LayerCall):
            if not index.knows(call):
                index.refresh()
            call.own = index.own_parameters(call)
            if call.own:
                calls.append(call)
            stack += call.sources
        else:
            reorders = reorders or (kind.__name__ in REORDERING and _moves_first_dimension(node))
            if kind.__name__ == "CheckpointFunctionBackward":
                raise UnsupportedModelError(
                    "reentrant activation checkpointing hides the layers inside it; "
                    "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
                )
            if kind.__name__ in BATCH_STATISTICS:
                _refuse_statistics(node)
            stack += [edge[0] for edge in node.next_functions]
    return Uses(calls, leaves, reorders, (len(seen), index.version))


@functools.cache
def _is_plain(kind: type) -> bool:
    """Whether nodes of this type are torch's own, and nothing has to be known of them but where they lead."""
    return kind.__module__ == "builtins" and kind is not ACCUMULATE and kind.__name__ not in TOLD


def _moves_first_dimension(node: Any) -> bool:
    """Whether a node of a REORDERING kind may move entries along dimension 0; where it doesn't say, it may."""
    if type(node.next_functions[0][0]) is ACCUMULATE:
        return False  # a lookup in a table
    for saved in ("_saved_dim", "_saved_dims"):
        if hasattr(node, saved):
            dims = getattr(node, saved)
            return 0 in (dims if isinstance(dims, (tuple, list)) else (dims,))
    indices = getattr(node, "_saved_indices", False)
    first: Any = indices[0] if isinstance(indices, tuple) else False
    if first is None:
        return False
    # h[torch.arange(B), lengths] is how a model picks one position of each example; the examples stay in place.
    in_place = isinstance(first, Tensor) and first.dim() == 1 and first.dtype == torch.int64
    return not (in_place and torch.equal(first, torch.arange(len(first), device=first.device)))


def _refuse_statistics(node: Any) -> None:
    """Raises for F.batch_norm in training; as part of F.instance_norm it sees a batch of one."""
    if node._saved_training and node._saved_input.shape[0] > 1:
        raise UnsupportedModelError(
            f"a batch of shape {list(node._saved_input.shape)} is normalized by its own mean and variance "
            "(F.batch_norm with training=True), which mixes examples; use F.group_norm, F.layer_norm or F.instance_norm"
        )


def first_pass(
    losses: Tensor,
    calls: Sequence[LayerCall],
    sink: Any,
    seed: Tensor | None = None,
    *,
    retain_graph: bool,
    wanted: Collection[LayerCall] | None = None,
) -> None:
    """A backward from ``losses`` to the pre-activations and no further; ``sink`` is told of each as it arrives.

    Args:
        losses: [B].
        calls: from `read_graph`.
        sink: called with (call, inputs, gradient at the pre-activation); nothing is kept on its behalf.
        seed: gradient of the losses, [B]; None for ones.
        retain_graph: as torch's.
        wanted: the calls whose gradients the sink needs: the pass ends at the lowest of them, and the graph is kept.
            None for all.
    """
    for call in calls:
        call.sink = sink
    ends: tuple[Any, ...] = (PROBE,) if wanted is None else tuple(_edges_below(losses, wanted))
    try:
        seed = torch.ones_like(losses) if seed is None else seed
        if calls and isinstance(calls[-1], FallbackCall):
            _pass_with_region(losses, calls, sink, seed, retain_graph)
        else:
            # What torch.autograd.grad does, without its checks of what is right here.
            run_backward((losses,), (seed,), retain_graph, False, ends, True, accumulate_grad=False)
    finally:
        for call in calls:
            call.sink, call.ends = None, False


def _edges_below(losses: Tensor, wanted: Collection[LayerCall]) -> Iterator[GradientEdge]:
    """What a backward to the wanted calls has to ask for: an edge just below each one that has none further down."""
    ids = {id(call) for call in wanted}
    above: set[Any] = set()
    for node in from_below(losses):
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


def _pass_with_region(losses: Tensor, calls: Sequence[LayerCall], sink: Any, seed: Tensor, retain_graph: bool) -> None:
    """A first pass where parameters are used outside of layers, too; such uses come last among ``calls``."""
    region = calls[-1].region  # type: ignore[attr-defined]
    if sink is not NOTHING:
        grads = gradients_at([boundary.edge for boundary in region.boundaries], losses, seed)
        for call in calls:
            call.sink = None
        region.hand_over(grads, losses, seed, sink)
    if not retain_graph:
        for call in calls:
            call.sink = NOTHING
        leaves = list(region.leaves.values())
        with _without_hooks(leaves):
            torch.autograd.grad(_NoGradient.apply(losses), [PROBE, *leaves], seed, allow_unused=True)


@contextmanager
def _without_hooks(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Inside, no hook of these parameters runs: they are for finished sums, and nothing is delivered."""
    hooks = [(leaf._backward_hooks, dict(leaf._backward_hooks)) for leaf in leaves if leaf._backward_hooks]
    for live, _ in hooks:
        live.clear()
    try:
        yield
    finally:
        for live, own in hooks:
            live.update(own)


def gradients_at(edges: Sequence[Edge], losses: Tensor, seed: Tensor) -> list[Any]:
    """A first pass that also returns the gradients at tensors of the graph; keeps the graph."""
    wanted: Any = [PROBE, *(GradientEdge(*edge) for edge in edges)]
    return list(torch.autograd.grad(losses, wanted, seed, retain_graph=True, allow_unused=True))[1:]


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

    Autograd frees each node it comes through, and nodes that get no gradient have nothing to compute. Hooks of tensors
    get None; what they raise about that is nobody's business, and what is left goes with the losses.

    Args:
        losses, calls: as for `first_pass`.
    """
    nothing = _NoGradient.apply(losses)
    try:
        first_pass(nothing, calls, NOTHING, retain_graph=False)
    except RuntimeError:
        raise
    except Exception as error:
        log.debug("a hook, given None while the graph was let go of, raised %s: %s", type(error).__name__, error)
