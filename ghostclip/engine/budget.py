"""How many steps a budget is enough for, on top of what was spent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from scipy.optimize import brentq

from ghostclip import accounting
from ghostclip.events import Event

__all__ = ["affordable"]

# More than anyone takes; a run that does asks again.
MOST = 10**6


def affordable(spent: Iterable[Event], event: Event, *, max_epsilon: float, delta: float, most: int = MOST) -> int:
    """How many of ``event``, up to ``most``, stay within ``max_epsilon`` at ``delta`` by PLD, together with ``spent``.

    It takes about a dozen evaluations of epsilon, one when ``most`` is affordable.
    """
    spent = list(spent)

    @cache
    def excess(count: int) -> float:
        # Finite, so that a root finder can use it.
        return min(accounting.epsilon_of([*spent, replace(event, count=count)], delta=delta) - max_epsilon, 1e6)

    most = min(most, MOST)
    if excess(most) <= 0:
        return most
    fits, over = -1, 1
    while excess(min(over, most)) <= 0:
        fits, over = over, 8 * over
    if fits < 0:
        return 0
    known = {fits, min(over, most)}

    def watched(count: float) -> float:
        known.add(round(count))
        return excess(round(count))

    brentq(watched, fits, min(over, most), xtol=0.5)
    while True:
        fits = max(count for count in known if excess(count) <= 0)
        over = min(count for count in known if excess(count) > 0)
        if over <= fits + 1:
            return over - 1
        known.add((fits + over) // 2)
