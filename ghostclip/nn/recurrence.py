"""One direction of one recurrent layer as two nodes of the graph: torch's fused kernel forwards, an own way back.

torch's own backward can't stop at the gates, so `Recurrence` goes back instead: it recomputes the gates and goes back
through time (time_kernels.py; run by run for packed sequences, packed.py). Both nodes are their own capture: in a first
pass `Weights` tells the sink the gate gradients and forms no weight gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ghostclip.native.custom_ops import is_traced
from ghostclip.norms.term import to_float32

from .base import NOTHING, PROBE, LayerCall, _top_hooks
from .fused import fused_forward
from .gates import Trace
from .packed import Order, PackedTrace, forward_runs, way_back
from .through_time import GateGradients, Incoming
from .time_kernels import way_of

__all__ = ["attached"]

# The inputs' gradient is kept for a second pass if the gates' have so many times its numbers.
SMALL = 2


class Seen(NamedTuple):
    """Rows of what the weights were multiplied with, [T, B, d], or [N, 1, d] of a packed sequence."""

    x: Tensor
    before: Tensor
    order: Order | None

    def laid_out(self, rows: Tensor) -> Tensor:
        """[T, B, d], as rules want it."""
        return rows if self.order is None else self.order.padded(rows)


class Found(NamedTuple):
    """What a first pass leaves to a second with the same gradients (`Repeat`).

    The inputs' gradient, which a large product made, is left with it if it is small beside the gates'.
    """

    seen: Seen
    gradients: GateGradients
    weights: list[Any]
    into_x: Tensor | None


class Left:
    """What a direction's `Recurrence` leaves to its `Weights` in a backward, to be taken once; None before and after.

    Attributes:
        call: this use of the layer.
        content: what the weights were multiplied with, and the gate gradients.
    """

    __slots__ = ("call", "content")

    def __init__(self, call: LayerCall) -> None:
        self.call = call
        self.content: tuple[Seen, GateGradients] | None = None

    def pop(self) -> tuple[Seen, GateGradients] | None:
        content, self.content = self.content, None
        return content


class Weights(torch.autograd.Function):
    """The node of a direction's weights, below its `Recurrence`: it tells the sink, or forms their gradients.

    While a node's backward runs, autograd holds the gradient that came to it, of the output's size. That and what norms
    and products of weights take need not be in memory together. This node is made just before the other, so that
    autograd, which takes a device's youngest first, comes to it just after; what it returns is on the weights' device.
    """

    @staticmethod
    def forward(ctx: Any, probe: Tensor, left: Left, *weights: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.left = left
        assert weights[0] is not None
        return weights[0].new_empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple:
        nothing = (None,) * len(ctx.needs_input_grad)
        call, content = ctx.left.call, ctx.left.pop()
        if content is None:
            return nothing
        seen, found = content
        if call.sink is not None:
            call.sink(call, _for_rule(call, seen, found), seen.laid_out(found.into_input))
            return nothing
        return None, None, *_into_weights(seen, found, ctx.needs_input_grad[2:])


class Recurrence(torch.autograd.Function):
    """A direction's forward, done; its backward goes back through time, and leaves to `Weights` what it found.

    ``probe`` is what `Weights` returned, which gets a gradient without numbers, and ``weights`` are detached. Where a
    first pass has no business (``left`` is None), the weights are this node's own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        probe: Tensor,
        left: Left | None,
        mode: str,
        results: tuple[Tensor, ...],
        order: Order | None,
        x: Tensor,
        h0: Tensor,
        c0: Tensor | None,
        *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        output, *last = results
        ctx.output = None
        # The states are saved without their copy that the model gets: an output may be changed in place, as it may
        # behind torch's own GRU and RNN.
        if order is None:
            states = output.new_empty(output.shape[0] + 1, *output.shape[1:])
            states[:1], states[1:] = h0, output
            ctx.save_for_backward(x, states, c0, *weights)
            autocast = torch.is_autocast_enabled(x.device.type)
            if _top_hooks(False) is None and not (is_traced() or autocast):
                # One memory for both; whether the output was changed, its version tells. What was computed in other
                # types than it came in could not be had again.
                results = (states[1:].data, *last)
                ctx.output = results[0].detach()
        else:
            ctx.save_for_backward(x, output.clone(), h0, c0, *weights)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.left = None if left is None else left.call, left
        ctx.mode, ctx.order, ctx.kept = mode, order, None
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, output: Tensor | None, h_n: Tensor | None, c_n: Tensor | None = None) -> tuple:
        if ctx.call is not None and ctx.call.sink is NOTHING:
            ctx.kept = ctx.output = None
            return (None,) * len(ctx.needs_input_grad)
        call = ctx.call
        repeat = None if call is None or ctx.order is not None else call.repeat
        if repeat is not None and repeat.begun and isinstance(ctx.kept, Found):
            seen, found, weights, into_x = ctx.kept
        else:
            last = (None if grad is None else to_float32(grad[0]) for grad in (h_n, c_n))
            incoming = Incoming(None if output is None else to_float32(output), *last)
            seen, found, weights = (_back if ctx.order is None else _back_packed)(ctx, incoming)
            into_x = None
        if not _stays():
            ctx.output = None
        needed = ctx.needs_input_grad[5:8] if call is None or not call.ends else (False,) * 3
        if needed[0] and into_x is None:
            into_x = _into_x(seen, found.into_input.flatten(0, 1), weights[0])
        if repeat is not None and not is_traced():
            # The second pass has use for what was found, and none for what it was made of.
            small = into_x is not None and SMALL * into_x.numel() <= found.into_input.numel()
            ctx.kept = Found(seen, found, weights, into_x if small else None) if _stays() else None
        into_inputs = _into_inputs(into_x if needed[0] else None, found, needed)
        if call is None:
            own = _into_weights(seen, found, ctx.needs_input_grad[8:])
            return (*(None,) * 5, *into_inputs, *own)
        if torch._C._will_engine_execute_node(ctx.next_functions[0][0]):
            ctx.left.content = seen, found
        return (weights[0].new_empty(0), *(None,) * 4, *into_inputs, *(None,) * len(weights))


def attached(
    call: LayerCall | None,
    mode: str,
    results: tuple[Tensor, ...],
    order: Order | None,
    x: Tensor,
    initial: tuple[Tensor, ...],
    weights: list[Tensor | None],
) -> tuple[Tensor, ...]:
    """The results of a direction's forward, as part of the graph.

    Args:
        call: this use of the layer, or None where a first pass has no business with it.
        mode: of torch's recurrent layers.
        results: output [T, B, P] and last states [1, B, ...]; or, for packed sequences, [N, P] rows.
        order: of the rows of packed sequences, else None.
        x: [T, B, I], or [N, I].
        initial: h0 [1, B, P] and, for an LSTM, c0 [1, B, H].
        weights: W_ih, W_hh, b_ih, b_hh, W_hr; None for what there isn't.
    """
    h0, c0 = initial if len(initial) > 1 else (initial[0], None)
    if call is None:
        return Recurrence.apply(PROBE, None, mode, results, order, x, h0, c0, *weights)
    left = Left(call)
    probe = Weights.apply(PROBE, left, *weights)
    detached = [None if weight is None else weight.detach() for weight in weights]
    return Recurrence.apply(probe, left, mode, results, order, x, h0, c0, *detached)


def _stays() -> bool:
    """Whether another pass may follow over this graph, so that what was recomputed should be kept for it."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def _back(ctx: Any, incoming: Incoming) -> tuple[Seen, GateGradients, list[Any]]:
    """Through padded sequences."""
    x, states, c0, *saved = ctx.saved_tensors
    if ctx.output is not None and ctx.output._version:
        states = _states_again(ctx.mode, x, states[:1], c0, saved)
    weights: list[Any] = [None if weight is None else to_float32(weight) for weight in saved]
    trace = Trace(to_float32(x).contiguous(), to_float32(states), None if c0 is None else to_float32(c0[0]), *weights)
    known = ctx.kept if ctx.kept is not None and not isinstance(ctx.kept, Found) else None
    way, kept = (way_of(ctx.mode, trace), None) if known is None else known
    if known is None:
        kept = way.keep(trace)
    ctx.kept = (way, kept) if _stays() else None
    found = way.back(kept, trace, incoming)
    return Seen(trace.x, trace.states[:-1], None), found, weights


def _states_again(mode: str, x: Tensor, h0: Tensor, c0: Tensor | None, saved: list[Any]) -> Tensor:
    """[T + 1, B, P]: h0 and the states after each step, where these were overwritten."""
    initial = (h0,) if c0 is None else (h0, c0)
    weights = [weight for weight in saved if weight is not None]
    output, *_ = fused_forward(mode, x, initial, weights, saved[2] is not None, True)
    return torch.cat((h0, output))


def _back_packed(ctx: Any, incoming: Incoming) -> tuple[Seen, GateGradients, list[Any]]:
    """Through a packed sequence."""
    x, output, h0, c0, *saved = ctx.saved_tensors
    order = ctx.order
    weights: list[Any] = [None if weight is None else to_float32(weight) for weight in saved]
    x = order.turned(to_float32(x)).contiguous()
    runs = ctx.kept
    if runs is None:
        first_cell = None if c0 is None else to_float32(c0[0])
        packed = PackedTrace(order, x, order.turned(to_float32(output)), to_float32(h0[0]), first_cell, tuple(weights))
        runs = forward_runs(packed, lambda trace: way_of(ctx.mode, trace))
    ctx.kept = runs if _stays() else None
    came = None if incoming.output is None else order.turned(incoming.output)
    found = way_back(runs, Incoming(came, incoming.h_n, incoming.c_n))
    before = torch.cat([run.trace.states[:-1].flatten(0, 1) for run in runs])
    return Seen(x.unsqueeze(1), before.unsqueeze(1), order), found, weights


def _into_inputs(into_x: Tensor | None, found: GateGradients, needed: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """Gradients of x, h0 and c0 where needed."""
    c0 = found.c0 if needed[2] else None
    return into_x, found.h0.unsqueeze(0) if needed[1] else None, None if c0 is None else c0.unsqueeze(0)


def _into_weights(seen: Seen, found: GateGradients, needed: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """The same of W_ih, W_hh, b_ih, b_hh and W_hr, by one product over all time steps each."""
    return (
        _product(found.into_input, seen.x) if needed[0] else None,
        _product(found.into_hidden, seen.before) if needed[1] else None,
        found.summed()[0].sum(0) if needed[2] else None,
        found.summed()[1].sum(0) if needed[3] else None,
        _product(*found.projection) if needed[4] and found.projection else None,
    )


def _into_x(seen: Seen, into_input: Tensor, weight_ih: Tensor) -> Tensor:
    found = into_input @ weight_ih
    return found.view_as(seen.x) if seen.order is None else seen.order.turned(found, back=True)


def _product(grad: Tensor, factor: Tensor) -> Tensor:
    """sum_{t,b} grad (x) factor, with the narrower one on the left, where BLAS is a fifth faster."""
    return (factor.flatten(0, 1).mT @ grad.flatten(0, 1)).mT.contiguous()


def _for_rule(call: LayerCall, seen: Seen, found: GateGradients) -> tuple[Tensor, ...]:
    """What the rule needs beside dG: x, h_{t-1}, dG for W_hh; both dG summed over time; and both sides of W_hr."""
    into_hidden = seen.laid_out(found.into_hidden)
    parts = [seen.laid_out(seen.x), seen.laid_out(seen.before), into_hidden]
    if any(name.startswith("bias") for name in call.parameters):
        if seen.order is None:
            parts += found.summed()
        else:
            parts += (seen.laid_out(found.into_input).sum(0), into_hidden.sum(0))
    if found.projection is not None:
        parts += map(seen.laid_out, found.projection)
    return tuple(parts)
