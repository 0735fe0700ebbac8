"""Epsilon of the best of a random number of runs: dp-accounting's, and above the exact divergence."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from scipy import integrate, stats

from ghostclip import accounting
from ghostclip.accounting.spent import sampled_releases
from ghostclip.events import (
    CyclicPoissonGaussian,
    FixedSizeGaussian,
    JointGaussian,
    SampledGaussian,
    Selection,
    TruncatedGaussian,
)

SETTING: dict[str, Any] = {"noise_multiplier": 1.3, "sample_rate": 0.05, "steps": 100, "delta": 1e-5}
SHAPES = {"poisson": math.inf, "geometric": 1.0, "logarithmic": 0.0, 0.5: 0.5, 3.0: 3.0}


@pytest.mark.parametrize(("runs", "distribution"), [(1, "poisson"), *((37.5, shape) for shape in SHAPES)])
def test_it_equals_dp_accounting_called_directly(runs: float, distribution: str | float) -> None:
    sampled = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(1.3))
    event = RepeatAndSelectDpEvent(dp_accounting.SelfComposedDpEvent(sampled, 100), runs, SHAPES[distribution])
    expected = rdp.RdpAccountant().compose(event).get_epsilon(1e-5)
    found = accounting.selection_epsilon(**SETTING, expected_runs=runs, distribution=distribution)
    assert found == pytest.approx(expected, rel=1e-12)


def exact_delta(epsilon: float, sigma: float, mean: float, distribution: str) -> float:
    """The larger hockey-stick divergence of the best of K draws from N(0, sigma^2) and from N(1, sigma^2).

    The largest of K draws has the density G'(F(x)) f(x), with G the generating function of K; that of none is G(0).
    """
    gamma = 1 / mean
    if distribution == "poisson":
        slope, none = (lambda f: mean * np.exp(-mean * (1 - f))), math.exp(-mean)
    else:
        slope, none = (lambda f: gamma / (1 - (1 - gamma) * f) ** 2), 0.0
    x = np.linspace(-12 * sigma, 12 * sigma + 1, 400_001)
    first, second = (slope(stats.norm.cdf(x, at, sigma)) * stats.norm.pdf(x, at, sigma) for at in (0.0, 1.0))
    for density in (first, second):
        assert integrate.trapezoid(density, x) + none == pytest.approx(1.0, abs=1e-9)
    scale = math.exp(epsilon)
    both = (np.clip(one - scale * other, 0, None) for one, other in ((first, second), (second, first)))
    return max(float(integrate.trapezoid(part, x)) for part in both)


@pytest.mark.parametrize("distribution", ["poisson", "geometric"])
@pytest.mark.parametrize(("sigma", "mean"), [(2.0, 1.0), (1.0, 10.0), (4.0, 100.0)])
def test_the_exact_divergence_of_a_search_is_within_it(sigma: float, mean: float, distribution: str) -> None:
    """The largest of Gaussian draws is a search whose score is its result; one run's own epsilon doesn't cover it."""
    setting: dict[str, Any] = {"noise_multiplier": sigma, "sample_rate": 1.0, "steps": 1, "delta": 1e-4}
    found = accounting.selection_epsilon(**setting, expected_runs=mean, distribution=distribution)
    assert exact_delta(found, sigma, mean, distribution) <= 1e-4
    if mean > 1:
        assert exact_delta(accounting.epsilon(**setting), sigma, mean, distribution) > 1e-4


@pytest.mark.parametrize("shape", [0.0, 1e-6, 0.5, 1.0, 3.0, 50.0])
@pytest.mark.parametrize("mean", [1.0, 1.0001, 2.0, 10.0, 1e4])
def test_the_success_probability_gives_the_mean_back(mean: float, shape: float) -> None:
    """By sums over the distribution itself, scipy's where it has it."""
    gamma = accounting.success_probability(mean, shape)
    if mean == 1.0:
        assert gamma == 1.0
        return
    if shape == 0.0:
        back = stats.logser.mean(1 - gamma)
    else:
        back = stats.nbinom.mean(shape, gamma) / -math.expm1(shape * math.log(gamma))
    assert back == pytest.approx(mean, rel=1e-6)


EVENT = Selection((SampledGaussian(0.05, 1.3, 100),), 10)


def searched(**changes: Any) -> float:
    return accounting.selection_epsilon(**{**SETTING, "expected_runs": 10, **changes})


def test_a_selection_adds_up_with_steps_by_divergences() -> None:
    steps = SampledGaussian(0.05, 2.0, 50)
    inner = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(1.3)), 100
    )
    accountant = rdp.RdpAccountant().compose(RepeatAndSelectDpEvent(inner, 10, math.inf), 2)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(2.0)), 50)
    events = [EVENT, steps, EVENT]
    for name in accounting.ACCOUNTANTS:
        found = accounting.epsilon_of(events, delta=1e-5, accountant=name)
        assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-12)
    assert accounting.RunningEpsilon().epsilon(events, 1e-5) == pytest.approx(found, rel=1e-12)
    assert accounting.affordable([EVENT], SampledGaussian(0.05, 2.0), max_epsilon=found, delta=1e-5) >= 50


def test_membership_bounds_of_a_search_hold_for_its_exact_rates() -> None:
    """The largest of Gaussian draws, "yes" above a threshold or below it: both rates are known."""
    sigma, mean = 2.0, 10.0
    event = Selection((SampledGaussian(1.0, sigma),), mean)
    bound = accounting.risk_of([event], delta=1e-5)
    assert bound.epsilon == accounting.epsilon_of([event], delta=1e-5)
    x = np.linspace(-30, 31, 4001)
    without, with_it = (np.exp(-mean * stats.norm.sf(x, at, sigma)) for at in (0.0, 1.0))  # P[the best is at most x]
    for wrong, right in ((1 - without, 1 - with_it), (with_it, without)):
        assert all(bound.true_positive_rate(a) >= b - 1e-9 for a, b in zip(wrong, right, strict=True))
    assert (without - with_it).max() < bound.advantage < 1
    assert accounting.risk(noise_multiplier=sigma, sample_rate=1.0, steps=1).advantage < bound.advantage


def test_the_words_of_a_selection_and_its_ends() -> None:
    words = accounting.guarantee([EVENT], delta=1e-5)
    assert f"epsilon {searched():.4g} (RDP) at delta 1e-05, after the best of a random number of runs (poisson" in words
    assert "of mean 10), each of 100 steps over Poisson samples at rate 0.05 with noise multiplier 1.3." in words
    assert searched(steps=0) == 0.0
    nothing = Selection((SampledGaussian(0.05, 0.0, 100),), 10)
    assert accounting.epsilon_of([nothing], delta=1e-5) == math.inf
    assert accounting.risk_of([nothing]).advantage == 1.0


RELEASE, OTHER = SampledGaussian(0.5, 1.0), SampledGaussian(0.5, 1.0, relation="replace_one")
KNOWN = "must be SampledGaussian about add_or_remove_one"
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: searched(expected_runs=0.5), "expected_runs must be a finite number >= 1; got 0.5"),
    (lambda: searched(distribution="binomial"), "distribution must be one of 'poisson'"),
    (lambda: searched(distribution=0.0), "distribution must be a finite number > 0; got 0.0"),
    (lambda: searched(distribution=math.inf), "distribution"),
    (lambda: searched(distribution=None), "distribution"),
    (lambda: Selection((FixedSizeGaussian(0.5, 1.0),), 10), KNOWN),
    (lambda: Selection((OTHER,), 10), KNOWN),
    (lambda: Selection((JointGaussian((RELEASE,)),), 10), KNOWN),
    (lambda: Selection((RELEASE, replace(RELEASE, unit="user")), 10), "the same unit"),
    (lambda: accounting.epsilon_of([EVENT, OTHER], delta=1e-5), "the same neighbours"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_has_no_known_divergences_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()


SPENT: list[list[Any]] = [
    [SampledGaussian(rate, noise, steps)]
    for rate, steps in ((0.1, 25), (0.01, 100), (0.001, 50), (1.0, 1))
    for noise in (0.61, 3.5, 12.0)
] + [
    [SampledGaussian(0.1, 4.5, 20), SampledGaussian(0.1, 4.6, 20)],
    [SampledGaussian(0.1, 4.0, 20), SampledGaussian(1.0, 12.0)],
    [JointGaussian((SampledGaussian(0.1, 4.0), SampledGaussian(0.1, 8.0)), 20)],
    [CyclicPoissonGaussian(0.1, 3.0, 40, separation=2)],
    [CyclicPoissonGaussian(0.1, 3.0, 41, separation=2)],
]


@pytest.mark.parametrize(("run", "covered"), [(SampledGaussian(0.1, 3.0, 20), 9), (SampledGaussian(1.0, 4.0), 4)])
def test_a_search_spends_no_more_over_runs_that_it_covers(run: SampledGaussian, covered: int) -> None:
    """Whatever the distribution and delta."""
    found = [tuple(sampled_releases(spent)) for spent in SPENT if accounting.covers(run, spent)]
    assert len(found) == covered
    for law, delta in (("poisson", 1e-5), (0.5, 1e-2)):
        charged = accounting.epsilon_of([Selection((run,), 5, law)], delta=delta)
        spent = [accounting.epsilon_of([Selection(each, 5, law)], delta=delta) for each in found]
        assert max(spent) <= charged * (1 + 1e-6)


def test_a_smaller_epsilon_at_one_delta_covers_nothing() -> None:
    """The example of `covers`."""
    run, other = SampledGaussian(0.1, 3.0, 20), SampledGaussian(0.001, 0.605, 50)
    assert accounting.epsilon_of([other], delta=1e-5) < accounting.epsilon_of([run], delta=1e-5) < 0.62
    one, two = (accounting.epsilon_of([Selection((each,), 5)], delta=1e-5) for each in (run, other))
    assert (round(one, 2), round(two, 2)) == (1.13, 2.59)
    assert not accounting.covers(run, [other])


def test_a_part_of_a_run_is_covered_without_a_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ghostclip.accounting.selection.divergences_of", lambda _: pytest.fail("computed"))
    run = SampledGaussian(0.1, 3.0, 20)
    for part in (run, SampledGaussian(0.1, 3.0, 19), SampledGaussian(0.05, 3.0, 20), SampledGaussian(0.1, 4.0, 20)):
        assert accounting.covers(run, [part])
    assert accounting.covers(run, [SampledGaussian(0.1, 3.0, 12), SampledGaussian(0.1, 3.0, 8)])
    assert accounting.covers(run, [])
    assert not accounting.covers(run, [SampledGaussian(0.1, 0.0)])


def test_more_noise_is_covered_at_orders_where_no_divergence_is_known() -> None:
    """dp-accounting has none at low orders and rate 0.5: at 9 orders for noise multiplier 4, at 12 for 16."""
    run = SampledGaussian(0.5, 4.0, 20)
    assert accounting.covers(run, [SampledGaussian(0.5, 4.0, 10), SampledGaussian(0.5, 16.0, 10)])
    assert not accounting.covers(run, [SampledGaussian(0.5, 4.0, 20), SampledGaussian(0.5, 16.0)])


def test_samples_that_may_be_cut_down_are_not_covered() -> None:
    cut = TruncatedGaussian(0.1, 50.0, dataset_size=300, max_batch_size=40)
    assert not accounting.covers(SampledGaussian(0.1, 3.0, 20), [cut])
    assert accounting.covers(SampledGaussian(0.1, 3.0, 20), [replace(cut, max_batch_size=300)])
