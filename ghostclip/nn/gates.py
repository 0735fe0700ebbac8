"""The gates of recurrent layers once more, and from them the factors that the way back through time multiplies with.

torch's fused kernels keep their gate activations to themselves, so they are recomputed here, many time steps at once,
from the input and the sequence of hidden states (Lee & Kifer 2020, sections 5.3 and 5.4: z_t = V x_t + W h_{t-1} + b).
A factor says how the gradient at the hidden state h_t (or the cell state c_t of an LSTM) reaches a gate's
pre-activation. Each is a plane [T, B, H] of its own; the work is done over spans of time steps that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["LSTMFactors", "Trace", "gru_factors", "lstm_factors", "rnn_relu_factors", "rnn_tanh_factors"]

# Time steps are taken together while their gates need about this many bytes.
SPAN_BYTES = 1 << 20


@dataclass(frozen=True)
class Trace:
    """What one direction of one recurrent layer saw, in float32 or wider.

    Attributes:
        x: [T, B, I], contiguous.
        states: [T + 1, B, P], the initial hidden state and the one after each step; P is H but for projections.
        c0: [B, H], the initial cell state of an LSTM.
        weight_ih, weight_hh: [gates * H, I] and [gates * H, P].
        bias_ih, bias_hh: [gates * H], or None.
        weight_hr: [P, H], what an LSTM projects its hidden states with, or None.
    """

    x: Tensor
    states: Tensor
    c0: Tensor | None
    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    weight_hr: Tensor | None = None

    @property
    def hidden(self) -> int:
        """H."""
        return (self.weight_hh if self.weight_hr is None else self.weight_hr).shape[1]

    def span(self) -> int:
        """How many time steps to take together, at least one."""
        bytes_per_step = self.x.shape[1] * self.weight_hh.shape[0] * self.x.element_size()
        return max(1, min(self.x.shape[0], SPAN_BYTES // max(1, bytes_per_step)))

    def spans(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of consecutive spans of time steps."""
        step = self.span()
        for start in range(0, self.x.shape[0], step):
            yield start, min(start + step, self.x.shape[0])

    def workspace(self, width: int) -> Tensor:
        """An uninitialised [span, B, width]."""
        return self.x.new_empty(self.span(), self.x.shape[1], width)


def _affine(inputs: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``inputs`` [n, B, d] times ``weight`` [p, d] transposed, plus ``bias``, into ``out`` [n, B, p]."""
    if bias is None:
        torch.mm(inputs.flatten(0, 1), weight.mT, out=out.flatten(0, 1))
    else:
        torch.addmm(bias, inputs.flatten(0, 1), weight.mT, out=out.flatten(0, 1))


class LSTMFactors(NamedTuple):
    """What an LSTM keeps for its way back.

    Attributes:
        planes: [6, T, B, H]: f; what dc is multiplied with for the gates i, f, g; what dh is for the gate o, and to
            reach dc. With c_t = f c_{t-1} + i g and h_t = o tanh(c_t) these are g i(1-i), c_{t-1} f(1-f), i(1-g^2);
            tanh(c) o(1-o), o(1-tanh(c)^2).
        last_cell: [B, H], c_T.
        unprojected: [T, B, H], o tanh(c_t), where a projection follows; else None.
    """

    planes: Tensor
    last_cell: Tensor
    unprojected: Tensor | None


def lstm_factors(trace: Trace) -> LSTMFactors:
    """The factors of an LSTM, projected (Sak et al. 2014) or not."""
    steps, batch, _ = trace.x.shape
    hidden = trace.hidden
    unprojected = None if trace.weight_hr is None else trace.x.new_empty(steps, batch, hidden)
    planes = trace.x.new_empty(6, steps, batch, hidden)
    gates, product, squashed = trace.workspace(4 * hidden), trace.workspace(hidden), trace.workspace(hidden)
    cells = trace.x.new_empty(trace.span() + 1, batch, hidden)
    assert trace.c0 is not None
    cells[0] = trace.c0
    bias = None if trace.bias_ih is None or trace.bias_hh is None else trace.bias_ih + trace.bias_hh
    for start, stop in trace.spans():
        count = stop - start
        z = gates[:count]
        _affine(trace.x[start:stop], trace.weight_ih, bias, z)
        z.flatten(0, 1).addmm_(trace.states[start:stop].flatten(0, 1), trace.weight_hh.mT)
        made = product[:count] if unprojected is None else unprojected[start:stop]
        _lstm_span(z, cells[: count + 1], product[:count], squashed[:count], made, planes[:, start:stop])
        cells[0] = cells[count]
    return LSTMFactors(planes, cells[0], unprojected)


def _lstm_span(gates: Tensor, cells: Tensor, product: Tensor, squashed: Tensor, made: Tensor, planes: Tensor) -> None:
    """Fills ``planes`` [6, n, B, H], the cell states after ``cells[0]`` and what these make, from gates [n, B, 4H]."""
    i, f_raw, g, o = gates.unflatten(2, (4, -1)).unbind(2)
    f, to_i, to_f, to_g, to_o, to_c = planes.unbind(0)
    i.sigmoid_()
    torch.sigmoid(f_raw, out=f)
    g.tanh_()
    o.sigmoid_()
    torch.mul(i, g, out=product)
    for added, kept, before, after in zip(product, f, cells, cells[1:], strict=False):
        torch.addcmul(added, kept, before, out=after)
    torch.addcmul(product, product, i, value=-1, out=to_i)
    torch.addcmul(i, product, g, value=-1, out=to_g)
    torch.mul(cells[:-1], f, out=product)
    torch.addcmul(product, product, f, value=-1, out=to_f)
    torch.tanh(cells[1:], out=squashed)
    torch.mul(squashed, o, out=made)
    torch.addcmul(made, made, o, value=-1, out=to_o)
    torch.addcmul(o, made, squashed, value=-1, out=to_c)


def gru_factors(trace: Trace) -> Tensor:
    """[5, T, B, H]: what dh is multiplied with for r, z, the hidden side of n, the input side of n; and z itself.

    With n = tanh(a + r b), b = W_n h_{t-1} + b_n, and h_t = (1-z) n + z h_{t-1}: the input side of n gets
    q = (1-z)(1-n^2), its hidden side r q, the gate r b q r(1-r), the gate z (h_{t-1} - n) z(1-z).
    """
    steps, batch, _ = trace.x.shape
    hidden = trace.weight_hh.shape[1]
    planes = trace.x.new_empty(5, steps, batch, hidden)
    from_input, from_hidden = trace.workspace(3 * hidden), trace.workspace(3 * hidden)
    for start, stop in trace.spans():
        a, b = from_input[: stop - start], from_hidden[: stop - start]
        _affine(trace.x[start:stop], trace.weight_ih, trace.bias_ih, a)
        _affine(trace.states[start:stop], trace.weight_hh, trace.bias_hh, b)
        _gru_span(a, b, trace.states[start:stop], planes[:, start:stop])
    return planes


def _gru_span(from_input: Tensor, from_hidden: Tensor, before: Tensor, planes: Tensor) -> None:
    """Fills ``planes`` [5, n, B, H] from the two sides' pre-activations [n, B, 3H], which are overwritten."""
    hidden = before.shape[2]
    to_r, to_z, to_hidden_n, to_input_n, z_kept = planes.unbind(0)
    sides = from_input[..., : 2 * hidden]
    sides += from_hidden[..., : 2 * hidden]
    sides.sigmoid_()
    r, z, n = from_input.unflatten(2, (3, -1)).unbind(2)
    b = from_hidden[..., 2 * hidden :]
    n.addcmul_(r, b).tanh_()
    z_kept.copy_(z)
    torch.addcmul(z, z, z, value=-1, out=to_z)
    to_z.mul_(torch.sub(before, n, out=from_hidden[..., :hidden]))
    torch.mul(n, n, out=to_input_n).sub_(1)
    to_input_n.mul_(z.sub_(1))
    torch.mul(to_input_n, r, out=to_hidden_n)
    torch.mul(to_hidden_n, b, out=to_r)
    to_r.addcmul_(to_r, r, value=-1)


def rnn_tanh_factors(trace: Trace) -> Tensor:
    """[T, B, H]: 1 - h_t^2."""
    after = trace.states[1:]
    return torch.mul(after, after).neg_().add_(1)


def rnn_relu_factors(trace: Trace) -> Tensor:
    """[T, B, H]: 1 where h_t > 0, else 0."""
    return (trace.states[1:] > 0).to(trace.states.dtype)
