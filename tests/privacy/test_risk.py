"""Bounds for membership attacks: the Gaussian mechanism in closed form, one step by thresholds, engine, edges."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from charged_steps import private, steps
from scipy import stats

from ghostclip import accounting
from ghostclip.accounting import risk_of
from ghostclip.accounting.losses import composed, grid_interval
from ghostclip.events import RELATIONS, FixedSizeGaussian, SampledGaussian, TruncatedGaussian

RATES = (0.0, 1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)
SETTING: dict[str, Any] = {"noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 1000}
TARGET: dict[str, Any] = {"target_advantage": 0.1, "sample_rate": 0.05, "steps": 100}


@pytest.mark.parametrize(("sigma", "count"), [(0.5, 1), (20.0, 100)])
def test_full_batches_are_the_gaussian_mechanism(sigma: float, count: int) -> None:
    """mu = sqrt(steps) / sigma: advantage 2 Phi(mu / 2) - 1, true positives Phi(Phi^-1(a) + mu) (Dong et al. 2019)."""
    found, mu = accounting.risk(noise_multiplier=sigma, sample_rate=1.0, steps=count), math.sqrt(count) / sigma
    assert found.advantage == pytest.approx(2 * stats.norm.cdf(mu / 2) - 1, abs=1e-7)
    for rate in RATES:
        exact = stats.norm.cdf(stats.norm.ppf(rate) + mu)
        assert exact - 1e-12 <= found.true_positive_rate(rate) <= exact + 1e-7


def best_attacks(sigma: float, rate: float) -> list[tuple[Any, Any]]:
    """(false-positive, true-positive rates) by threshold on one sampled release; its loss rises with it."""
    cuts = np.linspace(-40 * sigma, 1 + 40 * sigma, 200_001)
    there = [
        (1 - rate) * tail(cuts, 0, sigma) + rate * tail(cuts, 1, sigma) for tail in (stats.norm.sf, stats.norm.cdf)
    ]
    gone = [tail(cuts, 0, sigma) for tail in (stats.norm.sf, stats.norm.cdf)]
    return [(gone[0][::-1], there[0][::-1]), (there[1], gone[1])]


@pytest.mark.parametrize(("sigma", "rate"), [(0.6, 0.1), (2.0, 0.01)])
def test_one_step_is_the_better_of_both_orders_of_the_neighbours(sigma: float, rate: float) -> None:
    """At small false-positive rates presence is what is found out, at large ones absence."""
    found, (present, absent) = (
        accounting.risk(noise_multiplier=sigma, sample_rate=rate, steps=1),
        best_attacks(sigma, rate),
    )
    for wrong in RATES:
        exact = [float(np.interp(wrong, *curve)) for curve in (present, absent)]
        assert found.true_positive_rate(wrong) == pytest.approx(max(exact), abs=1e-6)
    assert np.interp(0.9, *absent) > np.interp(0.9, *present) + 1e-4
    assert found.advantage == pytest.approx(float((present[1] - present[0]).max()), abs=1e-8)


def test_bounds_are_those_of_riskcal() -> None:
    """Of Kulynych et al. 2024, from two roundings of the losses; ours, from one, is never below theirs."""
    analysis = pytest.importorskip("riskcal.calibration.dpsgd")
    setting: dict[str, Any] = {"noise_multiplier": 1.0, "sample_rate": 0.01}
    found, rates = accounting.risk(**setting, steps=100), np.array([1e-3, 0.01, 0.1, 0.9])
    theirs = 1 - analysis.get_beta_for_dpsgd(**setting, num_steps=100, alpha=rates)
    ours = np.array([found.true_positive_rate(float(wrong)) for wrong in rates])
    assert (theirs - 1e-12 <= ours).all()
    assert (ours <= theirs + 1e-5).all()
    assert found.advantage == pytest.approx(analysis.get_advantage_for_dpsgd(**setting, num_steps=100), abs=1e-9)


KINDS = [
    SampledGaussian(0.05, 2.0, 40),
    FixedSizeGaussian(0.05, 2.0, 40),
    TruncatedGaussian(0.05, 2.0, 40, dataset_size=1000, max_batch_size=70),
]


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("coarse_losses")
def test_bounds_follow_from_every_epsilon_of_the_same_distribution(relation: str, kind: Any) -> None:
    """TPR <= exp(eps) FPR + delta and 1 - FPR <= exp(eps) (1 - TPR) + delta; the bound is the least of all of these."""
    event = replace(kind, relation=relation)
    found = risk_of([event])
    losses = composed([event], grid_interval([event]))
    points = [(float(losses.get_epsilon_for_delta(delta)), delta) for delta in np.geomspace(1e-8, 0.2, 12)]
    for wrong in RATES[1:-1]:
        by_points = min(
            min(math.exp(eps) * wrong + delta, 1 - math.exp(-eps) * (1 - wrong - delta)) for eps, delta in points
        )
        assert wrong < found.true_positive_rate(wrong) <= by_points + 1e-9
        # Twelve points leave little between themselves and the curve they touch.
        assert found.true_positive_rate(wrong) >= by_points - 0.05


@pytest.mark.usefixtures("coarse_losses")
def test_the_engine_has_the_bounds_of_what_it_charged() -> None:
    engine = steps(private(noise_multiplier=1.5), 3)
    found = engine.risk()
    expected = accounting.risk(noise_multiplier=1.5, sample_rate=engine.sample_rate, steps=3)
    assert found.advantage == expected.advantage
    assert [found.true_positive_rate(rate) for rate in RATES] == [expected.true_positive_rate(rate) for rate in RATES]
    assert found.delta == engine.target_delta
    assert found.epsilon == pytest.approx(engine.epsilon(), rel=2e-3)
    assert engine.risk(1e-3).epsilon == pytest.approx(engine.epsilon(delta=1e-3), rel=2e-3)
    assert engine.risk(1e-3).advantage == found.advantage
    assert f"Membership attacks: {found}." in engine.guarantee()
    assert f"advantage at most {found.advantage:.3g}, true-positive rate at most " in str(found)
    assert "at false-positive rates of 0.001, 0.01 and 0.1" in repr(found)
    with pytest.raises(ValueError, match="delta must be"):
        engine.risk(2.0)


def test_nothing_released_tells_nothing_and_no_noise_tells_all() -> None:
    nothing, everything = risk_of([]), risk_of([SampledGaussian(0.5, 0.0)], delta=0.1)
    assert (nothing.advantage, nothing.epsilon, nothing.delta) == (0.0, None, None)
    assert [nothing.true_positive_rate(rate) for rate in RATES] == list(RATES)
    assert (everything.advantage, everything.epsilon) == (1.0, math.inf)
    assert [everything.true_positive_rate(rate) for rate in RATES] == [1.0] * len(RATES)
    assert risk_of([], delta=0.1).epsilon == 0.0
    assert accounting.risk(**{**SETTING, "steps": 0}).advantage == 0.0
    almost_everything = accounting.risk(**{**SETTING, "noise_multiplier": 0.02})
    assert 0.99 < almost_everything.advantage <= 1.0
    assert all(rate <= almost_everything.true_positive_rate(rate) <= 1.0 for rate in RATES)
    for rate in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"false_positive_rate must be a number in \[0, 1\]"):
            nothing.true_positive_rate(rate)


@pytest.mark.parametrize("target", [0.1, pytest.param(0.9, marks=pytest.mark.slow)])
def test_noise_for_an_advantage_inverts_it(target: float) -> None:
    setting = {name: TARGET[name] for name in ("sample_rate", "steps")}
    noise = accounting.noise_multiplier(target_advantage=target, **setting)
    assert accounting.risk(noise_multiplier=noise, **setting).advantage <= target
    assert accounting.risk(noise_multiplier=noise / (1 + 3e-5), **setting).advantage > target
    assert accounting.noise_multiplier(target_advantage=target, **{**setting, "steps": 0}) == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_epsilon": 1.0, "delta": 1e-5}, "target_epsilon must be given .with delta., or tar.*; got both"),
        ({"target_advantage": None}, "got neither"),
        ({"delta": 1e-5}, "delta must be left out with target_advantage"),
        ({"accountant": "rdp"}, "accountant must be 'pld' with target_advantage; got 'rdp'"),
        ({"target_advantage": 1.0}, r"target_advantage must be a number in \(0, 1\); got 1.0"),
        ({"target_advantage": None, "target_epsilon": 1.0}, "delta must be given with target_epsilon"),
    ],
)
def test_targets_that_do_not_go_together_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        accounting.noise_multiplier(**{**TARGET, **changes})
