"""The way back through time by tensor operations: from gradients at the hidden states to gradients at every gate.

The factors of gates.py hold all that can be computed for all steps at once, so that a step is a product with W_hh and a
few multiplications into preallocated memory (Lee & Kifer 2020, section 5.3: each weight's gradient is made of dL/dz_t).
native/time_loop.py does the same in compiled code and identity_input.py by cuDNN; this is the way without either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .gates import LSTMFactors, Trace, gru_factors, lstm_factors, rnn_relu_factors, rnn_tanh_factors

__all__ = ["LOOPS", "GateGradients", "Incoming", "Way"]


class Incoming(NamedTuple):
    """Gradients of the losses at what a recurrence returned; None where nothing came.

    Attributes:
        output: [T, B, P].
        h_n: [B, P].
        c_n: [B, H].
    """

    output: Tensor | None
    h_n: Tensor | None
    c_n: Tensor | None

    def at_steps(self, like: Tensor) -> list[Tensor]:
        """What comes to h_t from outside, one [B, P] a step; ``like`` is some [T, B, P]."""
        if self.output is None:
            found = [like.new_zeros(()).expand(like.shape[1:])] * like.shape[0]
        else:
            found = list(self.output.unbind(0))
        if self.h_n is not None:
            found[-1] = found[-1] + self.h_n
        return found


class GateGradients(NamedTuple):
    """Gradients of the losses inside a recurrence.

    Attributes:
        into_input: [T, B, gates * H], at the pre-activations, as W_ih and b_ih see them.
        into_hidden: the same as W_hh and b_hh see them; another tensor for a GRU only.
        h0: [B, P], at the initial hidden state.
        c0: [B, H], at the initial cell state; None but for an LSTM.
        sums: the first two summed over time, [B, gates * H] each, where that came for nothing.
        projection: of a projected LSTM, the gradient at each hidden state [T, B, P] and what was projected [T, B, H].
    """

    into_input: Tensor
    into_hidden: Tensor
    h0: Tensor
    c0: Tensor | None
    sums: tuple[Tensor, Tensor] | None = None
    projection: tuple[Tensor, Tensor] | None = None

    def summed(self) -> tuple[Tensor, Tensor]:
        """`into_input` and `into_hidden` summed over time, [B, gates * H] each: the biases' gradients by example."""
        if self.sums is not None:
            return self.sums
        first = self.into_input.sum(0)
        return first, first if self.into_hidden is self.into_input else self.into_hidden.sum(0)


class Way(NamedTuple):
    """How one kind of layer goes back: what it keeps of a `Trace`, and from that and what comes in, gate gradients.

    An LSTM's last cell state [B, H] is found in what it keeps.
    """

    keep: Callable[[Trace], Any]
    back: Callable[[Any, Trace, Incoming], GateGradients]
    last_cell: Callable[[Any, Trace], Tensor] | None = None


def _lstm_back(factors: LSTMFactors, trace: Trace, incoming: Incoming) -> GateGradients:
    """Gate gradients, in the order i, f, g, o, from the factors of `lstm_factors`."""
    planes, unprojected = factors.planes, factors.unprojected
    _, steps, batch, hidden = planes.shape
    grad = planes.new_empty(steps, batch, 4 * hidden)
    through_c = grad.view(steps, batch, 4, hidden)[:, :, :3].unbind(0)
    through_h = grad[..., 3 * hidden :].unbind(0)
    f, to_o, to_c = (planes[plane].unbind(0) for plane in (0, 4, 5))
    to_ifg = planes[1:4].permute(1, 2, 0, 3).unbind(0)
    outside, at_gates = incoming.at_steps(trace.states[1:]), grad.unbind(0)
    # The gradient at every hidden state is kept where a projection made them, else only the present one.
    at_states = None if unprojected is None else torch.empty_like(trace.states[1:])
    dh = torch.empty_like(trace.states[0]) if at_states is None else at_states[-1]
    dh.copy_(outside[-1])
    above = dh if trace.weight_hr is None else torch.mm(dh, trace.weight_hr)
    dc = torch.zeros_like(above) if incoming.c_n is None else torch.empty_like(above).copy_(incoming.c_n)
    dc_thrice = dc.unsqueeze(1)
    for t in range(steps - 1, -1, -1):
        dc.addcmul_(above, to_c[t])
        torch.mul(dc_thrice, to_ifg[t], out=through_c[t])
        torch.mul(above, to_o[t], out=through_h[t])
        dc.mul_(f[t])
        if t:
            dh = dh if at_states is None else at_states[t - 1]
            torch.addmm(outside[t - 1], at_gates[t], trace.weight_hh, out=dh)
            if trace.weight_hr is not None:
                torch.mm(dh, trace.weight_hr, out=above)
    projection = None if at_states is None or unprojected is None else (at_states, unprojected)
    return GateGradients(grad, grad, grad[0] @ trace.weight_hh, dc, None, projection)


def _gru_back(factors: Tensor, trace: Trace, incoming: Incoming) -> GateGradients:
    """Gate gradients, in the order r, z, n, from the factors [5, T, B, H] of `gru_factors`."""
    _, steps, batch, hidden = factors.shape
    into_hidden = factors.new_empty(steps, batch, 3 * hidden)
    dh = torch.empty_like(factors[0])
    dh_thrice, at_h = dh.unsqueeze(2).unbind(0), dh.unbind(0)
    gates, at_gates = into_hidden.view(steps, batch, 3, hidden).unbind(0), into_hidden.unbind(0)
    to_gates, z = factors[:3].permute(1, 2, 0, 3).unbind(0), factors[4].unbind(0)
    outside = incoming.at_steps(dh)
    at_h[-1].copy_(outside[-1])
    kept = torch.empty_like(dh[0])
    for t in range(steps - 1, -1, -1):
        torch.mul(dh_thrice[t], to_gates[t], out=gates[t])
        if t:
            torch.addcmul(outside[t - 1], at_h[t], z[t], out=kept)
            torch.addmm(kept, at_gates[t], trace.weight_hh, out=at_h[t - 1])
    into_input = torch.empty_like(into_hidden)
    into_input[..., : 2 * hidden] = into_hidden[..., : 2 * hidden]
    torch.mul(dh, factors[3], out=into_input[..., 2 * hidden :])
    h0 = torch.addmm(at_h[0] * z[0], at_gates[0], trace.weight_hh)
    return GateGradients(into_input, into_hidden, h0, None)


def _rnn_back(factors: Tensor, trace: Trace, incoming: Incoming) -> GateGradients:
    """Gradients at the pre-activations from the factors [T, B, H] of `rnn_tanh_factors` or `rnn_relu_factors`."""
    grad = torch.empty_like(factors)
    outside, at_z, factor = incoming.at_steps(factors), grad.unbind(0), factors.unbind(0)
    at_z[-1].copy_(outside[-1])
    for t in range(len(at_z) - 1, -1, -1):
        at_z[t].mul_(factor[t])
        if t:
            torch.addmm(outside[t - 1], at_z[t], trace.weight_hh, out=at_z[t - 1])
    return GateGradients(grad, grad, grad[0] @ trace.weight_hh, None)


# By the mode of torch's recurrent layers.
LOOPS = {
    "LSTM": Way(lstm_factors, _lstm_back, lambda factors, trace: factors.last_cell),
    "GRU": Way(gru_factors, _gru_back),
    "RNN_TANH": Way(rnn_tanh_factors, _rnn_back),
    "RNN_RELU": Way(rnn_relu_factors, _rnn_back),
}
