"""Packed sequences of different lengths through a recurrence: runs of time steps that the same examples take.

A `PackedSequence` holds the steps of all sequences one after another, the longest sequence first in each step, so that
no step is padding. A run of steps with as many examples is a dense block of its rows, which the way back of padded
sequences takes as it is; states and gradients are handed on from run to run, where sequences end or, backwards in time,
begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .gates import Trace
from .through_time import GateGradients, Incoming, Way

__all__ = ["Order", "PackedTrace", "Run", "forward_runs", "way_back"]


@dataclass(frozen=True)
class Order:
    """How the rows of a packed sequence are gone through, in one direction.

    Attributes:
        sizes: how many examples take part in each step, in the order of the data.
        reverse: whether time runs backwards.
        unsorted: where each example of the user's order is in the packed one; None where both are the same.
    """

    sizes: tuple[int, ...]
    reverse: bool
    unsorted: Tensor | None

    @property
    def examples(self) -> int:
        """B."""
        return self.sizes[0]

    def turned(self, rows: Tensor, *, back: bool = False) -> Tensor:
        """Rows [N, ...] of the data in the order of processing, or ``back`` from there."""
        if not self.reverse:
            return rows
        return torch.cat(rows.split(self.sizes[::-1] if back else self.sizes)[::-1])

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """(first row, steps, examples) of each run of steps that the same examples take, in the order of processing."""
        row = 0
        for examples, steps in groupby(reversed(self.sizes) if self.reverse else self.sizes):
            count = len(list(steps))
            yield row, count, examples
            row += count * examples

    def padded(self, rows: Tensor) -> Tensor:
        """Rows [N, 1, d] in the order of processing as [T, B, d], zeros for padding, examples in the user's order."""
        found = rows.new_zeros(len(self.sizes), self.examples, rows.shape[-1])
        step = 0
        for row, count, examples in self.blocks():
            found[step : step + count, :examples] = rows[row : row + count * examples].view(count, examples, -1)
            step += count
        return found if self.unsorted is None else found.index_select(1, self.unsorted)


@dataclass(frozen=True)
class PackedTrace:
    """What one direction of one recurrent layer saw of a packed sequence, in float32 or wider.

    Attributes:
        order: of the rows.
        x: [N, I], in the order of processing, as is `output`.
        output: [N, P], the hidden state after each step.
        h0, c0: [B, P] and, of an LSTM, [B, H], in the order of the packed sequence.
        weights: weight_ih, weight_hh, bias_ih, bias_hh, weight_hr, None where there is none.
    """

    order: Order
    x: Tensor
    output: Tensor
    h0: Tensor
    c0: Tensor | None
    weights: tuple[Any, ...]


class Run(NamedTuple):
    """One dense block of steps, the way that goes back through it, and what that keeps."""

    trace: Trace
    way: Way
    kept: Any


def forward_runs(packed: PackedTrace, choose: Callable[[Trace], Way]) -> list[Run]:
    """The runs in the order of processing, with what their ways back keep; ``choose`` finds the way for a trace."""
    runs: list[Run] = []
    hidden, cell = packed.h0[:0], None if packed.c0 is None else packed.c0[:0]
    for row, steps, examples in packed.order.blocks():
        rows = slice(row, row + steps * examples)
        hidden = _with_new(hidden, packed.h0, examples)
        states = torch.cat([hidden.unsqueeze(0), packed.output[rows].view(steps, examples, -1)])
        if cell is not None and packed.c0 is not None:
            cell = _with_new(cell, packed.c0, examples)
        x = packed.x[rows].view(steps, examples, -1)
        trace = Trace(x, states, cell, *packed.weights)
        way = choose(trace)
        kept = way.keep(trace)
        runs.append(Run(trace, way, kept))
        hidden = states[-1]
        if way.last_cell is not None:
            cell = way.last_cell(kept, trace)
    return runs


def _with_new(carried: Tensor, first: Tensor, examples: int) -> Tensor:
    """States of the ``examples`` that go on; those that begin here have their initial ones."""
    if examples <= carried.shape[0]:
        return carried[:examples]
    return torch.cat([carried, first[carried.shape[0] : examples]])


def way_back(runs: list[Run], incoming: Incoming) -> GateGradients:
    """The gradients at every row, [N, 1, ...] in the order of processing, and at the initial states [B, ...].

    Args:
        runs: from `forward_runs`.
        incoming: output [N, P] in the order of processing; h_n and c_n [B, ...].
    """
    found: list[GateGradients] = []
    begun: list[tuple[Tensor, Tensor | None]] = []
    stop = sum(run.trace.x.shape[0] * run.trace.x.shape[1] for run in runs)
    h_next, c_next = runs[-1].trace.states[-1, :0], None if runs[-1].trace.c0 is None else runs[-1].trace.c0[:0]
    for trace, way, kept in reversed(runs):
        steps, examples = trace.x.shape[:2]
        start = stop - steps * examples
        output = None if incoming.output is None else incoming.output[start:stop].view(steps, examples, -1)
        # Rows past the examples of this run began after it; what reached them is theirs alone.
        begun.append((h_next[examples:], None if c_next is None else c_next[examples:]))
        h_next = _with_ending(h_next, incoming.h_n, examples)
        if c_next is not None:
            c_next = _with_ending(c_next, incoming.c_n, examples)
        gradients = way.back(kept, trace, Incoming(output, h_next, c_next))
        found.append(gradients)
        h_next, c_next, stop = gradients.h0, gradients.c0, start
    begun.append((h_next, c_next))
    return _joined(found[::-1], begun[::-1])


def _with_ending(carried: Tensor, last: Tensor | None, examples: int) -> Tensor:
    """Gradients at the last states of a run: carried on from the next one, or come to examples that end here."""
    count = carried.shape[0]
    if examples <= count:
        return carried[:examples]
    new = carried.new_zeros(examples - count, carried.shape[1]) if last is None else last[count:examples]
    return torch.cat([carried, new])


def _joined(found: list[GateGradients], begun: list[tuple[Tensor, Tensor | None]]) -> GateGradients:
    def rows(parts: list[Tensor]) -> Tensor:
        return torch.cat([part.flatten(0, 1) for part in parts]).unsqueeze(1)

    into_input = rows([gradients.into_input for gradients in found])
    same = all(gradients.into_hidden is gradients.into_input for gradients in found)
    into_hidden = into_input if same else rows([gradients.into_hidden for gradients in found])
    cells = [cell for _, cell in begun if cell is not None]
    projections = [gradients.projection for gradients in found if gradients.projection is not None]
    projection = None
    if projections:
        projection = rows([at_states for at_states, _ in projections]), rows([made for _, made in projections])
    h0 = torch.cat([hidden for hidden, _ in begun])
    return GateGradients(into_input, into_hidden, h0, torch.cat(cells) if cells else None, None, projection)
