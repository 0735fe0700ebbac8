"""What a recurrence goes back through time from, and what it finds there: gradients at the pre-activations of gates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["GateGradients", "Incoming", "Order", "Trace", "Way"]


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
        padding: [T, B], where sequences of different lengths have ended: x and states are zeros there; or None.
    """

    x: Tensor
    states: Tensor
    c0: Tensor | None
    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    weight_hr: Tensor | None = None
    padding: Tensor | None = None

    @property
    def hidden(self) -> int:
        """H."""
        return (self.weight_hh if self.weight_hr is None else self.weight_hr).shape[1]

    @property
    def bias(self) -> Tensor | None:
        """The sum of both biases."""
        return None if self.bias_ih is None or self.bias_hh is None else self.bias_ih + self.bias_hh


class Incoming(NamedTuple):
    """Gradients of the losses at what a recurrence returned; None where nothing came.

    Attributes:
        output: [T, B, P]; zeros in padding.
        h_n: [B, P]; of sequences of different lengths it is part of ``output``.
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
    """Gradients of the losses inside a recurrence; zeros in padding.

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
    c0: Tensor | None = None
    sums: tuple[Tensor, Tensor] | None = None
    projection: tuple[Tensor, Tensor] | None = None

    def summed(self) -> tuple[Tensor, Tensor]:
        """`into_input` and `into_hidden` summed over time, [B, gates * H] each: the biases' gradients by example."""
        if self.sums is not None:
            return self.sums
        first = self.into_input.sum(0)
        return first, first if self.into_hidden is self.into_input else self.into_hidden.sum(0)


class Order:
    """Where the rows of a packed sequence are among padded ones, [T, B] in the user's order of examples.

    Attributes:
        places: [N], of each row of the data: step * B + example. A reversed direction's step 0 is a sequence's last.
        ends: [B], of the last step of each example.
        padding: [T, B], the steps after it.
    """

    def __init__(self, packed: PackedSequence, reverse: bool) -> None:
        data, sizes, sorted_indices, unsorted_indices = packed
        examples, device = int(sizes[0]), data.device
        sizes, every, steps = sizes.to(device), *(torch.arange(n, device=device) for n in (examples, len(sizes)))
        lengths = (sizes.unsqueeze(1) > every).sum(0)
        step = steps.repeat_interleave(sizes)
        example = torch.arange(len(data), device=device) - (sizes.cumsum(0) - sizes)[step]
        if reverse:
            step = lengths[example] - 1 - step
        if sorted_indices is not None:
            example, lengths = sorted_indices[example], lengths[unsorted_indices]
        self.places, self.ends = step * examples + example, (lengths - 1) * examples + every
        self.padding = steps.unsqueeze(1) >= lengths

    def padded(self, rows: Tensor) -> Tensor:
        """Rows [N, d] of the data as [T, B, d], zeros for padding."""
        found = rows.new_zeros(self.padding.numel(), rows.shape[1])
        return found.index_copy_(0, self.places, rows).view(*self.padding.shape, -1)

    def packed(self, padded: Tensor) -> Tensor:
        """The way back from `padded`."""
        return padded.flatten(0, 1)[self.places]

    def incoming(self, came: Incoming, like: Tensor) -> Incoming:
        """What came to rows [N, P] and last states, as it comes to padded steps; ``like`` is some [T, B, P]."""
        output = torch.zeros_like(like) if came.output is None else self.padded(came.output)
        if came.h_n is not None:
            output.flatten(0, 1).index_add_(0, self.ends, came.h_n)
        return Incoming(output, None, came.c_n)


Way = Callable[[Trace, Incoming], GateGradients]
