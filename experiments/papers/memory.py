"""The largest batch whose step fits into a limit of memory, each trial in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ghostclip.bench import BASELINE, CONTENDERS
from ghostclip.bench.memory import Task, ask

__all__ = ["CLOSE", "largest_batch", "largest_batches", "peak", "share"]

CLOSE = 1.05  # the search ends when the smallest batch too large is within this of the largest that fits
MARGIN = 1.02  # a guess this near to a size whose answer is known is moved to CLOSE's other side
GUESSES = 8  # then bisection, where bytes aren't a straight line
SETTLING = 0.5  # seconds; what caches take is nothing beside these models


def peak(name: str, contender: str, device: str, batch_size: int) -> int:
    """Bytes that two steps need at their highest; RuntimeError when the contender can't make them."""
    task = Task(name, contender, batch_size, device=device, threads=1)
    found = ask(task, steps=2, settling_seconds=SETTLING)
    if "failed" in found:
        raise RuntimeError(f"{contender} on {name}, batch {batch_size}: {found['failed']}")
    return found["peak"]


def largest_batch(need: Callable[[int], int], limit: int, start: int) -> int:
    """The largest batch that fits, to within CLOSE; 0 when not even one does.

    Each size is a guess by the straight line through the last two answers, which is what most bytes grow by.

    Args:
        need: batch size -> bytes; called once a size.
        limit: bytes.
        start: the first guess, at least 1.
    """
    low, high, known = 0, 0, {0: 0}
    size = start
    while not high or (high - low > 1 and high > CLOSE * low):
        known[size] = need(size)
        low, high = (max(low, size), high) if known[size] <= limit else (low, min(high or size, size))
        size = _next(known, limit, low, high)
    return low


def _next(known: Mapping[int, int], limit: int, low: int, high: int) -> int:
    (first, second), top = sorted(list(known)[-2:]), high - 1 if high else max(2 * low, 8 * low)
    slope = (known[second] - known[first]) / (second - first)
    guess = first + int((limit - known[first]) / slope) if slope > 0 else top
    if high and len(known) > GUESSES:
        guess = (low + high) // 2
    elif low < guess <= MARGIN * low:
        guess = int(CLOSE * low)
    elif high and high / MARGIN <= guess:
        guess = int(high / CLOSE)
    return min(max(guess, low + 1), max(top, low + 1))


def largest_batches(
    name: str, contenders: Sequence[str], limit: int, start: int, device: str = "cpu"
) -> dict[str, dict[str, Any]]:
    """For the non-private step and each contender: ``batch``, and its share of the non-private one; or ``missing``."""
    found: dict[str, dict[str, Any]] = {}
    for contender in dict.fromkeys([BASELINE, *contenders]):
        if (reason := CONTENDERS[contender].missing()) is not None:
            found[contender] = {"missing": reason}
            continue
        try:
            batch = largest_batch(partial(peak, name, contender, device), limit, max(1, start))
        except RuntimeError as error:  # another library may fail in any way, which is a finding
            found[contender] = {"failed": str(error)}
            continue
        found[contender] = {"batch": batch, "share": batch / max(1, found.get(BASELINE, {}).get("batch", batch))}
        print(f"{name} {contender}: {batch}", file=sys.stderr, flush=True)
    return found


def share(row: Mapping[str, Any]) -> str:
    """A cell: the share of the non-private batch, in percent; nothing where there is none."""
    return f"{row['share']:.0%}" if "share" in row else ("fails" if "failed" in row else "")
