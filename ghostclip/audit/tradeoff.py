"""The trade-off curve of composed releases: how few errors of one kind are possible given those of the other."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

__all__ = ["composed_false_negatives"]

INTERVAL = 4e-3  # of privacy losses; the curve stays a lower bound
GRID = np.concatenate([np.linspace(0.0, 4.0, 401), np.linspace(4.05, 40.0, 720)])


def composed_false_negatives(false_positives: float, noise: float, sample_rate: float, steps: int) -> float:
    """The least false negative rate of any test with that false positive rate, as a lower bound by PLD.

    f(a) = max over epsilon of max(1 - delta - e^epsilon a, e^-epsilon (1 - delta - a)), 0 at least, with
    delta = delta(epsilon) of the mechanism (Wasserman, Zhou 2010; Dong, Roth, Su 2019, proposition 2.12).

    Args:
        false_positives: a, in [0, 1].
        noise: the noise multiplier of each release.
        sample_rate: the probability of the canary to be in each release.
        steps: how many releases the test sees.
    """
    deltas = _deltas(noise, sample_rate, steps)
    one = 1.0 - deltas - np.exp(GRID) * false_positives
    other = np.exp(-GRID) * (1.0 - deltas - false_positives)
    return float(max(one.max(), other.max(), 0.0))


@lru_cache(maxsize=64)
def _deltas(noise: float, sample_rate: float, steps: int) -> np.ndarray:
    """delta(epsilon) on the grid: upper bounds, for both directions."""
    from dp_accounting.pld import privacy_loss_distribution

    once = privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=sample_rate, value_discretization_interval=INTERVAL
    )
    return np.asarray(once.self_compose(steps).get_delta_for_epsilon(GRID))
