"""A first pass over a graph whose lowest layers may go by parts of the examples (`ghostclip.tail`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from torch import Tensor

from ghostclip.graph import first_pass
from ghostclip.groupwise import GroupSums
from ghostclip.nn.base import Call
from ghostclip.passes import Collector
from ghostclip.tail import Tail

__all__ = ["collect"]


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
        tail.forget()
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
