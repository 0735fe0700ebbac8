"""How many steps a budget is enough for, on top of what was spent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

from scipy.optimize import brentq

from ghostclip import accounting
from ghostclip.events import Event

__all__ = ["MOST", "affordable"]

# More than anyone takes; a run that does asks again.
MOST = 10**6


def affordable(spent: Iterable[Event], event: Event, *, max_epsilon: float, delta: float, most: int = MOST) -> int:
    """How many of ``event``, up to ``most``, stay within ``max_epsilon`` at ``delta`` by PLD, together with ``spent``.

    It takes half a dozen evaluations of epsilon, one when ``most`` is affordable.
    """
    spent, most = list(spent), min(most, MOST)

    def excess_by(accountant: str) -> Callable[[int], float]:
        @cache
        def excess(count: int) -> float:
            events = [*spent, replace(event, count=count)]
            # Finite, so that a root finder can use it.
            return min(accounting.epsilon_of(events, delta=delta, accountant=accountant) - max_epsilon, 1e6)

        return excess

    excess = excess_by("pld")
    # Rényi divergences take a millisecond, and are not far off.
    quick = all("rdp" in accounting.accountants_for(each) for each in (event, *spent))
    start = _last_within(excess_by("rdp"), 1, most, 8) if quick else 0
    return _last_within(excess, max(start, 1), most, 2 if quick else 8)


def _last_within(excess: Callable[[int], float], start: int, most: int, factor: int) -> int:
    """The largest count up to ``most`` whose ``excess``, which rises, is not positive; 0 for none."""
    here = min(start, most)
    while excess(here) > 0 and here:
        here //= factor
    if not here and excess(0) > 0:
        return 0
    over = min(max(start, factor * here, 1), most)
    while excess(over) <= 0:
        if over == most:
            return most
        here, over = over, min(factor * over, most)
    known = {here, over}

    def watched(count: float) -> float:
        known.add(round(count))
        return excess(round(count))

    brentq(watched, here, over, xtol=0.5)
    while True:
        here = max(count for count in known if excess(count) <= 0)
        over = min(count for count in known if excess(count) > 0)
        if over <= here + 1:
            return here
        known.add((here + over) // 2)
