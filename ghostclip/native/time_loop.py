"""Gates and the way back through time by compiled C, time_loop.c, on the CPU.

One call goes through all time steps, a few examples after another, so that nothing but the inputs and the gate
gradients crosses the memory bus; examples are independent and are shared out among torch's threads. What is kept for a
second pass is, for each step and example, four gates and the cell state.

Arguments are those of a recurrence without projection: inputs x [T, B, I], states [T + 1, B, H] from the initial one
on, c0 [B, H], weights (W_ih [gates * H, I], W_hh [gates * H, H], b_ih, b_hh) with None for absent biases, and what came
in: gradients at the output [T, B, H] and at the last h and c [B, H], None where there is none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ghostclip.native.build import library
from ghostclip.native.calls import run, run_examples

__all__ = ["gru_back", "gru_gates", "lstm_back", "lstm_gates", "rnn_back", "time_loop_is_there"]

# The most examples that C takes together.
ROWS = 8

Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
Incoming = tuple[Tensor | None, Tensor | None, Tensor | None]


def time_loop_is_there(like: Tensor) -> bool:
    """Whether the functions below can be used for tensors of that kind."""
    return like.device.type == "cpu" and library("time_loop") is not None


def lstm_gates(x: Tensor, states: Tensor, c0: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """Gates [T, B, 4, padded H] and cell states [T + 1, B, padded H] of an LSTM."""
    (steps, batch, _), hidden = x.shape, c0.shape[1]
    w_ih, w_hh, b_ih, b_hh = weights
    padded = _padded(x, hidden)
    gates, cells = x.new_empty(steps, batch, 4, padded), x.new_empty(steps + 1, batch, padded)
    cells[0, :, :hidden] = c0
    cells[0, :, hidden:] = 0
    bias = _padded_bias(None if b_ih is None or b_hh is None else b_ih + b_hh, 4, padded)
    panels = (_packed_for_gates(weight, 4, padded) for weight in (w_ih, w_hh))
    _forward("lstm_gates", x, w_hh, (_dense(x), _dense(states), *panels, bias, gates, cells))
    return gates, cells


def gru_gates(x: Tensor, states: Tensor, weights: Weights) -> Tensor:
    """Gates [T, B, 4, padded H] of a GRU."""
    padded = _padded(x, weights[1].shape[1])
    gates = x.new_empty(*x.shape[:2], 4, padded)
    panels = (_packed_for_gates(weight, 3, padded) for weight in weights[:2])
    biases = (_padded_bias(bias, 3, padded) for bias in weights[2:])
    _forward("gru_gates", x, weights[1], (_dense(x), _dense(states), *panels, *biases, gates))
    return gates


def lstm_back(
    gates: Tensor, cells: Tensor, weight_hh: Tensor, incoming: Incoming
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gate gradients [T, B, 4 H], the same summed over time, and gradients at h0 and c0."""
    steps, batch, hidden = *gates.shape[:2], weight_hh.shape[1]
    grad, summed = gates.new_empty(steps, batch, 4 * hidden), gates.new_empty(batch, 4 * hidden)
    h0, c0 = gates.new_empty(batch, hidden), gates.new_empty(batch, hidden)
    came, panels = (*_came(incoming), _dense(incoming[2])), _packed_for_back(weight_hh, gates.shape[3])
    _back("lstm_back", grad, weight_hh, (gates, cells, panels, *came, grad, summed, h0, c0))
    return grad, summed, h0, c0


def gru_back(
    gates: Tensor, states: Tensor, weight_hh: Tensor, incoming: Incoming
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gate gradients as W_ih and as W_hh see them, [T, B, 3 H]; both summed over time; and the gradient at h0."""
    steps, batch, hidden = *gates.shape[:2], weight_hh.shape[1]
    into_input, into_hidden = (gates.new_empty(steps, batch, 3 * hidden) for _ in range(2))
    summed, h0 = gates.new_empty(batch, 4 * hidden), gates.new_empty(batch, hidden)
    arguments = (gates, _dense(states), _packed_for_back(weight_hh, gates.shape[3]), *_came(incoming))
    _back("gru_back", into_input, weight_hh, (*arguments, into_input, into_hidden, summed, h0))
    r_z, _, n_hidden = summed.split((2 * hidden, hidden, hidden), dim=1)
    return into_input, into_hidden, summed[:, : 3 * hidden], torch.cat((r_z, n_hidden), dim=1), h0


def rnn_back(states: Tensor, weight_hh: Tensor, incoming: Incoming, relu: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients at the pre-activations [T, B, H], the same summed over time, and the gradient at h0."""
    after = _dense(states[1:])
    assert after is not None
    grad, summed, h0 = (after.new_empty(shape) for shape in (after.shape, after.shape[1:], after.shape[1:]))
    panels = _packed_for_back(weight_hh, _padded(after, after.shape[2]))
    _back("rnn_back", grad, weight_hh, (after, panels, *_came(incoming), grad, summed, h0, int(relu)))
    return grad, summed, h0


def _forward(name: str, x: Tensor, weight_hh: Tensor, arguments: tuple[Any, ...]) -> None:
    (steps, batch, inputs), (width, hidden) = x.shape, weight_hh.shape
    work = steps * batch * width * (inputs + hidden)
    run_examples("time_loop", name, x.dtype, batch, work, (*arguments, steps, batch, inputs, hidden), ROWS)


def _back(name: str, grad: Tensor, weight_hh: Tensor, arguments: tuple[Any, ...]) -> None:
    steps, batch, _ = grad.shape
    work = steps * batch * weight_hh.numel()
    run_examples("time_loop", name, grad.dtype, batch, work, (*arguments, steps, batch, weight_hh.shape[1]), ROWS)


def _came(incoming: Incoming) -> tuple[Any, ...]:
    """Gradients at the output, dense along H, with its strides over time and examples, and at the last h, dense."""
    output = None if incoming[0] is None else incoming[0].resolve_neg()
    if output is not None and output.stride(2) != 1:
        output = output.contiguous()
    strides = (0, 0) if output is None else (output.stride(0), output.stride(1))
    return (output, *strides, _dense(incoming[1]))


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
