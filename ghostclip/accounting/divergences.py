"""Rényi divergences of events, by dp-accounting, and what they say of epsilon."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import scipy

from ghostclip.events import FixedSizeGaussian, SampledRelease, Selection, TruncatedGaussian

__all__ = ["as_dp_event", "deltas_by_divergences", "divergences_of", "epsilon_by_divergences"]

# Of the truncated negative binomial distribution, as dp-accounting has it: Poisson is its limit.
SHAPES: dict[str | float, float] = {"poisson": math.inf, "geometric": 1.0, "logarithmic": 0.0}
# A relative step by which a bound is rounded up where it was found by iteration.
ROUNDING = 1e-7
# A bound that isn't found by then is none.
MOST_ROUNDS = 1000


def as_dp_event(event: SampledRelease | Selection) -> Any:
    """dp-accounting's event for one release, for its RDP accountant under the event's own relation.

    Its noise multipliers are relative to the bound on one example's term but for samples without replacement, where
    they are relative to what the sum can move by: twice the bound, so half the noise multiplier.
    """
    import dp_accounting

    if isinstance(event, Selection):
        run = [dp_accounting.SelfComposedDpEvent(as_dp_event(each), each.count) for each in event.events]
        shape = SHAPES.get(event.distribution, event.distribution)
        return dp_accounting.dp_event.RepeatAndSelectDpEvent(
            dp_accounting.ComposedDpEvent(run), event.expected_runs, shape
        )
    rate = event.sample_rate
    if not isinstance(event, FixedSizeGaussian):
        return dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(event.noise_multiplier))
    gaussian = dp_accounting.GaussianDpEvent(event.noise_multiplier / 2)
    if event.relation == "add_or_remove_one":
        return dp_accounting.PoissonSampledDpEvent(rate, gaussian)
    drawn, among = float(rate).as_integer_ratio()
    return dp_accounting.SampledWithoutReplacementDpEvent(among, drawn, gaussian)


def epsilon_by_divergences(events: Sequence[SampledRelease | Selection], delta: float) -> float:
    """Epsilon of at least one event, all with noise.

    A truncated Poisson sample differs from one that isn't with the probability of a cut, so whatever it is used for
    differs by at most that in total variation. Over both neighbours and all releases that adds (1 + exp(epsilon)) times
    the sum of these probabilities to delta.
    """
    total, cuts = _added_up(events)
    found = _epsilon_at(total, delta)
    if cuts == 0:
        return found
    for _ in range(MOST_ROUNDS):
        tried = found * (1 + ROUNDING) + ROUNDING
        left = delta - cuts * (1 + math.exp(min(tried, 700.0)))
        found = _epsilon_at(total, left) if left > 0 else math.inf
        if found <= tried:
            return tried
        if found == math.inf:
            break
    return math.inf


def deltas_by_divergences(events: Sequence[SampledRelease | Selection], epsilons: Sequence[float]) -> np.ndarray:
    """Delta at each of several ``epsilons`` of at least one event, all with noise."""
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    total, cuts = _added_up(events)
    with _without_remarks():
        deltas = [rdp.compute_delta(rdp.DEFAULT_RDP_ORDERS, total, epsilon)[0] for epsilon in epsilons]
    return np.minimum(np.array(deltas) + cuts * (1 + np.exp(epsilons)), 1.0)


def divergences_of(events: Sequence[SampledRelease]) -> np.ndarray:
    """Rényi divergences of at least one event, all with noise, at the orders that epsilons are computed from.

    inf at all orders where a sample may be cut down: what that adds to delta isn't in the divergences.
    """
    total, cuts = _added_up(events)
    return np.full_like(total, math.inf) if cuts else total


def _added_up(events: Sequence[SampledRelease | Selection]) -> tuple[np.ndarray, float]:
    """The divergences of all events together, and the sum of the probabilities of cuts."""
    with _without_remarks():
        total = sum(event.count * _of_one_release(_once(event)) for event in events)
    cuts = sum(
        event.count * float(scipy.stats.binom.sf(event.max_batch_size, event.dataset_size, event.sample_rate))
        for event in events
        if isinstance(event, TruncatedGaussian)
    )
    return np.asarray(total), float(cuts)


def _once(event: SampledRelease | Selection) -> SampledRelease | Selection:
    """With a count of 1, and the same for every unit of privacy."""
    return replace(event, count=1) if isinstance(event, Selection) else replace(event, count=1, unit="example")


@lru_cache(maxsize=64)
def _of_one_release(event: SampledRelease | Selection) -> np.ndarray:
    from dp_accounting import NeighboringRelation, rdp

    accountant = rdp.RdpAccountant(neighboring_relation=NeighboringRelation[event.relation.upper()])
    return accountant.compose(as_dp_event(event)).rdp


def _epsilon_at(divergences: Any, delta: float) -> float:
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    with _without_remarks():
        return float(rdp.compute_epsilon(rdp.DEFAULT_RDP_ORDERS, divergences, delta)[0])


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
