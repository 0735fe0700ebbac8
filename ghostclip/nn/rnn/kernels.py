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

from .identity_input import identity_gradients, serves
from .loops import LOOPS
from .trace import GateGradients, Incoming, Trace, Way

__all__ = ["COMPILED", "back_through_time", "has_compiled_loop"]


def back_through_time(mode: str, trace: Trace, incoming: Incoming) -> GateGradients:
    """Compiled on the CPU, torch's fused kernel on cuDNN, where these can be had; else tensor operations."""
    with torch.autocast(trace.x.device.type, enabled=False):
        if is_traced() and trace.weight_hr is None and trace.padding is None:
            return _as_one_operation(mode, trace, incoming)
        if has_compiled_loop(trace):
            return COMPILED[mode](trace, incoming)
        if serves(trace, incoming):
            return identity_gradients(mode, trace, incoming)
        return LOOPS[mode](trace, incoming)


def has_compiled_loop(trace: Trace) -> bool:
    """Whether compiled C takes this trace: numbers on the CPU, no projection."""
    return trace.weight_hr is None and time_loop.time_loop_is_there(trace.x)


def _weights(trace: Trace) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    return trace.weight_ih, trace.weight_hh, trace.bias_ih, trace.bias_hh


def _lstm(trace: Trace, incoming: Incoming) -> GateGradients:
    assert trace.c0 is not None
    gates, cells = time_loop.lstm_gates(trace.x, trace.states, trace.c0, _weights(trace))
    if trace.padding is not None:
        # Through the steps after a sequence's end the gradient at its last cell state passes, and nothing else does.
        gates[trace.padding] = gates.new_tensor([[0], [1], [0], [0]])
    grad, summed, h0, c0 = time_loop.lstm_back(gates, cells, trace.weight_hh, incoming)
    return GateGradients(grad, grad, h0, c0, (summed, summed))


def _gru(trace: Trace, incoming: Incoming) -> GateGradients:
    gates = time_loop.gru_gates(trace.x, trace.states, _weights(trace))
    into_input, into_hidden, *sums, h0 = time_loop.gru_back(gates, trace.states, trace.weight_hh, incoming)
    return GateGradients(into_input, into_hidden, h0, None, (sums[0], sums[1]))


def _rnn(relu: bool, trace: Trace, incoming: Incoming) -> GateGradients:
    grad, summed, h0 = time_loop.rnn_back(trace.states, trace.weight_hh, incoming, relu)
    return GateGradients(grad, grad, h0, None, (summed, summed))


# By the mode of torch's recurrent layers.
COMPILED: dict[str, Way] = {
    "LSTM": _lstm,
    "GRU": _gru,
    "RNN_TANH": partial(_rnn, False),
    "RNN_RELU": partial(_rnn, True),
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
def _operation(
    mode: str, x: Tensor, states: Tensor, c0: Tensor | None, weights: list[Tensor], *incoming: Tensor | None
) -> list[Tensor]:
    """Gradients at the gates, dG and, of a GRU, also dG as W_hh sees it; the sums of each over time; at h0, at c0."""
    trace = Trace(x, states, c0, *weights, *[None] * (4 - len(weights)))
    found = back_through_time(mode, trace, Incoming(*incoming))
    both = found.into_hidden is not found.into_input
    gates = [found.into_input, found.into_hidden] if both else [found.into_input]
    sums = [total.clone() for total in found.summed()[: len(gates)]]
    return [*gates, *sums, found.h0, *([] if found.c0 is None else [found.c0])]


def _as_one_operation(mode: str, trace: Trace, incoming: Incoming) -> GateGradients:
    weights = [weight for weight in _weights(trace) if weight is not None]
    found: list[Any] = _operation(mode, trace.x, trace.states, trace.c0, weights, *incoming)
    count = 1 + (mode == "GRU")
    gates, sums, (h0, *c0) = found[:count], found[count : 2 * count], found[2 * count :]
    return GateGradients(gates[0], gates[-1], h0, c0[0] if c0 else None, (sums[0], sums[-1]))
