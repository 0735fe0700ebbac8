"""Gates and the way back through time by compiled C, ``native/time_loop.c``, on the CPU.

The same results as gates.py and through_time.py, which do the work where there is no compiler. One call goes through
all time steps, a few examples after another, so that nothing but the inputs and the gate gradients crosses the memory
bus; examples are independent and are shared out among torch's threads. What is kept for a second pass is, for each step
and example, four gates and the cell state (five numbers a hidden unit where the factors of gates.py are six).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ghostclip.native import library
from ghostclip.native.calls import run, run_examples
from ghostclip.norms.term import is_traced

from .gates import Trace
from .through_time import GateGradients, Incoming, Way

__all__ = ["COMPILED", "Gates", "available"]

# The most examples that C takes together.
ROWS = 8


class Gates(NamedTuple):
    """What is kept of a way forward: gates [T, B, 4, padded H] and, of an LSTM, cell states [T + 1, B, padded H]."""

    gates: Tensor
    cells: Tensor | None


def available(trace: Trace) -> bool:
    """Whether the compiled way can be gone for this trace: numbers on the CPU, no projection, and compiled C."""
    plain = trace.x.device.type == "cpu" and trace.weight_hr is None
    return plain and not is_traced() and library("time_loop") is not None


def _dense(tensor: Tensor | None) -> Tensor | None:
    """The tensor in memory of its own order, without a pending negation."""
    return None if tensor is None else tensor.resolve_neg().contiguous()


def _padded(like: Tensor, hidden: int) -> int:
    return run("time_loop", "padded", like.dtype, (hidden,))


def _packed_for_gates(weight: Tensor, gates: int, padded: int) -> Tensor:
    """[gates * H, d] for products with inputs or hidden states."""
    hidden, inner = weight.shape[0] // gates, weight.shape[1]
    panels = weight.new_empty(inner * gates * padded)
    run("time_loop", "pack_gates", weight.dtype, (_dense(weight), panels, gates, hidden, inner))
    return panels


def _packed_for_back(weight: Tensor, padded: int) -> Tensor:
    """[gates * H, H] for products with gate gradients."""
    panels = weight.new_empty(weight.shape[0] * padded)
    run("time_loop", "pack", weight.dtype, (_dense(weight), panels, *weight.shape))
    return panels


def _padded_bias(bias: Tensor | None, gates: int, padded: int) -> Tensor | None:
    if bias is None:
        return None
    found = bias.new_zeros(gates, padded)
    found[:, : bias.shape[0] // gates] = bias.view(gates, -1)
    return found


def _sizes(trace: Trace) -> tuple[int, int, int, int]:
    """(T, B, I, H)."""
    return (*trace.x.shape, trace.weight_hh.shape[1])


def _forward_work(trace: Trace) -> int:
    steps, batch, inputs, hidden = _sizes(trace)
    return steps * batch * trace.weight_hh.shape[0] * (inputs + hidden)


def _back_work(trace: Trace) -> int:
    steps, batch, _, _ = _sizes(trace)
    return steps * batch * trace.weight_hh.numel()


def _for_examples(name: str, trace: Trace, work: int, arguments: tuple[Any, ...]) -> None:
    run_examples("time_loop", name, trace.x.dtype, trace.x.shape[1], work, arguments, ROWS)


def _lstm_keep(trace: Trace) -> Gates:
    steps, batch, _, hidden = sizes = _sizes(trace)
    padded = _padded(trace.x, hidden)
    gates, cells = trace.x.new_empty(steps, batch, 4, padded), trace.x.new_empty(steps + 1, batch, padded)
    assert trace.c0 is not None
    cells[0, :, :hidden] = trace.c0
    cells[0, :, hidden:] = 0
    bias = None if trace.bias_ih is None or trace.bias_hh is None else trace.bias_ih + trace.bias_hh
    weights = (_packed_for_gates(weight, 4, padded) for weight in (trace.weight_ih, trace.weight_hh))
    x, states = _dense(trace.x), _dense(trace.states)
    arguments = (x, states, *weights, _padded_bias(bias, 4, padded), gates, cells, *sizes)
    _for_examples("lstm_gates", trace, _forward_work(trace), arguments)
    return Gates(gates, cells)


def _last_cell(kept: Gates, trace: Trace) -> Tensor:
    assert kept.cells is not None
    return kept.cells[-1, :, : trace.hidden]


def _gru_keep(trace: Trace) -> Gates:
    steps, batch, _, hidden = sizes = _sizes(trace)
    padded = _padded(trace.x, hidden)
    gates = trace.x.new_empty(steps, batch, 4, padded)
    weights = (_packed_for_gates(weight, 3, padded) for weight in (trace.weight_ih, trace.weight_hh))
    biases = (_padded_bias(bias, 3, padded) for bias in (trace.bias_ih, trace.bias_hh))
    x, states = _dense(trace.x), _dense(trace.states)
    _for_examples("gru_gates", trace, _forward_work(trace), (x, states, *weights, *biases, gates, *sizes))
    return Gates(gates, None)


def _rnn_keep(trace: Trace) -> Gates | None:
    """Nothing: the states say it all."""
    return None


class _Came(NamedTuple):
    """`Incoming` as C takes it: output (dense along H) with its strides over time and examples, dense h_n and c_n."""

    output: Tensor | None
    strides: tuple[int, int]
    h_n: Tensor | None
    c_n: Tensor | None


def _came(incoming: Incoming) -> _Came:
    output = None if incoming.output is None else incoming.output.resolve_neg()
    if output is not None and output.stride(2) != 1:
        output = output.contiguous()
    strides = (0, 0) if output is None else (output.stride(0), output.stride(1))
    return _Came(output, strides, _dense(incoming.h_n), _dense(incoming.c_n))


def _lstm_back(kept: Gates, trace: Trace, incoming: Incoming) -> GateGradients:
    steps, batch, _, hidden = _sizes(trace)
    x, came = trace.x, _came(incoming)
    grad, summed = x.new_empty(steps, batch, 4 * hidden), x.new_empty(batch, 4 * hidden)
    h0, c0 = x.new_empty(batch, hidden), x.new_empty(batch, hidden)
    panels = _packed_for_back(trace.weight_hh, kept.gates.shape[3])
    arguments = (kept.gates, kept.cells, panels, came.output, *came.strides, came.h_n, came.c_n, grad, summed, h0, c0)
    _for_examples("lstm_back", trace, _back_work(trace), (*arguments, steps, batch, hidden))
    return GateGradients(grad, grad, h0, c0, (summed, summed))


def _gru_back(kept: Gates, trace: Trace, incoming: Incoming) -> GateGradients:
    steps, batch, _, hidden = _sizes(trace)
    x, came = trace.x, _came(incoming)
    into_input, into_hidden = (x.new_empty(steps, batch, 3 * hidden) for _ in range(2))
    summed, h0 = x.new_empty(batch, 4 * hidden), x.new_empty(batch, hidden)
    panels = _packed_for_back(trace.weight_hh, kept.gates.shape[3])
    arguments = (kept.gates, _dense(trace.states), panels, came.output, *came.strides, came.h_n)
    results = (into_input, into_hidden, summed, h0)
    _for_examples("gru_back", trace, _back_work(trace), (*arguments, *results, steps, batch, hidden))
    r_z, _, n_hidden = summed.split((2 * hidden, hidden, hidden), dim=1)
    sums = summed[:, : 3 * hidden], torch.cat((r_z, n_hidden), dim=1)
    return GateGradients(into_input, into_hidden, h0, None, sums)


def _rnn_back(relu: bool, kept: None, trace: Trace, incoming: Incoming) -> GateGradients:
    steps, batch, _, hidden = _sizes(trace)
    x, came = trace.x, _came(incoming)
    grad, summed, h0 = x.new_empty(steps, batch, hidden), x.new_empty(batch, hidden), x.new_empty(batch, hidden)
    panels = _packed_for_back(trace.weight_hh, _padded(x, hidden))
    after = _dense(trace.states[1:])
    arguments = (after, panels, came.output, *came.strides, came.h_n, grad, summed, h0, int(relu))
    _for_examples("rnn_back", trace, _back_work(trace), (*arguments, steps, batch, hidden))
    return GateGradients(grad, grad, h0, None, (summed, summed))


# By the mode of torch's recurrent layers.
COMPILED = {
    "LSTM": Way(_lstm_keep, _lstm_back, _last_cell),
    "GRU": Way(_gru_keep, _gru_back),
    "RNN_TANH": Way(_rnn_keep, partial(_rnn_back, False)),
    "RNN_RELU": Way(_rnn_keep, partial(_rnn_back, True)),
}
