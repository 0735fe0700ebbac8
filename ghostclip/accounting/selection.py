"""Epsilon of the best of a random number of runs (Papernot and Steinke 2022), by dp-accounting.

Example: one run of 1,000 steps at rate 0.01 with noise multiplier 1 spends epsilon 1.83 at delta 1e-5. The best of a
number of runs with a Poisson distribution of mean 10 spends 4.33, and ten such runs added up spend 6.19.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import scipy

from ghostclip.accounting.divergences import divergences_of
from ghostclip.accounting.spent import LEAST_NOISE, Setting, epsilon_of, sampled_releases
from ghostclip.events import Event, SampledGaussian, SampledRelease, Selection
from ghostclip.validate import positive, whole

# Between which log(-log(gamma)) lies: means from 1 + 1e-17 to 1e300.
DECAYS = math.log(1e-17), math.log(700.0)
# By how much, of its size, a divergence may be off by rounding.
ROUNDING = 1e-6

__all__ = ["covers", "selection_epsilon", "success_probability"]


def selection_epsilon(
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    delta: float,
    expected_runs: float,
    distribution: str | float = "poisson",
) -> float:
    """Epsilon at ``delta`` of the best of a random number of runs, by dp-accounting's Rényi divergences.

    A number of runs is drawn, of which only the best one is released. Each run may have settings of its own, drawn
    independently of the data; all have the same noise, rate and steps. Papernot and Steinke 2022, theorem 6 (Poisson)
    and theorem 2 (truncated negative binomial).

    Args:
        noise_multiplier, sample_rate, steps, delta: of each run, as for `epsilon`.
        expected_runs: mean of the number of runs; finite, >= 1.
        distribution: of that number: "poisson" (which may be 0), "geometric", "logarithmic", or a number > 0, the
            shape of a truncated negative binomial distribution. 1 is geometric, and towards 0 it is logarithmic.

    Returns:
        An upper bound; 0 for zero steps.

    Raises:
        ValueError, TypeError: an argument is out of range; the message names it.
    """
    positive(noise_multiplier=noise_multiplier)
    event = Setting(sample_rate).event(noise_multiplier, whole(steps=steps))
    assert isinstance(event, SampledGaussian)
    return epsilon_of([Selection((event,), expected_runs, distribution)], delta=delta)


def covers(run: SampledGaussian, spent: Iterable[Event]) -> bool:
    """Whether the epsilon of a search over runs that are ``run`` holds for runs that ``spent``, too.

    Papernot and Steinke's theorems 2 and 6 bound the search by a run's Rényi divergences at several orders, so what was
    spent may not have a larger one at any of them. A smaller epsilon at one delta is not enough. For example, 20 steps
    at rate 0.1 with noise multiplier 3 spend epsilon 0.62 at delta 1e-5, and 50 steps at rate 0.001 with noise
    multiplier 0.605 spend less. The best of 5 runs of the first kind spends 1.13, and of the second kind 2.59.

    Args:
        run: what each run is charged as.
        spent: by a run, about the same neighbours.
    """
    releases, charged = sampled_releases(spent), sampled_releases([run])
    if not releases or (len(releases) == 1 and _is_part(releases[0], run)):
        return True
    if any(each.noise_multiplier < LEAST_NOISE for each in [*releases, *charged]):
        return False
    # Divergences grow with the order, so that one which dp-accounting can't compute is at most the next one.
    found = np.minimum.accumulate(divergences_of(releases)[::-1])[::-1]
    return bool(np.all(found <= divergences_of(charged) * (1.0 + ROUNDING)))


def _is_part(release: SampledRelease, run: SampledGaussian) -> bool:
    """Whether nothing has to be computed: no more steps than the run's, at no higher rate, with no less noise."""
    less_noise = release.noise_multiplier < run.noise_multiplier
    more = release.count > run.count or release.sample_rate > run.sample_rate
    return isinstance(release, SampledGaussian) and not (less_noise or more)


def success_probability(mean: float, shape: float) -> float:
    """gamma of the truncated negative binomial distribution of that mean (Papernot and Steinke 2022, definition 1).

    The mean is shape (1 / gamma - 1) / (1 - gamma^shape), and (1 / gamma - 1) / log(1 / gamma) for shape 0.

    Args:
        mean: >= 1.
        shape: >= 0; 1 is the geometric distribution, 0 the logarithmic one.
    """
    if mean == 1.0:
        return 1.0

    def excess(log_decay: float) -> float:
        decay = math.exp(log_decay)  # -log(gamma)
        power = -math.expm1(-shape * decay) / shape if shape else decay
        return math.log(math.expm1(decay) / power / mean)

    return math.exp(-math.exp(scipy.optimize.brentq(excess, *DECAYS, xtol=1e-13)))
