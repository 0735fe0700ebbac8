"""Traces of recurrent layers as their backward through time takes them."""

import torch

from ghostclip.nn.rnn import fused
from ghostclip.nn.rnn.trace import Incoming, Trace

GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}


def trace_of(mode, steps, batch, inputs, hidden, dtype=torch.float64, bias=True, scale=1.0):
    def numbers(*shape):
        return scale * torch.randn(*shape, dtype=dtype)

    width = GATES[mode] * hidden
    biases = (numbers(width), numbers(width)) if bias else (None, None)
    c0 = numbers(batch, hidden) if mode == "LSTM" else None
    x, states = numbers(steps, batch, inputs), numbers(steps + 1, batch, hidden).tanh()
    return Trace(x, states, c0, numbers(width, inputs), 0.3 * numbers(width, hidden), *biases)


def incoming_for(trace, mode, parts=("output", "h_n", "c_n")):
    steps, batch, hidden = trace.x.shape[0], trace.x.shape[1], trace.weight_hh.shape[1]
    output = torch.randn(batch, steps, hidden, dtype=trace.x.dtype).transpose(0, 1)
    last = [torch.randn(batch, hidden, dtype=trace.x.dtype) for _ in range(2)]
    return Incoming(
        output if "output" in parts else None,
        last[0] if "h_n" in parts else None,
        last[1] if "c_n" in parts and mode == "LSTM" else None,
    )


def lived_through(mode, bias=True, dtype=torch.float64):
    """A trace whose states are those of its weights, [T 7, B 5], 3 to 6."""
    trace = trace_of(mode, 7, 5, 3, 6, dtype, bias)
    weights = [w for w in (trace.weight_ih, trace.weight_hh, trace.bias_ih, trace.bias_hh) if w is not None]
    initial = (trace.states[:1], *([] if trace.c0 is None else [trace.c0.unsqueeze(0)]))
    output, *_ = fused.native(mode, trace.x, initial, weights, bias, True)
    states = torch.cat([trace.states[:1], output])
    return Trace(trace.x, states, trace.c0, trace.weight_ih, trace.weight_hh, trace.bias_ih, trace.bias_hh)
