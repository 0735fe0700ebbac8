"""Recurrent layers (Lee & Kifer 2020, sections 5.3 and 5.4): sums over time of gate gradient (x) input or hidden state.

Each direction of each layer has nodes of its own in the graph (recurrence.py), and a native call of its own: these give
the values of torch's one call for all, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from ghostclip.errors import UnsupportedModelError
from ghostclip.nn.base import PROBE, GhostLayer, LayerCall, is_capturing, place_of
from ghostclip.norms.outer import OuterProduct
from ghostclip.norms.term import Dense, PerExampleGrads

from .fused import native, native_packed
from .recurrence import Recurrence
from .trace import Order

__all__ = ["GRU", "LSTM", "RNN"]

# In the order of torch's own lists of weights.
KINDS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")


@functools.cache
def _names(layer: int, reverse: int, bias: bool, projected: bool) -> tuple[str, ...]:
    """The names of a direction's parameters, in the order of KINDS; "" for what the layer does without."""
    there = (True, True, bias, bias, projected)
    return tuple(
        f"{kind}_l{layer}{'_reverse' * reverse}" if has else "" for kind, has in zip(KINDS, there, strict=True)
    )


class _Recurrent(GhostLayer):
    """What RNN, LSTM and GRU share."""

    # What torch.nn.RNNBase has, for the type checker.
    mode: str
    bias: bool
    num_layers: int
    bidirectional: bool
    batch_first: bool
    hidden_size: int
    proj_size: int
    dropout: float
    check_forward_args: Callable[..., None]
    permute_hidden: Callable[..., Any]

    @property
    def adds_beside(self) -> bool:
        """An LSTM's projection comes after its gates."""
        return bool(self.proj_size)

    def forward(self, input: Any, hx: Any = None) -> Any:
        """As torch's, padded or packed; raises UnsupportedModelError for an input without a batch dimension."""
        if not is_capturing() or not any(parameter.requires_grad for parameter in self.parameters(recurse=False)):
            return super().forward(input, hx)
        if isinstance(input, PackedSequence):
            return self._packed_forward(input, hx)
        if input.dim() != 3:
            raise UnsupportedModelError(
                f"{place_of(self)} got an input of shape {list(input.shape)}; it needs 3 dimensions, examples in "
                "one of them: " + ("[B, T, features]" if self.batch_first else "[T, B, features]")
            )
        x = input.transpose(0, 1) if self.batch_first else input
        hx = self._zeros(x, x.shape[1]) if hx is None else hx
        self.check_forward_args(input, hx, None)
        output, last = self._all_layers(x, hx if self.mode == "LSTM" else (hx,), None)
        return output.transpose(0, 1) if self.batch_first else output, last

    def _packed_forward(self, input: PackedSequence, hx: Any) -> tuple[PackedSequence, Any]:
        """The rows of all sequences; examples are told in the user's order, not in the packed one."""
        data, sizes, sorted_indices, unsorted_indices = input
        hx = self._zeros(data, int(sizes[0])) if hx is None else self.permute_hidden(hx, sorted_indices)
        self.check_forward_args(data, hx, sizes)
        output, last = self._all_layers(data, hx if self.mode == "LSTM" else (hx,), input)
        return PackedSequence(output, sizes, sorted_indices, unsorted_indices), last

    def _zeros(self, x: Tensor, examples: int) -> Any:
        """The initial states of sequences that come without."""
        rows, width = self.num_layers * (1 + self.bidirectional), self.proj_size or self.hidden_size
        hidden = torch.zeros(rows, examples, width, dtype=x.dtype, device=x.device)
        if self.mode != "LSTM":
            return hidden
        return hidden, torch.zeros(rows, examples, self.hidden_size, dtype=x.dtype, device=x.device)

    def _all_layers(self, x: Tensor, initial: tuple[Tensor, ...], packed: PackedSequence | None) -> tuple[Tensor, Any]:
        """The output, features last, and the last states of all layers and directions, in torch's order."""
        lasts: list[tuple[Tensor, ...]] = []
        for layer in range(self.num_layers):
            states = tuple(state[len(lasts) : len(lasts) + 1 + self.bidirectional] for state in initial)
            found = self._layer(x, states, layer, packed)
            lasts += [tuple(last) for _, *last in found]
            outputs = [output for output, *_ in found]
            x = torch.cat(outputs, dim=-1) if self.bidirectional else outputs[0]
            if self.dropout and layer < self.num_layers - 1:
                x = F.dropout(x, self.dropout, self.training)
        last = tuple(parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*lasts, strict=True))
        return x, last if self.mode == "LSTM" else last[0]

    def _layer(
        self, x: Tensor, initial: tuple[Tensor, ...], layer: int, packed: PackedSequence | None
    ) -> list[tuple[Tensor, ...]]:
        """Output [T, B, P], or rows [N, P] of a packed sequence, and last states [1, B, ...] of each direction."""
        names = [_names(layer, reverse, self.bias, bool(self.proj_size)) for reverse in range(1 + self.bidirectional)]
        weights = [[getattr(self, own) if own else None for own in each] for each in names]
        there = [[weight for weight in each if weight is not None] for each in weights]
        options = self.bias, self.training
        if packed is not None:
            packed = PackedSequence(x, *packed[1:])
            every = native_packed(self.mode, packed, initial, [*chain(*there)], *options)
        found = []
        for reverse, own in enumerate(names):
            states = tuple([state[reverse : reverse + 1] for state in initial])
            if packed is None:
                turned, order = x.flip(0) if reverse else x, None
                results = native(self.mode, turned, states, there[reverse], *options)
                told = results[0]
            else:
                turned, order, results = x, Order(packed, bool(reverse)), every[reverse]
                if packed.unsorted_indices is not None:
                    states = tuple([state.index_select(1, packed.unsorted_indices) for state in states])
                # As told, examples are in a dimension of their own.
                told = x.new_empty(()).expand(*order.padding.shape, results[0].shape[1])
            call = self.new_call(told, (turned, *states), tuple([name for name in own if name]), batch_dim=1)
            if call is not None and packed is not None:
                call.lengths = packed.batch_sizes, packed.sorted_indices
            tensors = (*weights[reverse], turned, *states, *(None,) * (2 - len(states)), PROBE)
            output, *last = Recurrence.apply(call, self.mode, results, order, *tensors)
            found.append((output.flip(0) if reverse and packed is None else output, *last))
        return found

    def per_example(self, name: str, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        x, before, into_hidden, *others = inputs
        recurrent = "_hh_" in name
        if name.startswith("bias"):
            return Dense(others[recurrent])
        left, right = (into_hidden, before) if recurrent else (grad, x)
        if "_hr_" in name:
            left, right = others[-2:]
        return OuterProduct(left.transpose(0, 1), right.transpose(0, 1), getattr(self, name).shape)

    @classmethod
    def parameter_names(cls, module: Any) -> tuple[str, ...]:
        return tuple(name for names in module._all_weights for name in names)


class RNN(_Recurrent, torch.nn.RNN, wraps=torch.nn.RNN):
    """`torch.nn.RNN` that can be clipped; tanh or relu, layers, directions, padded or packed sequences."""


class LSTM(_Recurrent, torch.nn.LSTM, wraps=torch.nn.LSTM):
    """`torch.nn.LSTM` that can be clipped; layers, directions, projections, padded or packed sequences."""


class GRU(_Recurrent, torch.nn.GRU, wraps=torch.nn.GRU):
    """`torch.nn.GRU` that can be clipped; layers, directions, padded or packed sequences."""
