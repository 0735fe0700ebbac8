"""Recurrent layers (Lee & Kifer 2020, sections 5.3 and 5.4): sums over time of gate gradient (x) input or hidden state.

torch's fused kernels do the forward; their own backward can't stop at the gates, so an own node goes back instead: it
recomputes the gates and goes back through time (time_loop.py, or gates.py and through_time.py where nothing can be
compiled), and is its own capture: in a first pass it tells the sink the gate gradients and forms no weight gradient.

Several layers and both directions run as one native call each, which gives the values of torch's one call for all, bit
for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import _VF, Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from ghostclip.errors import UnsupportedModelError
from ghostclip.norms.dense import Dense
from ghostclip.norms.outer import Outer
from ghostclip.norms.term import Term, wide

from .base import NOTHING, PROBE, Call, GhostLayer, is_capturing
from .gates import Trace
from .through_time import LOOPS, GateGradients, Incoming, Way
from .time_loop import COMPILED, available

__all__ = ["GRU", "LSTM", "RNN"]


# By the mode of torch's recurrent layers.
_KERNELS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "LSTM": _VF.lstm,
    "GRU": _VF.gru,
    "RNN_TANH": _VF.rnn_tanh,
    "RNN_RELU": _VF.rnn_relu,
}


def _native(mode: str, x: Tensor, initial: tuple[Tensor, ...], weights: list[Tensor], training: bool) -> tuple:
    """torch's own output and last states, detached, with the values a training forward of the plain layer has."""
    # oneDNN's LSTM has one kernel for training and one for inference, told apart by grad mode; they differ in the last
    # bit. The other kernels are told apart by the weights' requires_grad (matmul folds time into the batch).
    fused = mode == "LSTM" and x.device.type == "cpu" and x.dtype != torch.float64
    with torch.set_grad_enabled(fused):
        if fused:
            x, weights = x.detach(), [weight.detach() for weight in weights]
            initial = tuple(state.detach() for state in initial)
        hidden = initial if len(initial) > 1 else initial[0]
        return _KERNELS[mode](x, hidden, weights, len(weights) == 4, 1, 0.0, training, False, False)


class _Recurrence(torch.autograd.Function):
    """One direction of one layer, forward done; its backward tells the sink, while there is one, the gate gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        probe: Tensor,
        call: Call | None,
        mode: str,
        results: tuple[Tensor, ...],
        x: Tensor,
        h0: Tensor,
        c0: Tensor | None,
        *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        output = results[0]
        # A copy, so that the output may be changed in place, as it may behind torch's own GRU and RNN.
        states = output.new_empty(output.shape[0] + 1, *output.shape[1:])
        states[:1], states[1:] = h0, output
        ctx.save_for_backward(x, states, c0, *weights)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.mode, ctx.kept = call, mode, None
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, output: Tensor | None, h_n: Tensor | None, c_n: Tensor | None = None) -> tuple:
        if ctx.call is not None and ctx.call.sink is NOTHING:
            ctx.kept = None
            return (None,) * len(ctx.needs_input_grad)
        trace = _trace(*ctx.saved_tensors)
        way, kept = (_way(ctx.mode, trace), None) if ctx.kept is None else ctx.kept
        if ctx.kept is None:
            kept = way.keep(trace)
        # Where another pass is to follow over this graph, it need not compute them again.
        ctx.kept = (way, kept) if torch._C._autograd._get_current_graph_task_keep_graph() else None
        last = (None if grad is None else wide(grad[0]) for grad in (h_n, c_n))
        found = way.back(kept, trace, Incoming(None if output is None else wide(output), *last))
        needed = ctx.needs_input_grad[4:]
        call = ctx.call
        if call is not None and call.sink is not None:
            call.sink(call, _for_rule(call, trace, found), found.into_input)
            needed = (*needed[:3], False, False, False, False)
        return None, None, None, None, *_gradients(trace, found, needed)


def _way(mode: str, trace: Trace) -> Way:
    """Compiled where that can be had, else by tensor operations."""
    return (COMPILED if available(trace) else LOOPS)[mode]


def _trace(x: Tensor, states: Tensor, c0: Tensor | None, *weights: Tensor | None) -> Trace:
    """What was saved, as the factors want it."""
    weight_ih, weight_hh, *biases = weights
    assert weight_ih is not None
    assert weight_hh is not None
    bias_ih, bias_hh = (None if bias is None else wide(bias) for bias in biases)
    first_cell = None if c0 is None else wide(c0[0])
    return Trace(wide(x).contiguous(), wide(states), first_cell, wide(weight_ih), wide(weight_hh), bias_ih, bias_hh)


def _gradients(trace: Trace, found: GateGradients, needed: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """Gradients of x, h0, c0, W_ih, W_hh, b_ih and b_hh where needed, each by one product over all time steps."""
    into_input, into_hidden = found.into_input.flatten(0, 1), found.into_hidden.flatten(0, 1)
    return (
        (into_input @ trace.weight_ih).view_as(trace.x) if needed[0] else None,
        found.h0.unsqueeze(0) if needed[1] else None,
        found.c0.unsqueeze(0) if needed[2] and found.c0 is not None else None,
        _product(into_input, trace.x) if needed[3] else None,
        _product(into_hidden, trace.states[:-1]) if needed[4] else None,
        found.summed()[0].sum(0) if needed[5] else None,
        found.summed()[1].sum(0) if needed[6] else None,
    )


def _product(grad: Tensor, factor: Tensor) -> Tensor:
    """sum_{t,b} grad (x) factor, with the narrower one on the left of the product, where BLAS is a fifth faster."""
    return (factor.flatten(0, 1).mT @ grad).mT.contiguous()


def _for_rule(call: Call, trace: Trace, found: GateGradients) -> tuple[Tensor, ...]:
    """What `_Recurrent.per_example` needs beside dG: x, h_{t-1}, dG for W_hh, and both dG summed over time."""
    if not any(name.startswith("bias") for name in call.parameters):
        return trace.x, trace.states[:-1], found.into_hidden
    return trace.x, trace.states[:-1], found.into_hidden, *found.summed()


class _Recurrent(GhostLayer):
    """What RNN, LSTM and GRU share."""

    # What torch.nn.RNNBase has, for the type checker.
    mode: str
    bias: bool
    num_layers: int
    bidirectional: bool
    batch_first: bool
    hidden_size: int
    dropout: float
    check_forward_args: Callable[..., None]

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        if not is_capturing() or not any(parameter.requires_grad for parameter in self.parameters(recurse=False)):
            return super().forward(input, hx)
        self._refuse(input)
        x = input.transpose(0, 1) if self.batch_first else input
        if hx is None:
            shape = (self.num_layers * (1 + self.bidirectional), x.shape[1], self.hidden_size)
            hx = torch.zeros(shape, dtype=x.dtype, device=x.device)
            hx = (hx, hx) if self.mode == "LSTM" else hx
        self.check_forward_args(input, hx, None)
        output, lasts = self._all_layers(x, hx if self.mode == "LSTM" else (hx,))
        last = tuple(parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*lasts, strict=True))
        return output.transpose(0, 1) if self.batch_first else output, last if self.mode == "LSTM" else last[0]

    def _refuse(self, input: Any) -> None:
        """Raises for what has no rule."""
        kind = type(self).__name__
        for problem, remedy in self.obstacles(self):
            raise UnsupportedModelError(f"{kind}: {problem}; {remedy}")
        if isinstance(input, PackedSequence):
            raise UnsupportedModelError(
                f"{kind} got a PackedSequence, which has no gradient rule; give it padded sequences [B, T, features] "
                "with batch_first=True, and leave the padding out of the losses"
            )
        if input.dim() != 3:
            raise UnsupportedModelError(
                f"{kind} got an input of shape {list(input.shape)}; it needs 3 dimensions, examples in one of them: "
                + ("[B, T, features]" if self.batch_first else "[T, B, features]")
            )

    def _all_layers(self, x: Tensor, initial: tuple[Tensor, ...]) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """The output [T, B, directions * H], and the last states of each layer and direction, in torch's order."""
        lasts: list[tuple[Tensor, ...]] = []
        for layer in range(self.num_layers):
            outputs = []
            for reverse in range(1 + self.bidirectional):
                states = tuple(state[len(lasts) : len(lasts) + 1] for state in initial)
                name = f"_l{layer}" + "_reverse" * reverse
                output, *last = self._one_direction(x.flip(0) if reverse else x, states, name)
                outputs.append(output.flip(0) if reverse else output)
                lasts.append(tuple(last))
            x = torch.cat(outputs, dim=2) if self.bidirectional else outputs[0]
            if self.dropout and layer < self.num_layers - 1:
                x = F.dropout(x, self.dropout, self.training)
        return x, lasts

    def _one_direction(self, x: Tensor, initial: tuple[Tensor, ...], name: str) -> tuple[Tensor, ...]:
        """Output [T, B, H] and last states [1, B, H] of one layer in one direction, time running forwards."""
        names = tuple(f"{kind}{name}" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        weights = [getattr(self, own) for own in (names if self.bias else names[:2])]
        results = _native(self.mode, x, initial, weights, self.training)
        call = self.new_call(results[0], (x, *initial), names, batch_dim=1)
        h0, c0 = initial if len(initial) > 1 else (initial[0], None)
        weights += [None] * (4 - len(weights))
        return _Recurrence.apply(PROBE, call, self.mode, results, x, h0, c0, *weights)

    def per_example(self, name: str, call: Call, inputs: tuple[Tensor, ...], grad: Tensor) -> Term:
        x, before, into_hidden, *summed = inputs
        recurrent = "_hh_" in name
        if name.startswith("bias"):
            return Dense(summed[recurrent])
        left, right = (into_hidden, before) if recurrent else (grad, x)
        return Outer(left.transpose(0, 1), right.transpose(0, 1), getattr(self, name).shape)

    @classmethod
    def parameter_names(cls, module: torch.nn.Module) -> tuple[str, ...]:
        assert isinstance(module, torch.nn.RNNBase)
        return tuple(name for names in module._all_weights for name in names)

    @classmethod
    def obstacles(cls, module: torch.nn.Module) -> list[tuple[str, str]]:
        if not getattr(module, "proj_size", 0):
            return []
        return [("projects its hidden states (proj_size), which has no gradient rule", "leave proj_size out")]


class RNN(_Recurrent, torch.nn.RNN, wraps=torch.nn.RNN):  # type: ignore[misc]
    """`torch.nn.RNN` that can be clipped; tanh or relu, any number of layers, one direction or both."""


class LSTM(_Recurrent, torch.nn.LSTM, wraps=torch.nn.LSTM):  # type: ignore[misc]
    """`torch.nn.LSTM` that can be clipped; any number of layers, one direction or both."""


class GRU(_Recurrent, torch.nn.GRU, wraps=torch.nn.GRU):  # type: ignore[misc]
    """`torch.nn.GRU` that can be clipped; any number of layers, one direction or both."""
