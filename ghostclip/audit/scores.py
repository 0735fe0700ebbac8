"""The adversary's best score for a canary, from what it saw along the canary's direction."""

from __future__ import annotations

import numpy as np

__all__ = ["log_ratios"]


def log_ratios(seen: np.ndarray, sample_rate: float, noise_multiplier: float) -> np.ndarray:
    """Log-likelihood ratios of "in" over "out", of the same shape; those of independent releases add up.

    "Out" is N(0, s^2) and "in" is (1 - q) N(0, s^2) + q N(1, s^2): no test is better than one on the ratio's sum
    (Neyman, Pearson 1933).

    Args:
        seen: released sums along the canary's direction, in units of the clipping bound.
        sample_rate: q, the probability of the canary to be in a release.
        noise_multiplier: s.
    """
    exponent = (2 * seen - 1) / (2 * noise_multiplier**2)
    return exponent if sample_rate == 1 else np.logaddexp(np.log1p(-sample_rate), np.log(sample_rate) + exponent)
