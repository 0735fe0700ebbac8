"""Timing contenders against each other in the same minute.

A machine's speed drifts, and other programs come and go. So contenders take turns, one step each, in a new order every
round, and what is reported is the median over rounds of the ratio of two times of the same round.

They share a heap, and what one contender frees decides how many page faults the next one takes, unless the C library
keeps what is freed (`keep_freed_memory`).
"""

from __future__ import annotations

import ctypes
import math
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles

__all__ = ["Spread", "Timings", "keep_freed_memory", "take_turns", "timed"]

SLOW = 4.0  # contenders this many times slower than the baseline sit out some rounds
LEAST_TURNS = 3
# Turns before those that count, where one takes at most so many seconds. `GhostClipper` measures ownership in the 2nd,
# 4th, 8th and 16th batch of a structure, and more seldom later.
WARM_UP, SHORT = 15, 2.0
PATIENCE = 10.0  # a contender whose step takes longer than this many seconds has one turn
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h: what mallopt sets


@dataclass(frozen=True)
class Spread:
    """The middle of some measurements: median and quartiles, and how many there were."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """The spread of at least one value."""
        low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        return cls(median(values), low, high, len(values))


@dataclass(frozen=True)
class Timings:
    """Seconds of each contender's turns, by round: ``{name: {round: seconds}}``."""

    seconds: dict[str, dict[int, float]]

    def milliseconds(self, name: str) -> Spread:
        """The spread of a contender's own times."""
        return Spread.of([1e3 * value for value in self.seconds[name].values()])

    def ratio(self, name: str, over: str) -> Spread:
        """The spread of time over time within each round that both took part in."""
        mine, other = self.seconds[name], self.seconds[over]
        return Spread.of([mine[number] / other[number] for number in mine if number in other])


def timed(step: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Callable[[], float]:
    """A turn: makes the step, which ends synchronously (on a GPU: is waited for), and returns the seconds it took.

    ``clock=time.process_time`` counts the processor's seconds, which other programs on the same core don't lengthen.
    """

    def turn() -> float:
        start = clock()
        step()
        return clock() - start

    return turn


def take_turns(
    turns: Mapping[str, Callable[[], float]],
    seconds: float,
    *,
    baseline: str,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Lets all ``turns`` alternate, for about ``seconds`` or until each had LEAST_TURNS of them.

    A contender more than SLOW times slower than ``baseline`` runs in every k-th round only, k such that it takes about
    as much time as the fast ones together. k is a power of two, so that the slowest one's rounds are everyone's.

    Args:
        turns: {name: makes one step, returns the seconds it took}.
        seconds: how long to go on; may be passed to give slow contenders their turns, one each where a turn takes more
            than PATIENCE seconds.
        baseline: one of the names.
        clock: seconds; replaceable by tests.

    Returns:
        The times; warm-up steps are not among them.
    """
    costs = {}
    for name, turn in turns.items():
        costs[name] = turn()
        if costs[name] < SHORT:
            costs[name] = min(turn() for _ in range(WARM_UP))
    fast = sum(cost for cost in costs.values() if cost <= SLOW * costs[baseline])
    every = {
        name: 1 if cost <= SLOW * costs[baseline] else 2 ** max(0, round(math.log2(cost / fast)))
        for name, cost in costs.items()
    }
    enough = {name: LEAST_TURNS if cost <= PATIENCE else 1 for name, cost in costs.items()}
    times: dict[str, dict[int, float]] = {name: {} for name in turns}
    order = random.Random(0)
    started, number = clock(), 0
    while clock() - started < seconds or any(len(times[name]) < enough[name] for name in turns):
        present = [name for name in turns if number % every[name] == 0]
        for name in order.sample(present, len(present)):
            times[name][number] = turns[name]()
        number += 1
    return Timings(times)


def keep_freed_memory() -> None:
    """Lets glibc give no memory back, and take none that it would have to give back, in this process from now on.

    By itself it lets chance decide how much of the heap's end it gives back and takes again: a step of the GPT-like
    model takes 0 to 47,000 page faults, which is 130 of 700 ms, private or not.
    """
    # Other C libraries have none.
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None:
        set_option(M_MMAP_MAX, 0)
        set_option(M_TRIM_THRESHOLD, -1)
