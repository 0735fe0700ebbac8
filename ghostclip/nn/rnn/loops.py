"""The way back through time by tensor operations: from gradients at the hidden states to gradients at every gate.

torch's fused kernels keep their gate activations to themselves, so they are recomputed here from the input and the
hidden states, for all time steps at once (Lee & Kifer 2020, sections 5.3 and 5.4: z_t = V x_t + W h_{t-1} + b). From
them come factors: how the gradient at the hidden state h_t, or at the cell state c_t of an LSTM, reaches a gate's
pre-activation. That leaves for each step a product with W_hh and a few multiplications.
native/time_loop.py does the same in compiled code and identity_input.py by cuDNN; this is the way without either.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from .trace import GateGradients, Incoming, Trace, Way

__all__ = ["LOOPS"]


def _lstm_factors(trace: Trace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The factors of an LSTM, projected (Sak et al. 2014) or not.

    Returns:
        f [T, B, H]; what dc is multiplied with for the gates i, f, g, and dh for the gate o [T, B, 4, H]; what dh is to
        reach dc; h_t before a projection. With c_t = f c_{t-1} + i g and h_t = o tanh(c_t) these factors are g i(1-i),
        c_{t-1} f(1-f), i(1-g^2); tanh(c) o(1-o); o(1-tanh(c)^2).
    """
    z = F.linear(trace.x, trace.weight_ih, trace.bias)
    z.flatten(0, 1).addmm_(trace.states[:-1].flatten(0, 1), trace.weight_hh.mT)
    i, f, g, o = z.unflatten(2, (4, -1)).unbind(2)
    i, f, g, o = i.sigmoid_(), f.sigmoid(), g.tanh_(), o.sigmoid_()
    assert trace.c0 is not None
    cells, added = torch.cat((trace.c0.unsqueeze(0), f)), i * g
    for t, (kept, before, after) in enumerate(zip(f, cells, cells[1:], strict=False)):
        torch.addcmul(added[t], kept, before, out=after)
    squashed = cells[1:].tanh()
    made = o * squashed
    to_gates = torch.stack((added * (1 - i), cells[:-1] * f * (1 - f), i - added * g, made * (1 - o)), 2)
    to_cell = o - made * squashed
    if trace.padding is not None:
        # Through the steps after a sequence's end the gradient at its last cell state passes, and nothing else does.
        ended = trace.padding.unsqueeze(2)
        f.masked_fill_(ended, 1)
        to_cell.masked_fill_(ended, 0)
        to_gates.masked_fill_(ended.unsqueeze(3), 0)
    return f, to_gates, to_cell, made


def _lstm(trace: Trace, incoming: Incoming) -> GateGradients:
    """Gate gradients in the order i, f, g, o."""
    forget, to_gates, to_cell, made = _lstm_factors(trace)
    steps, batch, _, hidden = to_gates.shape
    grad = made.new_empty(steps, batch, 4 * hidden)
    through_c = grad.view(to_gates.shape)[:, :, :3].unbind(0)
    through_h = grad[..., 3 * hidden :].unbind(0)
    f, to_c, to_ifg, to_o = (p.unbind(0) for p in (forget, to_cell, to_gates[:, :, :3], to_gates[:, :, 3]))
    outside, at_gates = incoming.at_steps(trace.states[1:]), grad.unbind(0)
    # The gradient at every hidden state is kept where a projection made them, else only the present one.
    at_states = None if trace.weight_hr is None else torch.empty_like(trace.states[1:])
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
    projection = None if at_states is None else (at_states, made)
    return GateGradients(grad, grad, grad[0] @ trace.weight_hh, dc, None, projection)


def _gru(trace: Trace, incoming: Incoming) -> GateGradients:
    """Gate gradients in the order r, z, n.

    With n = tanh(a + r b), b = W_n h_{t-1} + b_n, and h_t = (1-z) n + z h_{t-1}: the input side of n gets
    q = (1-z)(1-n^2), its hidden side r q, the gate r b q r(1-r), the gate z (h_{t-1} - n) z(1-z).
    """
    before = trace.states[:-1]
    inputs = F.linear(trace.x, trace.weight_ih, trace.bias_ih).unflatten(2, (3, -1)).unbind(2)
    r, z, b = F.linear(before, trace.weight_hh, trace.bias_hh).unflatten(2, (3, -1)).unbind(2)
    r, z = r.add_(inputs[0]).sigmoid_(), (z + inputs[1]).sigmoid_()
    n = inputs[2].addcmul_(r, b).tanh_()
    to_input_n = torch.addcmul(n.new_ones(()), n, n, value=-1).mul_(1 - z)
    factors = z.new_empty(*z.shape[:2], 3, z.shape[2])
    to_r, to_z, to_hidden_n = factors.unbind(2)
    torch.mul(to_input_n, r, out=to_hidden_n)
    torch.mul(to_hidden_n, b, out=to_r).mul_(1 - r)
    torch.addcmul(z, z, z, value=-1, out=to_z).mul_(before - n)
    into_hidden, dh = torch.empty_like(factors), torch.empty_like(z)
    dh_thrice, at_h, kept = dh.unsqueeze(2).unbind(0), dh.unbind(0), torch.empty_like(dh[0])
    gates, at_gates = into_hidden.unbind(0), into_hidden.flatten(2).unbind(0)
    outside = incoming.at_steps(dh)
    at_h[-1].copy_(outside[-1])
    for t in range(len(gates) - 1, -1, -1):
        torch.mul(dh_thrice[t], factors[t], out=gates[t])
        if t:
            torch.addcmul(outside[t - 1], at_h[t], z[t], out=kept)
            torch.addmm(kept, at_gates[t], trace.weight_hh, out=at_h[t - 1])
    into_input = into_hidden.clone()
    torch.mul(dh, to_input_n, out=into_input[:, :, 2])
    h0 = torch.addmm(at_h[0] * z[0], at_gates[0], trace.weight_hh)
    return GateGradients(into_input.flatten(2), into_hidden.flatten(2), h0)


def _rnn(relu: bool, trace: Trace, incoming: Incoming) -> GateGradients:
    """Gradients at the pre-activations: with 1 - h_t^2, or 1 where h_t > 0."""
    after = trace.states[1:]
    factor = (after > 0).to(after.dtype) if relu else 1 - after * after
    grad = torch.empty_like(after)
    outside, at_z = incoming.at_steps(after), grad.unbind(0)
    at_z[-1].copy_(outside[-1])
    for t in range(len(at_z) - 1, -1, -1):
        at_z[t].mul_(factor[t])
        if t:
            torch.addmm(outside[t - 1], at_z[t], trace.weight_hh, out=at_z[t - 1])
    return GateGradients(grad, grad, grad[0] @ trace.weight_hh)


# By the mode of torch's recurrent layers.
LOOPS: dict[str, Way] = {"LSTM": _lstm, "GRU": _gru, "RNN_TANH": partial(_rnn, False), "RNN_RELU": partial(_rnn, True)}
