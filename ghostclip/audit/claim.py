"""What a training run claims to spend, and what it would spend if its noise or its sampling were another."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
        return self.with_noise(self.noise_multiplier)

    def with_noise(self, noise_multiplier: float, sample_rate: float | None = None) -> float:
        """Epsilon by the same accountant if the noise (and the rate) were these: inf for no noise, 0 for endless noise.

        The accountant's curve is monotone in both, so an audited epsilon passes the claimed one exactly where the
        audited noise falls below the claimed one (or the rate rises above it).
        """
        rate = self.sample_rate if sample_rate is None else sample_rate
        if noise_multiplier >= NOTHING_SHOWN or rate <= 0:
            return 0.0
        if noise_multiplier <= 0:
            return math.inf
        return accounting.epsilon(
            noise_multiplier=noise_multiplier, sample_rate=rate, steps=self.steps, delta=self.delta
        )
