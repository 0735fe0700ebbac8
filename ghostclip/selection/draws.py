"""The number of runs and their settings, drawn before the first run: nothing of the data or of a score enters."""

from __future__ import annotations

import numpy as np

from ghostclip.accounting import success_probability
from ghostclip.accounting.divergences import SHAPES

__all__ = ["draw_runs", "draw_settings"]


def draw_runs(expected_runs: float, distribution: str | float) -> int:
    """The number of runs, from the operating system's entropy; arguments as `ghostclip.events.Selection` has them.

    Poisson, or by inversion from the truncated negative binomial distribution, k = 1, 2, ...
    (Papernot and Steinke 2022, definition 1):

        P[K = 1] = shape (1 - gamma) / (gamma^-shape - 1),    P[K = k + 1] = P[K = k] (1 - gamma) (k + shape) / (k + 1).
    """
    generator = np.random.default_rng()
    if distribution == "poisson":
        return int(generator.poisson(expected_runs))
    shape = SHAPES[distribution] if isinstance(distribution, str) else distribution
    gamma = success_probability(expected_runs, shape)
    left, count = float(generator.random()), 1
    log_gamma = np.log(gamma)
    probability = (1.0 - gamma) / (np.expm1(-shape * log_gamma) / shape if shape else -log_gamma) if gamma < 1 else 1.0
    while left >= probability > 0.0:
        left -= probability
        probability *= (1.0 - gamma) * (count + shape) / (count + 1)
        count += 1
    return count


def draw_settings(runs: int, candidates: int) -> list[int]:
    """The number of each run's candidate, uniform and independent, from the operating system's entropy."""
    return np.random.default_rng().integers(candidates, size=runs).tolist()
