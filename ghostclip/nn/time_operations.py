"""Recurrent layers as single operations of a graph that is written down: all time steps forward, and all back.

Written down step by step, a graph would have some operations for each step, take minutes to compile and be slower than
the kernels that know recurrences. So while a graph is written, torch's fused forward is one operation and the way back
through time (whichever `way_of` finds) is another; neither is looked into.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ghostclip.nn.grad_mode import keeping_grad_mode

from .fused import fused_forward
from .gates import Trace
from .recurrence import way_of
from .through_time import GateGradients, Incoming, Way

__all__ = ["WRITTEN", "forward"]


@torch.library.custom_op("ghostclip::recurrence", mutates_args=())
def _forward(
    mode: str, x: Tensor, initial: list[Tensor], weights: list[Tensor], bias: bool, training: bool
) -> list[Tensor]:
    """Output and last states of one direction; memory of their own."""
    output, *lasts = fused_forward(mode, x, tuple(initial), weights, bias, training)
    return [output.contiguous(), *(last.clone() for last in lasts)]


@_forward.register_fake
def _(mode: str, x: Tensor, initial: list[Tensor], weights: list[Tensor], bias: bool, training: bool) -> list[Tensor]:
    output = x.new_empty(x.shape[0], *initial[0].shape[1:])
    return [output, *(torch.empty_like(state) for state in initial)]


@keeping_grad_mode
def forward(
    mode: str, x: Tensor, initial: tuple[Tensor, ...], weights: list[Tensor], bias: bool, training: bool
) -> tuple[Tensor, ...]:
    """`fused.native` as one operation."""
    with torch.no_grad():
        initial = tuple(state.detach() for state in initial)
        return tuple(_forward(mode, x.detach(), [*initial], [w.detach() for w in weights], bias, training))


@torch.library.custom_op("ghostclip::back_through_time", mutates_args=())
def _back(
    mode: str,
    x: Tensor,
    states: Tensor,
    c0: Tensor | None,
    weights: list[Tensor],
    output: Tensor | None,
    h_n: Tensor | None,
    c_n: Tensor | None,
) -> list[Tensor]:
    """Gradients at the gates, dG and, of a GRU, also dG as W_hh sees it; the sums of each over time; at h0, at c0."""
    biases = weights[2:] if len(weights) == 4 else [None, None]
    trace = Trace(x, states, c0, weights[0], weights[1], *biases)
    way = way_of(mode, trace)
    found = way.back(way.keep(trace), trace, Incoming(output, h_n, c_n))
    both = found.into_hidden is not found.into_input
    gates = [found.into_input, found.into_hidden] if both else [found.into_input]
    sums = [total.clone() for total in found.summed()[: len(gates)]]
    return [*gates, *sums, found.h0, *([] if found.c0 is None else [found.c0])]


@_back.register_fake
def _(
    mode: str,
    x: Tensor,
    states: Tensor,
    c0: Tensor | None,
    weights: list[Tensor],
    output: Tensor | None,
    h_n: Tensor | None,
    c_n: Tensor | None,
) -> list[Tensor]:
    steps, batch, _ = x.shape
    count, width = 1 + (mode == "GRU"), weights[0].shape[0]
    gates = [x.new_empty(steps, batch, width) for _ in range(count)]
    sums = [x.new_empty(batch, width) for _ in range(count)]
    return [*gates, *sums, x.new_empty(states.shape[1:]), *([] if c0 is None else [torch.empty_like(c0)])]


def _back_as_one(mode: str, kept: None, trace: Trace, incoming: Incoming) -> GateGradients:
    there = (trace.weight_ih, trace.weight_hh, trace.bias_ih, trace.bias_hh)
    weights = [weight for weight in there if weight is not None]
    found = _back(mode, trace.x, trace.states, trace.c0, weights, incoming.output, incoming.h_n, incoming.c_n)
    if mode == "GRU":
        into_input, into_hidden, of_input, of_hidden, h0 = found
        return GateGradients(into_input, into_hidden, h0, None, (of_input, of_hidden))
    grad, summed, h0, *c0 = found
    return GateGradients(grad, grad, h0, c0[0] if c0 else None, (summed, summed))


# By the mode of torch's recurrent layers.
WRITTEN = {
    mode: Way(lambda trace: None, partial(_back_as_one, mode)) for mode in ("LSTM", "GRU", "RNN_TANH", "RNN_RELU")
}
