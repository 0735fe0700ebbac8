"""The other way round: the noise, or the number of steps, with which a setting stays within a target epsilon."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import scipy

from ghostclip.accounting.losses import is_gaussian
from ghostclip.accounting.spent import ACCOUNTANTS, Setting, accountants_for, sampled_releases
from ghostclip.accounting.targets import Target, target_of
from ghostclip.events import Event
from ghostclip.native.notices import slow_work
from ghostclip.validate import one_of, open_fraction, positive, whole

__all__ = ["affordable", "max_steps", "noise_for", "noise_multiplier"]

NOISE_LIMITS = math.log(1e-2), math.log(1e12)
MOST_STEPS = 10**9
# Of the logarithm of a noise multiplier, as is the first step of a search.
TOLERANCE, FIRST_STEP = 1e-5, 0.1
# A grid on which epsilon takes a tenth of the time. Its root is corrected until it moves by less than that.
COARSER, MOST_CORRECTIONS, NEARBY = 10, 4, 1e-4


def noise_multiplier(
    *,
    target_epsilon: float | None = None,
    target_advantage: float | None = None,
    sample_rate: float,
    steps: int,
    delta: float | None = None,
    accountant: str = "pld",
    sampling: str = "poisson",
    neighboring: str = "add_or_remove_one",
    dataset_size: int | None = None,
    max_batch_size: int | None = None,
    bands: int = 1,
) -> float:
    """The least noise multiplier that keeps ``steps`` releases within a target epsilon, or a target advantage.

    Args:
        target_epsilon: finite, > 0; with ``delta``.
        target_advantage: in (0, 1), in place of ``target_epsilon`` and ``delta``: the largest advantage of a membership
            attack (`Risk.advantage`), by PLD.
        sample_rate, steps, delta, accountant, sampling, neighboring, dataset_size, max_batch_size, bands: as for
            `epsilon`.

    Returns:
        A noise multiplier for which `epsilon` (or the advantage of `risk`) is at most the target. It is at most a
        relative 1e-5 above the least one, and at least 0.01; 0.0 for zero steps.

    Raises:
        ValueError, TypeError: an argument is out of range, both targets or none are given, or no noise reaches it.
    """
    setting = Setting(sample_rate, sampling, neighboring, dataset_size, max_batch_size, bands)
    steps = whole(steps=steps)
    target = target_of(target_epsilon, target_advantage, delta, accountant)
    return _noise_within(target, lambda noise: [setting.event(noise, steps)])


def noise_for(
    events_of: Callable[[float], Sequence[Event]], *, target_epsilon: float, delta: float, accountant: str = "pld"
) -> float:
    """The least noise multiplier for steps of any kind; `noise_multiplier` is for steps that are all alike.

    Args:
        events_of: noise multiplier -> the events that all steps together are charged as.
        target_epsilon, delta, accountant: as for `noise_multiplier`.

    Returns:
        As `noise_multiplier`.

    Raises:
        ValueError, TypeError: as `noise_multiplier`.
    """
    return _noise_within(target_of(target_epsilon, None, delta, accountant), events_of)


def _noise_within(target: Target, events_of: Callable[[float], Sequence[Event]]) -> float:
    """The least noise multiplier at which all events are within the target."""
    events = sampled_releases(events_of(1.0))
    if not events:
        return 0.0
    # RDP takes milliseconds, and so does the closed form for Gaussians.
    quick = target.accountant == "rdp" or (target.delta is not None and all(map(is_gaussian, events)))
    about = "looking for the least noise within %s; this takes seconds"
    with nullcontext() if quick else slow_work("calibrating the noise", about, target):
        return _least_noise(events_of, events, target)


def _least_noise(events_of: Callable[[float], Sequence[Event]], events: Sequence[Event], target: Target) -> float:
    """`_noise_within`, with the events at noise multiplier 1."""

    def excess(log_noise: float, coarser: int = 1) -> float:
        return target.excess(events_of(math.exp(log_noise)), coarser)

    steps = sum(event.count for event in events)
    rate = math.sqrt(sum(event.count * event.sample_rate**2 for event in events) / steps)
    start, step = -0.5 * math.log(math.log1p((target.mu / rate) ** 2 / steps)), FIRST_STEP
    if target.accountant == "pld":
        start, step = _start_by_coarse_grid(excess, start)
    few, enough = _bracket(excess, start, step, *NOISE_LIMITS)
    if enough is None:
        raise target.unreachable(steps, rate)
    if few is None:
        return math.exp(enough)
    return math.exp(_last_within(excess, few, enough, TOLERANCE))


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
    bands: int = 1,
) -> int:
    """The largest number of steps that stays within ``target_epsilon`` at ``delta``; 0 if one step exceeds it.

    Args:
        target_epsilon: finite, > 0.
        noise_multiplier, sample_rate, delta, accountant, sampling, neighboring, dataset_size, max_batch_size, bands:
            as for `epsilon`.

    Raises:
        ValueError, TypeError: an argument is out of range, or more than 10**9 steps would stay within the target.
    """
    target_epsilon = positive(target_epsilon=target_epsilon)
    noise_multiplier = positive(noise_multiplier=noise_multiplier)
    setting = Setting(sample_rate, sampling, neighboring, dataset_size, max_batch_size, bands)
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
    """The number of further steps, up to ``most``, that keep everything within ``max_epsilon`` at ``delta``.

    It takes about six evaluations of epsilon, or one if ``most`` steps are within.

    Args:
        spent: the events so far, with their counts.
        event: one further step, with a count of 1.
        max_epsilon: finite, > 0.
        delta, accountant: as for `epsilon`.
        most: the largest answer, >= 0.

    Raises:
        ValueError, TypeError: as `epsilon_of`.
    """
    spent = list(spent)

    def excess(count: int, accountant: str = accountant) -> float:
        return Target(max_epsilon, delta, accountant).excess([*spent, replace(event, count=count)])

    start = 1
    if all("rdp" in accountants_for(each) for each in (event, *spent)):
        # Rényi divergences take a millisecond, and are not far off.
        start = max(1, bisect_right(range(1, most + 1), 0.0, key=partial(excess, accountant="rdp")))
    if not most:
        return 0
    many, fits = _bracket(lambda x: excess(round(math.exp(-x))), -math.log(start), FIRST_STEP, -math.log(most), 0.0)
    if many is None or fits is None:
        return 0 if fits is None else most
    return round(_last_within(lambda x: excess(round(x)), math.exp(-many), math.exp(-fits), 0.5))


def _start_by_coarse_grid(excess: Callable[..., float], start: float) -> tuple[float, float]:
    """Where to look for the root of ``excess``, and the first step from there.

    Epsilon by a coarse grid of losses is too large by about the same amount at all nearby noise multipliers. So the
    coarse grid's root, corrected by the difference at the last root, is within the tolerance. Where it isn't, the
    search that follows takes longer, and its result is the same.
    """
    shift, step = 0.0, FIRST_STEP

    def estimate(log_noise: float) -> float:
        return excess(log_noise, COARSER) + shift

    for _ in range(MOST_CORRECTIONS):
        few, enough = _bracket(estimate, start, step, *NOISE_LIMITS)
        if few is None or enough is None:
            break
        root = _last_within(estimate, few, enough, TOLERANCE / 10)
        if shift and abs(root - start) < NEARBY:
            # One evaluation on either side of the root, less than the tolerance apart.
            return root + 0.45 * TOLERANCE, 0.9 * TOLERANCE
        start, step = root, 10 * NEARBY
        shift = excess(root) - excess(root, COARSER)
    return start, step


def _bracket(
    excess: Callable[[float], float], start: float, step: float, low: float, high: float
) -> tuple[float | None, float | None]:
    """Points around the root of a falling ``excess``: (positive there, not positive there); None beyond a limit.

    The first two are ``step`` apart, and each further step is twice as long.
    """
    here = min(max(start, low), high)
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
