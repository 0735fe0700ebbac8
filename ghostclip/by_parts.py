"""Passes over a graph whose lowest layers go by parts of the examples (`ghostclip.tail`).

A second pass goes by the parts of the first, and by the same kernels: where a gradient is nothing but rounding errors,
they are those that were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext

from torch import Tensor

from ghostclip.graph import first_pass
from ghostclip.groupwise import GroupSums
from ghostclip.nn.base import Call
from ghostclip.passes import Collector
from ghostclip.reweighting import Reweighting
from ghostclip.tail import Tail

__all__ = ["add_up", "collect"]


def collect(
    losses: Tensor,
    calls: Sequence[Call],
    tail: Tail | None,
    collector: Collector,
    groups: GroupSums | None,
    *,
    retain_graph: bool,
) -> None:
    """Tells the collector of every layer behind ``losses``.

    Args:
        losses: [B].
        calls: the uses of layers that the collector expects.
        tail: uses below them, that go by parts; None for none.
        collector: receives.
        groups: that its terms go to, if to any.
        retain_graph: as torch's.
    """
    with nullcontext() if tail is None else tail.stopped():
        first_pass(losses, calls, collector.receive, retain_graph=retain_graph)
    if tail is not None:
        _collect_by_parts(losses, tail, collector, groups)
        tail.grad = None
    collector.finish()


def _collect_by_parts(losses: Tensor, tail: Tail, collector: Collector, groups: GroupSums | None) -> None:
    found = []
    for part in tail.parts:
        calls = tail.calls_of(part)
        sums = None if groups is None else groups.of_part(part)
        some = collector.of_part(losses[part], calls, sums)
        for call, inputs, grad in tail.gradients(part, calls):
            some.receive(call, inputs, grad)
        some.finish()
        if groups is not None and sums is not None:
            sums.close()
            groups.join(sums)
        found.append(some)
    collector.join(found)


def add_up(tail: Tail, known: Collection[int], sink: Callable[[slice, Sequence[Call]], Reweighting]) -> None:
    """Adds the clipped sums of the layers in the tail, to whose top a second pass has come.

    Args:
        tail: of the first pass.
        known: ids of parameters whose sums are there already.
        sink: (part, its uses of layers) -> what forms their sums and adds them.
    """
    needed = tail.needed(known)
    for part in tail.parts if needed else []:
        calls = tail.calls_of(part)[:needed]
        adding = sink(part, calls)
        for call, inputs, grad in tail.gradients(part, calls):
            adding.receive(call, inputs, grad)
        adding.finish()
    tail.forget()
