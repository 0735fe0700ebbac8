"""Privacy loss distributions of events, by dp-accounting's construction and composition of them.

Releases over all of the data are Gaussian, and so are several of them together: their epsilon has a closed form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from typing import Any

import numpy as np
import scipy

from ghostclip.events import FixedSizeGaussian, SampledGaussian, SampledRelease, TruncatedGaussian

__all__ = [
    "PLD_INTERVAL",
    "composed",
    "epsilon_by_losses",
    "grid_interval",
    "is_gaussian",
    "lost_in_transforms",
    "of_one_release",
]

PLD_INTERVAL = 1e-4
# Total divergence up to which the grid is dp-accounting's own; beyond any useful epsilon.
WIDE_LOSS = 20.0
# More compositions than AT_ONCE are made step by step. Beyond BY, dp-accounting's sparse distributions of a coarse grid
# take seconds, since it raises their number of points to the power of the compositions, an integer of a million digits.
AT_ONCE, BY = 10**6, 1000
# The closed form subtracts probabilities that are nearly alike where epsilon is small. From here on it is precise to
# 1e-9, and rounded up by more.
SMALLEST, ROUNDING = 0.01, 1e-8
# A power of a Fourier transform is off by a rounding for each factor: deltas of 1,000 to 10^6 releases by 0.1 to 0.8 of
# that, measured beside extended precision.
OFF_BY = 2.0**-52


def epsilon_by_losses(events: Sequence[SampledRelease], delta: float, coarser: int = 1) -> float:
    """Epsilon of at least one event, all with noise, on a grid ``coarser`` times as wide; of Gaussians exactly.

    inf where losses are so large that floating point can't say by how much, and where rounding may hide the delta.
    """
    if all(map(is_gaussian, events)) and (found := _by_formula(events, delta)) > SMALLEST:
        return found
    try:
        loss = composed(events, coarser * grid_interval(events))
        left = delta - lost_in_transforms(sum(event.count for event in events))
        return float(loss.get_epsilon_for_delta(left)) if left > 0 else math.inf
    except OverflowError:
        return math.inf


def lost_in_transforms(releases: int) -> float:
    """By how much the delta of so many releases may come out too small: transforms are rounded.

    10,000 steps at rate 0.01 with noise multiplier 1 spend epsilon 10.35 at delta 1e-12. Without this it was 10.28.
    """
    return OFF_BY * releases


def is_gaussian(event: SampledRelease) -> bool:
    """Whether it is a release over all of the data, which has a closed form."""
    return type(event) is SampledGaussian and event.sample_rate == 1


def _by_formula(events: Sequence[SampledRelease], delta: float) -> float:
    """Epsilon of Gaussian releases.

    With noise z_k they tell as much as one of noise (sum of z_k^-2)^-1/2 (Dong, Roth, Su 2019, "Gaussian differential
    privacy", corollary 3.3), whose epsilon is that of Balle and Wang 2018, "Improving the Gaussian mechanism".
    """
    from dp_accounting import gaussian_mechanism

    noise = sum(event.count / event.noise_multiplier**2 for event in events) ** -0.5
    if events[0].relation == "replace_one":
        noise /= 2
    with np.errstate(divide="ignore"):  # the logarithm of a difference that is rounded to 0
        return float(gaussian_mechanism.get_epsilon_gaussian(noise, delta)) * (1.0 + ROUNDING)


def grid_interval(events: Sequence[SampledRelease]) -> float:
    """The distance of two losses on the grid: a coarser one still gives an upper bound.

    Without it a loss of thousands would need gigabytes.
    """
    loss = sum(event.count * _second_divergence(event) for event in events)
    return PLD_INTERVAL * max(1.0, loss / WIDE_LOSS)


def composed(events: Sequence[SampledRelease], interval: float) -> Any:
    """The loss distribution of at least one event, with their counts."""
    parts = [_composed(of_one_release(replace(event, count=1, unit="example"), interval), event.count)
             for event in events]  # fmt: skip
    return reduce(lambda left, right: left.compose(right), parts)


def _composed(loss: Any, count: int) -> Any:
    """The loss distribution of so many releases."""
    if count > BY:
        loss = _dense(loss)
    if count <= AT_ONCE:
        return loss.self_compose(count)
    many, rest = divmod(count, BY)
    most = _composed(loss.self_compose(BY), many)
    return most.compose(loss.self_compose(rest)) if rest else most


def _dense(loss: Any) -> Any:
    """The same distribution, whose composition doesn't raise its number of points to the power of the releases."""
    parts = [loss._pmf_remove] if loss._symmetric else [loss._pmf_remove, loss._pmf_add]
    return type(loss)(*(part.to_dense_pmf() for part in parts))


@lru_cache(maxsize=4)
def of_one_release(event: SampledRelease, interval: float) -> Any:
    """The loss distribution of one release; made anew it costs more than composing it a thousand times."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as distributions

    relation = NeighboringRelation[event.relation.upper()]
    grid = {"value_discretization_interval": interval}
    if isinstance(event, TruncatedGaussian):
        return distributions.from_truncated_subsampled_gaussian_mechanism(
            event.dataset_size,
            event.sample_rate,
            event.max_batch_size,
            event.noise_multiplier,
            neighboring_relation=relation,
            **grid,
        )
    sigma = event.noise_multiplier
    if isinstance(event, FixedSizeGaussian):
        if event.relation == "replace_one":
            return _without_replacement(sigma, event.sample_rate, interval)
        # Where an example is left out of the sample another one takes its place, so a sum moves by twice the bound; and
        # it is in the sample with the probability of a Poisson sample of that rate (Zhu, Dong, Wang 2022, on subsets).
        sigma /= 2
    return distributions.from_gaussian_mechanism(
        sigma, sampling_prob=event.sample_rate, neighboring_relation=relation, **grid
    )


def _without_replacement(noise_multiplier: float, rate: float, interval: float) -> Any:
    """The loss of a sample of fixed size where one example is replaced.

    The mechanism's delta at epsilon >= 0 is at most rate * delta_G(log(1 + (exp(epsilon) - 1) / rate)), with delta_G of
    the Gaussian mechanism that moves by twice the bound (Balle, Barthe, Gaboardi 2018, section 4): what removing an
    example from a Poisson sample gives. Replacing is symmetric, which fixes the delta at epsilon < 0: what adding one
    gives. Removal alone would compose to too small an epsilon (Lebeda et al. 2024).
    """
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

    remove, add = (
        GaussianPrivacyLoss(noise_multiplier / 2, sampling_prob=rate, adjacency_type=adjacency)
        for adjacency in (AdjacencyType.REMOVE, AdjacencyType.ADD)
    )
    end = math.ceil(remove.connect_dots_bounds().epsilon_upper / interval)
    epsilons = np.arange(end + 1) * interval
    deltas = np.concatenate([add.get_delta_for_epsilon(-epsilons[:0:-1]), remove.get_delta_for_epsilon(epsilons)])
    return PrivacyLossDistribution(
        pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -end, end, np.clip(deltas, 0.0, 1.0))
    )


def _second_divergence(event: SampledRelease) -> float:
    """About the Rényi divergence of order 2 of one release, which is about how wide its loss spreads.

    log(1 + q^2 (exp(1/sigma^2) - 1)) (Mironov et al. 2019), with half the sigma where the sum moves by twice the bound,
    and about four times as much between two Poisson samples that move apart.
    """
    sigma, twice = event.noise_multiplier, event.noise_multiplier / 2
    if isinstance(event, FixedSizeGaussian):
        return _poisson_divergence(event.sample_rate, twice)
    plain = _poisson_divergence(event.sample_rate, sigma) * (4 if event.relation == "replace_one" else 1)
    if not isinstance(event, TruncatedGaussian):
        return plain
    cut = scipy.stats.binom.sf(event.max_batch_size - 1, event.dataset_size - 1, event.sample_rate)
    moved = _poisson_divergence(event.sample_rate, twice)
    return plain if cut == 0 else max(plain + cut * (moved - plain), math.log(cut) + moved)


def _poisson_divergence(rate: float, sigma: float) -> float:
    exponent = sigma**-2
    if exponent > 500:
        return exponent + 2 * math.log(rate)
    return math.log1p(rate**2 * math.expm1(exponent))
