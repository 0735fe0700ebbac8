"""Which kernel takes a recurrence back through time: compiled C, cuDNN, tensor operations, or one of a graph.

Traced step by step, a graph would have some operations for each time step, take minutes to compile and be slower than
the kernels that know recurrences. So in a graph the way back is a single operation, which isn't looked into.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ghostclip.native import time_loop
from ghostclip.native.custom_ops import custom_op, is_traced

from .gates import Trace
from .identity_input import IDENTITY, serves
from .through_time import LOOPS, GateGradients, Incoming, Way

__all__ = ["COMPILED", "TRACED", "way_of"]


def way_of(mode: str, trace: Trace) -> Way:
    """Compiled on the CPU, torch's fused kernel on cuDNN, where these can be had; else tensor operations."""
    if is_traced() and trace.weight_hr is None:
        return TRACED[mode]
    ways = COMPILED if available(trace) else IDENTITY if serves(trace) else LOOPS
    return ways[mode]


def available(trace: Trace) -> bool:
    """Whether the compiled way can be gone for this trace: numbers on the CPU, no projection, and compiled C."""
    return trace.weight_hr is None and time_loop.time_loop_is_there(trace.x)


def _weights(trace: Trace) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    return trace.weight_ih, trace.weight_hh, trace.bias_ih, trace.bias_hh


def _lstm_gates(trace: Trace) -> tuple[Tensor, Tensor]:
    assert trace.c0 is not None
    return time_loop.lstm_gates(trace.x, trace.states, trace.c0, _weights(trace))


def _lstm_back(kept: tuple[Tensor, Tensor], trace: Trace, incoming: Incoming) -> GateGradients:
    grad, summed, h0, c0 = time_loop.lstm_back(*kept, trace.weight_hh, incoming)
    return GateGradients(grad, grad, h0, c0, (summed, summed))


def _gru_back(gates: Tensor, trace: Trace, incoming: Incoming) -> GateGradients:
    into_input, into_hidden, *sums, h0 = time_loop.gru_back(gates, trace.states, trace.weight_hh, incoming)
    return GateGradients(into_input, into_hidden, h0, None, (sums[0], sums[1]))


def _rnn_back(relu: bool, kept: None, trace: Trace, incoming: Incoming) -> GateGradients:
    grad, summed, h0 = time_loop.rnn_back(trace.states, trace.weight_hh, incoming, relu)
    return GateGradients(grad, grad, h0, None, (summed, summed))


# By the mode of torch's recurrent layers. Of simple ones nothing is kept: the states say it all.
COMPILED = {
    "LSTM": Way(_lstm_gates, _lstm_back, lambda kept, trace: kept[1][-1, :, : trace.hidden]),
    "GRU": Way(lambda trace: time_loop.gru_gates(trace.x, trace.states, _weights(trace)), _gru_back),
    "RNN_TANH": Way(lambda trace: None, partial(_rnn_back, False)),
    "RNN_RELU": Way(lambda trace: None, partial(_rnn_back, True)),
}


def _shapes(
    mode: str, x: Tensor, states: Tensor, c0: Tensor | None, weights: list[Tensor], *incoming: object
) -> list[Tensor]:
    steps, batch, _ = x.shape
    count, width = 1 + (mode == "GRU"), weights[0].shape[0]
    gates = [x.new_empty(steps, batch, width) for _ in range(count)]
    sums = [x.new_empty(batch, width) for _ in range(count)]
    return [*gates, *sums, x.new_empty(states.shape[1:]), *([] if c0 is None else [torch.empty_like(c0)])]


@custom_op(
    "back_through_time(str mode, Tensor x, Tensor states, Tensor? c0, Tensor[] weights, Tensor? output, Tensor? h_n, "
    "Tensor? c_n) -> Tensor[]",
    _shapes,
)
def _back(
    mode: str, x: Tensor, states: Tensor, c0: Tensor | None, weights: list[Tensor], *incoming: Tensor | None
) -> list[Tensor]:
    """Gradients at the gates, dG and, of a GRU, also dG as W_hh sees it; the sums of each over time; at h0, at c0."""
    trace = Trace(x, states, c0, *weights, *[None] * (4 - len(weights)))
    way = way_of(mode, trace)
    found = way.back(way.keep(trace), trace, Incoming(*incoming))
    both = found.into_hidden is not found.into_input
    gates = [found.into_input, found.into_hidden] if both else [found.into_input]
    sums = [total.clone() for total in found.summed()[: len(gates)]]
    return [*gates, *sums, found.h0, *([] if found.c0 is None else [found.c0])]


def _back_as_one(mode: str, kept: None, trace: Trace, incoming: Incoming) -> GateGradients:
    weights = [weight for weight in _weights(trace) if weight is not None]
    found: list[Any] = _back(mode, trace.x, trace.states, trace.c0, weights, *incoming)
    if mode == "GRU":
        into_input, into_hidden, of_input, of_hidden, h0 = found
        return GateGradients(into_input, into_hidden, h0, None, (of_input, of_hidden))
    grad, summed, h0, *c0 = found
    return GateGradients(grad, grad, h0, c0[0] if c0 else None, (summed, summed))


TRACED = {mode: Way(lambda trace: None, partial(_back_as_one, mode)) for mode in COMPILED}
