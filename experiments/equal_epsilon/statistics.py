"""Noisy sufficient statistics: ridge regression from one release of X^T X and one of X^T Y (Wang 2018, AdaSSP).

Rows of X have norm at most 1, labels Y are one-hot. One example moves X^T X by x x^T and X^T Y by x y^T, whose
Frobenius norms are at most 1. X^T X is symmetric: its entries off the diagonal count twice in that norm, so they get
noise of standard deviation sigma / sqrt(2). AdaSSP also releases the least eigenvalue of X^T X. Here the features are
about as many as the examples and it is close to 0, its public lower bound: the ridge is that of AdaSSP for 0.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

import ghostclip
from ghostclip import accounting
from ghostclip.datasets import Data
from ghostclip.events import SampledGaussian

__all__ = ["RIDGES", "accuracy_of_statistics", "noise_of_each"]

# What it is tuned over, in units of AdaSSP's ridge.
RIDGES = (0.02, 0.1, 0.5)
MEAN_SHARE = 0.1
FAILING = 0.05  # probability with which AdaSSP's ridge may be too small


@cache
def noise_of_each(epsilon: float, delta: float, share: float = 0.0) -> tuple[float, float | None]:
    """Noise multipliers of both releases and of a private mean with this share of the privacy, charged together."""

    def of_mean(noise: float) -> float:
        return noise * math.sqrt((1.0 - share) / (2 * share))

    def events(noise: float) -> list[SampledGaussian]:
        return [SampledGaussian(1.0, noise, 2), *([SampledGaussian(1.0, of_mean(noise))] if share else [])]

    noise = accounting.noise_for(events, target_epsilon=epsilon, delta=delta)
    return noise, of_mean(noise) if share else None


def accuracy_of_statistics(
    epsilon: float, factor: float, data: Data, seed: int, *, centred: bool, delta: float = 1e-5
) -> float:
    """Test accuracy of the ridge regression, its ridge ``factor`` times AdaSSP's.

    Args:
        epsilon, delta: what all releases spend together.
        factor: one of RIDGES.
        data: features of unit norm and labels.
        seed: of the noise, which protects nobody and has the size of private noise.
        centred: a private mean is released first, and taken off; rows are brought to norm 1 again.
    """
    noise, mean_noise = noise_of_each(epsilon, delta, MEAN_SHARE if centred else 0.0)
    (train, labels), (test, expected) = (
        (part.tensors[0].double(), part.tensors[1]) for part in (data.train, data.test)
    )
    if mean_noise is not None:
        mean = ghostclip.private_mean(train, noise_multiplier=mean_noise, noise="test", seed=2 * seed + 1).mean
        train, test = F.normalize(train - mean), F.normalize(test - mean)
    weights = ridge(train, labels, data.classes, noise, (factor, 2 * seed))
    return float(((test @ weights).argmax(1) == expected).float().mean())


def ridge(features: Tensor, labels: Tensor, classes: int, noise: float, drawn: tuple[float, int]) -> Tensor:
    """Weights [d, classes] from noisy statistics of features [N, d]; rows longer than 1 are cut."""
    (factor, seed), d = drawn, features.shape[1]
    random = torch.Generator().manual_seed(seed)
    features = features / features.norm(dim=1, keepdim=True).clamp(min=1.0)
    targets = F.one_hot(labels, classes).to(features.dtype)
    second = features.T @ features + noise * symmetric_noise(d, random)
    cross = features.T @ targets + noise * torch.randn(d, classes, generator=random, dtype=features.dtype)
    strength = factor * noise * math.sqrt(d * math.log(2 * d**2 / FAILING))
    values, vectors = torch.linalg.eigh(second)
    return vectors @ ((vectors.T @ cross) / (values.clamp(min=0.0) + strength)[:, None])


def symmetric_noise(size: int, random: torch.Generator) -> Tensor:
    """A symmetric matrix: standard deviation 1 on the diagonal, 1 / sqrt(2) off it."""
    drawn = torch.randn(size, size, generator=random, dtype=torch.float64)
    upper = drawn.triu(1) / math.sqrt(2)
    return upper + upper.T + drawn.diag().diag()
