"""What a training run claims to spend, and what it would spend if its noise or its sampling were another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from ghostclip import accounting

__all__ = ["Claim"]

NOTHING_SHOWN = 1e4  # a noise multiplier so large that its epsilon is as good as 0


@dataclass(frozen=True)
class Claim:
    """``steps`` Poisson-sampled Gaussian releases, neighbours differing by one example's presence.

    Attributes:
        noise_multiplier: standard deviation of the noise over the sensitivity, > 0.
        sample_rate: probability of each example to be in a batch.
        steps: number of releases.
        delta: where epsilon is reported.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int
    delta: float

    @property
    def epsilon(self) -> float:
        """What is claimed, by PLD."""
        return _epsilon(self.noise_multiplier, self.sample_rate, self.steps, self.delta)

    def with_noise(self, noise_multiplier: float, sample_rate: float | None = None) -> float:
        """Epsilon if the noise (and the rate) were these: inf for no noise, 0 for endless noise.

        By the same accountant, whose curve is monotone in both: an audited epsilon passes the claimed one exactly where
        the audited noise falls below the claimed one (or the rate rises above it). For full batches it is exact.
        """
        rate = self.sample_rate if sample_rate is None else sample_rate
        if noise_multiplier >= NOTHING_SHOWN or rate <= 0:
            return 0.0
        if noise_multiplier <= 0:
            return math.inf
        if rate == 1.0:
            return _exact(noise_multiplier / math.sqrt(self.steps), self.delta)
        return _epsilon(noise_multiplier, rate, self.steps, self.delta)


@lru_cache(maxsize=256)
def _epsilon(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> float:
    """By PLD; the same claim is asked about again and again."""
    return accounting.epsilon(noise_multiplier=noise_multiplier, sample_rate=sample_rate, steps=steps, delta=delta)


def _exact(noise_multiplier: float, delta: float) -> float:
    """Of one Gaussian release, without any error of composition (Balle, Wang 2018)."""
    from dp_accounting import gaussian_mechanism

    return float(gaussian_mechanism.get_epsilon_gaussian(noise_multiplier, delta))
