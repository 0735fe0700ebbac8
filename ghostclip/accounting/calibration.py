"""The other way round: the noise, or the number of steps, with which a setting stays within a target epsilon."""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial

import scipy

from ghostclip.accounting.spent import ACCOUNTANTS, Setting, accountants_for, epsilon_of
from ghostclip.events import Event
from ghostclip.validate import one_of, open_fraction, positive, whole

__all__ = ["affordable", "max_steps", "noise_for", "noise_multiplier"]

log = logging.getLogger("ghostclip")

LEAST_NOISE, MOST_NOISE = 1e-2, 1e12
MOST_STEPS = 10**9
# Where the closed form still has numbers; the start need not be good.
MOST_TO_START_FROM = 1e4


def noise_multiplier(
    *,
    target_epsilon: float,
    sample_rate: float,
    steps: int,
    delta: float,
    accountant: str = "pld",
    sampling: str = "poisson",
    neighboring: str = "add_or_remove_one",
    dataset_size: int | None = None,
    max_batch_size: int | None = None,
) -> float:
    """The least noise (to a relative 1e-5) with which ``steps`` releases stay within ``target_epsilon`` at ``delta``.

    Args as in `epsilon`; ``target_epsilon`` is finite and > 0.

    Returns:
        A noise multiplier for which `epsilon` gives at most ``target_epsilon``, 0.01 where less would do; 0.0 for zero
        steps, which need none.

    Raises:
        ValueError, TypeError: an argument is out of range, or no noise reaches the target.
    """
    setting = Setting(sample_rate, sampling, neighboring, dataset_size, max_batch_size)
    steps = whole(steps=steps)
    return noise_for(
        lambda noise: [setting.event(noise, steps)], target_epsilon=target_epsilon, delta=delta, accountant=accountant
    )


def noise_for(
    events_of: Callable[[float], Sequence[Event]], *, target_epsilon: float, delta: float, accountant: str = "pld"
) -> float:
    """`noise_multiplier` for steps of any kind.

    Args:
        events_of: from a noise multiplier to what all steps are charged as.

    The other arguments, the result and what is raised, as there.
    """
    target_epsilon = positive(target_epsilon=target_epsilon)
    delta, accountant = open_fraction(delta=delta), one_of(ACCOUNTANTS, accountant=accountant)
    events = [event for event in events_of(1.0) if event.count]
    if not events:
        return 0.0
    log.info("looking for the least noise within epsilon %g at delta %g; this takes seconds", target_epsilon, delta)

    @cache
    def excess(log_noise: float) -> float:
        return _excess(events_of(math.exp(log_noise)), target_epsilon, delta, accountant)

    mu, steps = _gaussian_mu(target_epsilon, delta), sum(event.count for event in events)
    rate = math.sqrt(sum(event.count * event.sample_rate**2 for event in events) / steps)
    start = -0.5 * math.log(math.log1p((mu / rate) ** 2 / steps))
    few, enough = _bracket(excess, start, math.log(LEAST_NOISE), math.log(MOST_NOISE))
    if enough is None:
        raise ValueError(
            f"target_epsilon={target_epsilon!r} can't be reached: {accountant!r} gives more for steps={steps} at "
            f"sample_rate={rate!r} and delta={delta!r}, however large the noise; raise target_epsilon or delta, or "
            "take fewer steps"
        )
    if few is None:
        return math.exp(enough)
    return math.exp(_last_within(excess, few, enough, 1e-5))


def max_steps(
    *,
    target_epsilon: float,
    noise_multiplier: float,
    sample_rate: float,
    delta: float,
    accountant: str = "pld",
    sampling: str = "poisson",
    neighboring: str = "add_or_remove_one",
    dataset_size: int | None = None,
    max_batch_size: int | None = None,
) -> int:
    """The most steps that stay within ``target_epsilon`` at ``delta``: one more would exceed it. 0 when one step does.

    Args as in `epsilon`; ``target_epsilon`` is finite and > 0.

    Raises:
        ValueError, TypeError: an argument is out of range, or more than 10**9 steps would stay within the target.
    """
    target_epsilon = positive(target_epsilon=target_epsilon)
    noise_multiplier = positive(noise_multiplier=noise_multiplier)
    setting = Setting(sample_rate, sampling, neighboring, dataset_size, max_batch_size)
    delta, accountant = open_fraction(delta=delta), one_of(ACCOUNTANTS, accountant=accountant)
    event = setting.event(noise_multiplier)
    found = affordable([], event, max_epsilon=target_epsilon, delta=delta, accountant=accountant)
    if found == MOST_STEPS:
        raise ValueError(
            f"more than {MOST_STEPS} steps stay within target_epsilon={target_epsilon!r} at "
            f"noise_multiplier={noise_multiplier!r}, sample_rate={sample_rate!r} and delta={delta!r}; lower one of them"
        )
    return found


def affordable(
    spent: Iterable[Event],
    event: Event,
    *,
    max_epsilon: float,
    delta: float,
    most: int = MOST_STEPS,
    accountant: str = "pld",
) -> int:
    """How many of ``event``, up to ``most``, stay within ``max_epsilon`` at ``delta``, together with ``spent``.

    It takes half a dozen evaluations of epsilon, one when ``most`` is affordable.
    """
    spent = list(spent)

    @cache
    def excess(count: int, accountant: str = accountant) -> float:
        return _excess([*spent, replace(event, count=count)], max_epsilon, delta, accountant)

    start = 1
    if all("rdp" in accountants_for(each) for each in (event, *spent)):
        # Rényi divergences take a millisecond, and are not far off.
        start = max(1, bisect_right(range(1, most + 1), 0.0, key=partial(excess, accountant="rdp")))
    if not most:
        return 0
    many, fits = _bracket(lambda x: excess(round(math.exp(-x))), -math.log(start), -math.log(most), 0.0)
    if many is None or fits is None:
        return 0 if fits is None else most
    return round(_last_within(lambda x: excess(round(x)), math.exp(-many), math.exp(-fits), 0.5))


def _excess(events: Sequence[Event], target: float, delta: float, accountant: str) -> float:
    """Epsilon above the target, finite so that a root finder can use it."""
    return min(epsilon_of(events, delta=delta, accountant=accountant) - target, 1e6)


def _gaussian_mu(target: float, delta: float) -> float:
    """Sensitivity over noise of the one Gaussian release that spends the target: a start (Dong et al. 2019)."""
    from dp_accounting import gaussian_mechanism

    return 1.0 / gaussian_mechanism.get_sigma_gaussian(min(target, MOST_TO_START_FROM), delta)


def _bracket(
    excess: Callable[[float], float], start: float, low: float, high: float
) -> tuple[float | None, float | None]:
    """Points around the root of a falling ``excess``: (positive there, not positive there); None beyond a limit."""
    here, step = min(max(start, low), high), 0.1
    while True:
        within = excess(here) <= 0
        if here == (low if within else high):
            return (None, here) if within else (here, None)
        there = max(here - step, low) if within else min(here + step, high)
        if (excess(there) <= 0) != within:
            return (there, here) if within else (here, there)
        here, step = there, 2 * step


def _last_within(excess: Callable[[float], float], outside: float, within: float, tolerance: float) -> float:
    """The point nearest the root of ``excess`` where it was found not positive, at most ``tolerance`` away."""
    seen: dict[float, float] = {}
    scipy.optimize.brentq(lambda x: seen.setdefault(x, excess(x)), outside, within, xtol=tolerance)
    return min((x for x, value in seen.items() if value <= 0), key=lambda x: abs(x - outside))
