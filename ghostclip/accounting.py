"""How much privacy a run spends, by dp-accounting's accountants behind argument checks.

"pld" composes privacy loss distributions numerically (Koskela et al. 2020; Doroshenko et al. 2022), "rdp" adds up
Rényi divergences (Mironov 2017; Mironov et al. 2019). Both give upper bounds; PLD's is tighter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from scipy.optimize import brentq

from ghostclip.events import Event, SampledGaussian, merged
from ghostclip.validate import fraction, one_of, open_fraction, positive, whole

__all__ = ["ACCOUNTANTS", "epsilon", "epsilon_of", "max_steps", "noise_multiplier"]

ACCOUNTANTS = ("pld", "rdp")
LEAST_NOISE, MOST_NOISE = 1e-2, 1e12
MOST_STEPS = 10**9
PLD_INTERVAL = 1e-4
# Total divergence up to which PLD's grid is dp-accounting's own; beyond any useful epsilon.
WIDE_LOSS = 20.0


def epsilon(*, noise_multiplier: float, sample_rate: float, steps: int, delta: float, accountant: str = "pld") -> float:
    """Epsilon at ``delta`` of ``steps`` Poisson-sampled Gaussian releases; neighbours differ by one example's presence.

    Args:
        noise_multiplier: standard deviation of the noise over the sensitivity; finite, > 0.
        sample_rate: probability of each example to be in a batch; in (0, 1].
        steps: a whole number >= 0; zero steps cost nothing.
        delta: in (0, 1).
        accountant: "pld" or "rdp".

    Returns:
        An upper bound; inf where the accountant can't bound it (PLD below a delta of about 1e-15).

    Raises:
        ValueError, TypeError: an argument is out of range; the message names it.
    """
    event = SampledGaussian(
        fraction(sample_rate=sample_rate), positive(noise_multiplier=noise_multiplier), whole(steps=steps)
    )
    return epsilon_of([event], delta=delta, accountant=accountant)


def epsilon_of(events: Iterable[Event], *, delta: float, accountant: str = "pld") -> float:
    """Epsilon at ``delta`` of everything in ``events`` together: 0 for no events, inf when one of them had no noise.

    Each distinct mechanism is composed once, with its count.

    Raises:
        ValueError, TypeError: an argument is out of range; the message names it.
    """
    open_fraction(delta=delta)
    one_of(ACCOUNTANTS, accountant=accountant)
    happened = merged(events)
    if not happened:
        return 0.0
    if any(type(event) is not SampledGaussian or event.relation != "add_or_remove_one" for event in happened):
        raise NotImplementedError(f"only Poisson samples under add_or_remove_one are accounted for; got {happened}")
    if any(event.noise_multiplier == 0 for event in happened):
        return math.inf
    with _without_remarks():
        spent = _fresh_accountant(accountant, happened)
        for event in happened:
            spent.compose(_as_dp_event(event), event.count)
        return float(spent.get_epsilon(delta))


def noise_multiplier(
    *, target_epsilon: float, sample_rate: float, steps: int, delta: float, accountant: str = "pld"
) -> float:
    """The least noise (to a relative 1e-5) with which ``steps`` releases stay within ``target_epsilon`` at ``delta``.

    Args as in `epsilon`; ``target_epsilon`` is finite and > 0.

    Returns:
        A noise multiplier for which `epsilon` gives at most ``target_epsilon``, 0.01 where less would do; 0.0 for zero
        steps, which need none.

    Raises:
        ValueError, TypeError: an argument is out of range, or no noise reaches the target.
    """
    target_epsilon = positive(target_epsilon=target_epsilon)
    sample_rate, steps = fraction(sample_rate=sample_rate), whole(steps=steps)
    delta, accountant = open_fraction(delta=delta), one_of(ACCOUNTANTS, accountant=accountant)
    if steps == 0:
        return 0.0

    @cache
    def excess(log_noise: float) -> float:
        event = SampledGaussian(sample_rate, math.exp(log_noise), steps)
        return _excess(event, target_epsilon, delta, accountant)

    mu = _gaussian_mu(target_epsilon, delta)
    start = -0.5 * math.log(math.log1p((mu / sample_rate) ** 2 / steps))
    few, enough = _bracket(excess, start, math.log(LEAST_NOISE), math.log(MOST_NOISE))
    if enough is None:
        raise ValueError(
            f"target_epsilon={target_epsilon!r} can't be reached: {accountant!r} gives more for steps={steps} at "
            f"sample_rate={sample_rate!r} and delta={delta!r}, however large the noise; raise target_epsilon or "
            "delta, or take fewer steps"
        )
    if few is None:
        return math.exp(enough)
    return math.exp(_last_within(excess, few, enough, 1e-5))


def max_steps(
    *, target_epsilon: float, noise_multiplier: float, sample_rate: float, delta: float, accountant: str = "pld"
) -> int:
    """The most steps that stay within ``target_epsilon`` at ``delta``: one more would exceed it. 0 when one step does.

    Args as in `epsilon`; ``target_epsilon`` is finite and > 0.

    Raises:
        ValueError, TypeError: an argument is out of range, or more than 10**9 steps would stay within the target.
    """
    target_epsilon, sample_rate = positive(target_epsilon=target_epsilon), fraction(sample_rate=sample_rate)
    noise_multiplier = positive(noise_multiplier=noise_multiplier)
    delta, accountant = open_fraction(delta=delta), one_of(ACCOUNTANTS, accountant=accountant)

    @cache
    def excess_of(steps: int) -> float:
        event = SampledGaussian(sample_rate, noise_multiplier, steps)
        return _excess(event, target_epsilon, delta, accountant)

    mu = _gaussian_mu(target_epsilon, delta)
    start = 2 * math.log(mu / sample_rate) - math.log(math.expm1(min(noise_multiplier**-2, 700.0)))
    many, fits = _bracket(lambda x: excess_of(round(math.exp(-x))), -start, -math.log(MOST_STEPS), 0.0)
    if fits is None:
        return 0
    if many is None:
        raise ValueError(
            f"more than {MOST_STEPS} steps stay within target_epsilon={target_epsilon!r} at "
            f"noise_multiplier={noise_multiplier!r}, sample_rate={sample_rate!r} and delta={delta!r}; lower one of them"
        )
    return round(_last_within(lambda x: excess_of(round(x)), math.exp(-many), math.exp(-fits), 0.5))


@contextmanager
def _without_remarks() -> Iterator[None]:
    """Without dp-accounting's remarks on Rényi orders it leaves out, which make the bound no less valid."""
    from absl import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _excess(event: SampledGaussian, target: float, delta: float, accountant: str) -> float:
    """Epsilon above the target, finite so that a root finder can use it."""
    return min(epsilon_of([event], delta=delta, accountant=accountant) - target, 1e6)


def _gaussian_mu(target: float, delta: float) -> float:
    """Sensitivity over noise of the one Gaussian release that spends the target: a start (Dong et al. 2019)."""
    from dp_accounting import gaussian_mechanism

    return 1.0 / gaussian_mechanism.get_sigma_gaussian(target, delta)


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
    best = within

    def watched(x: float) -> float:
        nonlocal best
        value = excess(x)
        if value <= 0 and abs(x - outside) < abs(best - outside):
            best = x
        return value

    brentq(watched, outside, within, xtol=tolerance)
    return best


def _fresh_accountant(accountant: str, events: list[Event]) -> Any:
    from dp_accounting import pld, rdp

    if accountant == "rdp":
        return rdp.RdpAccountant()
    loss = sum(event.count * _second_divergence(event) for event in events)
    # A coarser grid still gives an upper bound; without it a loss of thousands would need gigabytes.
    return pld.PLDAccountant(value_discretization_interval=PLD_INTERVAL * max(1.0, loss / WIDE_LOSS))


def _second_divergence(event: Event) -> float:
    """Rényi divergence of order 2 of one release: log(1 + q^2 (exp(1/sigma^2) - 1)) (Mironov et al. 2019)."""
    exponent = event.noise_multiplier**-2
    if exponent > 500:
        return exponent + 2 * math.log(event.sample_rate)
    return math.log1p(event.sample_rate**2 * math.expm1(exponent))


def _as_dp_event(event: Event) -> Any:
    import dp_accounting

    return dp_accounting.PoissonSampledDpEvent(event.sample_rate, dp_accounting.GaussianDpEvent(event.noise_multiplier))
