"""One direction of one recurrent layer as a node of the graph: torch's fused kernel forwards, an own way back.

torch's own backward can't stop at the gates, so `Recurrence` goes back instead: it recomputes the gates and goes back
through time (kernels.py). The node is its own capture: in a first pass it tells the sink the gate gradients and forms
no weight gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ghostclip.native.custom_ops import is_traced
from ghostclip.nn.base import NOTHING, LayerCall, has_saved_tensor_hooks
from ghostclip.norms.term import may_sync, to_float32

from .differentiable import recorded_gradients
from .fused import native
from .kernels import back_through_time
from .trace import GateGradients, Incoming, Order, Trace

__all__ = ["Recurrence"]

# The inputs' gradient is kept for a second pass if the gates' have so many times its numbers.
SMALL = 2


@dataclass
class Found:
    """What a way back through time was made of and found: all that gradients of weights and inputs need.

    Attributes:
        x, before: what the weights were multiplied with, [T, B, I] and [T, B, P].
        gates: the gate gradients.
        weight_ih: [gates * H, I].
        into_x: the gradient at x, in x's layout, where it was kept.
    """

    x: Tensor
    before: Tensor
    gates: GateGradients
    weight_ih: Tensor
    into_x: Tensor | None = None

    def into_weights(self, needed: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        """Gradients of W_ih, W_hh, b_ih, b_hh and W_hr where needed, by one product over all time steps each."""
        gates = self.gates
        return (
            _product(gates.into_input, self.x) if needed[0] else None,
            _product(gates.into_hidden, self.before) if needed[1] else None,
            gates.summed()[0].sum(0) if needed[2] else None,
            gates.summed()[1].sum(0) if needed[3] else None,
            _product(*gates.projection) if needed[4] and gates.projection else None,
        )

    def into_inputs(self, needed: tuple[bool, ...], order: Order | None) -> tuple[Tensor | None, ...]:
        """Gradients of x, h0 and c0 where needed. That of x is kept if it is small beside those of the gates."""
        gates, x = self.gates, self.into_x
        if needed[0] and x is None:
            x = _input_grad(gates.into_input if order is None else order.packed(gates.into_input), self.weight_ih)
            self.into_x = x if SMALL * x.numel() <= gates.into_input.numel() else None
        h0 = gates.h0.unsqueeze(0) if needed[1] else None
        return x if needed[0] else None, h0, gates.c0.unsqueeze(0) if needed[2] and gates.c0 is not None else None

    def for_rule(self, call: LayerCall) -> tuple[Tensor, ...]:
        """What the rule needs beside dG: x, h_{t-1}, dG for W_hh; both dG summed over time; and both sides of W_hr."""
        sums = self.gates.summed() if any(name.startswith("bias") for name in call.parameters) else ()
        return (self.x, self.before, self.gates.into_hidden, *sums, *(self.gates.projection or ()))


class Recurrence(torch.autograd.Function):
    """A direction's forward, done; its backward goes back through time, and tells the sink or forms all gradients.

    Arguments of `apply`:
        call: this use of the layer, or None where a first pass has no business with it.
        mode: of torch's recurrent layers.
        results: output [T, B, P] and last states [1, B, ...]; for packed sequences the output is rows [N, P].
        order: of the rows of packed sequences, else None.
        tensors: W_ih, W_hh, b_ih, b_hh, W_hr; x [T, B, I] or [N, I]; h0 [1, B, P], and c0 [1, B, H] of an LSTM; the
            probe. None for what there isn't.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: LayerCall | None,
        mode: str,
        results: tuple[Tensor, ...],
        order: Order | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        *weights, x, h0, c0, _ = tensors
        assert x is not None
        assert h0 is not None
        # The states are saved without their copy that the model gets: an output may be changed in place, as it may
        # behind torch's own GRU and RNN.
        states = torch.cat((h0, results[0])) if order is None else results[0].clone()
        ctx.save_for_backward(x, states, h0, c0, *weights)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.mode, ctx.order, ctx.output, ctx.last = call, mode, order, None, None
        repeatable = not (is_traced() or torch.is_autocast_enabled(x.device.type))
        if order is None and repeatable and not has_saved_tensor_hooks():
            # One memory for both; whether the output was changed, its version tells. What was computed in other types
            # than it came in could not be had again.
            results = (states[1:].data, *results[1:])
            ctx.output = results[0].detach()
        return results

    @staticmethod
    def backward(ctx: Any, *came: Tensor | None) -> tuple:
        call, needed = ctx.call, ctx.needs_input_grad
        if torch.is_grad_enabled():  # create_graph=True: a loss will contain these gradients
            return (*(None,) * 4, *_recorded(ctx, came), None)
        sink = None if call is None else call.sink
        stays = torch._C._autograd._get_current_graph_task_keep_graph()
        if sink is NOTHING:
            ctx.output = None
            return (None,) * len(needed)
        # The second backward of a step mostly starts where the first did: a fifth of the time of an LSTM's step. It is
        # compared where the host may wait for that.
        again = ctx.last is not None and _are_equal(came, *ctx.last[:2])
        found = ctx.last[2] if again else _back(ctx, came)
        held = stays and sink is not None and may_sync(found.x.device)
        ctx.last = (came, _versions(came), found) if held else None
        if not stays:
            ctx.output = None
        inputs = (None,) * 3 if call is not None and call.ends else found.into_inputs(needed[9:12], ctx.order)
        if sink is None:
            weights = found.into_weights(needed[4:9])
        else:
            weights = (None,) * 5
            sink(call, found.for_rule(call), found.gates.into_input)
        return (*(None,) * 4, *weights, *inputs, None)


def _versions(tensors: tuple[Tensor | None, ...]) -> list[int]:
    return [0 if tensor is None else tensor._version for tensor in tensors]


def _are_equal(came: tuple[Tensor | None, ...], before: tuple[Tensor | None, ...], versions: list[int]) -> bool:
    """Whether the gradients of the outputs are those of an earlier backward, which nobody has changed since."""
    if _versions(before) != versions:
        return False
    pairs = zip(came, before, strict=True)
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def _recorded(ctx: Any, came: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Gradients of W_ih, W_hh, b_ih, b_hh, W_hr, x, h0 and c0 that can be differentiated again."""
    x, _, h0, c0, *weights = ctx.saved_tensors
    came = came if len(came) == 3 else (*came, None)
    with torch.autocast(x.device.type, enabled=False):
        return recorded_gradients(ctx.mode, ctx.order, (*weights, x, h0, c0), came, ctx.needs_input_grad[4:12])


def _back(ctx: Any, came: tuple[Tensor | None, ...]) -> Found:
    """Through time, in float32 or wider."""
    order: Order | None = ctx.order
    saved = list(ctx.saved_tensors)
    if ctx.output is not None and ctx.output._version:
        saved[1] = _states_again(ctx.mode, *saved)
    wide: list[Any] = [None if t is None else to_float32(t) for t in (*saved, *came, None)]
    (x, states, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr), (output, h_n, c_n) = wide[:9], wide[9:12]
    incoming = Incoming(output, None if h_n is None else h_n[0], None if c_n is None else c_n[0])
    if order is not None:
        x, states = order.padded(x), torch.cat((h0, order.padded(states)))
        incoming = order.incoming(incoming, states[1:])
    first_cell, padding = None if c0 is None else c0[0], None if order is None else order.padding
    trace = Trace(x.contiguous(), states, first_cell, w_ih, w_hh, b_ih, b_hh, w_hr, padding)
    return Found(trace.x, states[:-1], back_through_time(ctx.mode, trace, incoming), trace.weight_ih)


def _states_again(mode: str, x: Tensor, _: Tensor, h0: Tensor, c0: Tensor | None, *weights: Tensor | None) -> Tensor:
    """[T + 1, B, P]: h0 and the states after each step, where these were overwritten."""
    there = [weight for weight in weights if weight is not None]
    output, *_rest = native(mode, x, (h0,) if c0 is None else (h0, c0), there, weights[2] is not None, True)
    return torch.cat((h0, output))


def _input_grad(grad: Tensor, weight_ih: Tensor) -> Tensor:
    return grad @ weight_ih


def _product(grad: Tensor, factor: Tensor) -> Tensor:
    """sum_{t,b} grad (x) factor, with the narrower one on the left, where BLAS is a fifth faster."""
    return (factor.flatten(0, 1).mT @ grad.flatten(0, 1)).mT.contiguous()
