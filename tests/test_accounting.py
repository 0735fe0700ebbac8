"""Accounting: against dp-accounting called directly, by independent formulas, as inverse pairs, and at the edges."""

import inspect
import math
import subprocess
import sys
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting import gaussian_mechanism, pld, rdp
from scipy import stats

from ghostclip import accounting
from ghostclip.events import SampledGaussian, merged

SETTING: dict[str, Any] = {"noise_multiplier": 1.3, "sample_rate": 0.05, "steps": 100, "delta": 1e-5}
TARGET: dict[str, Any] = {"target_epsilon": 0.8, "sample_rate": 0.05, "steps": 200, "delta": 1e-5}


def direct(accountant: str, sigma: float, rate: float, steps: int, delta: float) -> float:
    """One step composed after another, by the public interface of dp-accounting."""
    spent = pld.PLDAccountant() if accountant == "pld" else rdp.RdpAccountant()
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    spent.compose(dp_accounting.SelfComposedDpEvent(event, steps))
    return float(spent.get_epsilon(delta))


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("seed", range(4))
def test_epsilon_equals_dp_accounting(accountant: str, seed: int) -> None:
    draw = np.random.default_rng(seed)
    sigma, rate = float(draw.uniform(0.8, 4)), float(10 ** draw.uniform(-3, -1))
    steps, delta = int(draw.integers(1, 2000)), float(10 ** draw.uniform(-7, -3))
    got = accounting.epsilon(noise_multiplier=sigma, sample_rate=rate, steps=steps, delta=delta, accountant=accountant)
    assert got == pytest.approx(direct(accountant, sigma, rate, steps, delta), rel=1e-9)


def one_step_delta(epsilon: float, sigma: float, rate: float) -> float:
    """The exact delta of one release by hockey-stick divergence: the mixture against the centred Gaussian."""
    # The densities' ratio at x is 1 - rate + rate * exp((x - 1/2) / sigma^2); it exceeds exp(epsilon) above the cut.
    cut = 0.5 + sigma**2 * math.log((math.exp(epsilon) - 1 + rate) / rate)
    return float((1 - rate - math.exp(epsilon)) * stats.norm.sf(cut, 0, sigma) + rate * stats.norm.sf(cut, 1, sigma))


@pytest.mark.parametrize(("sigma", "rate", "target"), [(1, 0.1, 0.5), (2, 0.3, 0.2), (1.5, 0.9, 0.5), (3, 0.01, 0.01)])
def test_one_step_by_an_independent_formula(sigma: float, rate: float, target: float) -> None:
    delta = one_step_delta(target, sigma, rate)
    got = accounting.epsilon(noise_multiplier=sigma, sample_rate=rate, steps=1, delta=delta)
    assert got == pytest.approx(target, rel=1e-6)


def test_the_full_batch_is_the_gaussian_mechanism() -> None:
    exact = gaussian_mechanism.get_epsilon_gaussian(4.0 / math.sqrt(9), 1e-5)
    got = accounting.epsilon(noise_multiplier=4.0, sample_rate=1.0, steps=9, delta=1e-5)
    assert exact <= got <= exact * (1 + 1e-4)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_noise_and_steps_invert_epsilon(accountant: str) -> None:
    noise = accounting.noise_multiplier(**TARGET, accountant=accountant)
    common: dict[str, Any] = {"sample_rate": 0.05, "delta": 1e-5, "accountant": accountant}
    assert accounting.epsilon(noise_multiplier=noise, steps=200, **common) <= 0.8
    assert accounting.epsilon(noise_multiplier=noise * (1 - 1e-4), steps=200, **common) > 0.8
    most = accounting.max_steps(target_epsilon=0.8, noise_multiplier=noise, **common)
    assert accounting.epsilon(noise_multiplier=noise, steps=most, **common) <= 0.8
    assert accounting.epsilon(noise_multiplier=noise, steps=most + 1, **common) > 0.8


@pytest.mark.parametrize("target", [0.05, 30.0])
def test_calibration_far_from_its_first_guess(target: float) -> None:
    common: dict[str, Any] = {"sample_rate": 0.3, "steps": 4, "delta": 1e-6, "accountant": "rdp"}
    noise = accounting.noise_multiplier(target_epsilon=target, **common)
    assert 0.999 * target < accounting.epsilon(noise_multiplier=noise, **common) <= target


def test_zero_steps_cost_nothing() -> None:
    assert accounting.epsilon(**{**SETTING, "steps": 0}) == 0.0
    assert accounting.noise_multiplier(**{**TARGET, "steps": 0}) == 0.0
    assert accounting.epsilon_of([], delta=1e-5) == 0.0
    assert accounting.epsilon_of([SampledGaussian(0.1, 0.0, count=0)], delta=1e-5) == 0.0


def test_a_step_without_noise_is_not_private() -> None:
    events = [SampledGaussian(0.1, 2.0, count=5), SampledGaussian(0.1, 0.0)]
    assert accounting.epsilon_of(events, delta=1e-5) == math.inf


def test_events_are_composed_once_for_each_mechanism() -> None:
    first, second = SampledGaussian(0.02, 1.5), SampledGaussian(0.01, 2.0)
    one_by_one = [first] * 30 + [second] * 20 + [first] * 10
    assert merged(one_by_one) == [SampledGaussian(0.02, 1.5, count=40), SampledGaussian(0.01, 2.0, count=20)]
    spent = rdp.RdpAccountant()
    for rate, sigma, count in [(0.02, 1.5, 40), (0.01, 2.0, 20)]:
        spent.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma)), count)
    got = accounting.epsilon_of(one_by_one, delta=1e-5, accountant="rdp")
    assert got == pytest.approx(spent.get_epsilon(1e-5), rel=1e-12)


def test_more_noise_fewer_steps_and_larger_delta_cost_less() -> None:
    base = accounting.epsilon(**SETTING, accountant="rdp")
    for better in ({"noise_multiplier": 1.4}, {"steps": 80}, {"delta": 1e-4}, {"sample_rate": 0.04}):
        assert accounting.epsilon(**{**SETTING, **better}, accountant="rdp") < base


def test_almost_no_noise_is_bounded_without_gigabytes() -> None:
    got = accounting.epsilon(noise_multiplier=0.02, sample_rate=0.01, steps=1000, delta=1e-5)
    once = 0.5 / 0.02**2
    assert got > 20 * once


def test_a_budget_below_one_step_allows_none() -> None:
    common: dict[str, Any] = {"noise_multiplier": 0.5, "sample_rate": 1.0, "delta": 1e-5, "accountant": "rdp"}
    assert accounting.max_steps(target_epsilon=0.1, **common) == 0


def test_impossible_targets_are_told() -> None:
    with pytest.raises(ValueError, match=r"target_epsilon=1e-09 can't be reached: 'rdp' gives more"):
        accounting.noise_multiplier(target_epsilon=1e-9, sample_rate=1.0, steps=10**6, delta=1e-300, accountant="rdp")
    with pytest.raises(ValueError, match="more than 1000000000 steps stay within target_epsilon"):
        accounting.max_steps(target_epsilon=3.0, noise_multiplier=1e4, sample_rate=1e-5, delta=1e-5, accountant="rdp")


@pytest.mark.parametrize("name", ["noise_multiplier", "sample_rate", "steps", "delta", "target_epsilon"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_values_out_of_range_are_named(name: str, value: float) -> None:
    everything = {**SETTING, **TARGET, name: value}
    for function in (accounting.epsilon, accounting.noise_multiplier, accounting.max_steps):
        taken = {key: everything[key] for key in everything if key in inspect.signature(function).parameters}
        if name in taken:
            with pytest.raises(ValueError, match=f"^{name} must be "):
                function(**taken)


def test_zero_noise_other_accountants_and_positional_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="noise_multiplier must be a finite number > 0"):
        accounting.epsilon(**{**SETTING, "noise_multiplier": 0.0})
    with pytest.raises(ValueError, match="accountant must be one of 'pld', 'rdp'; got 'gdp'"):
        accounting.epsilon(**SETTING, accountant="gdp")
    with pytest.raises(TypeError):
        accounting.epsilon(1.0, 0.01, 10, 1e-5)  # type: ignore[misc]


def test_events_are_checked() -> None:
    wrong_fields = [
        {"sample_rate": 0.0},
        {"noise_multiplier": math.nan},
        {"count": -1},
        {"relation": "replace"},
        {"unit": 1},
    ]
    for wrong in wrong_fields:
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be "):
            SampledGaussian(**{"sample_rate": 0.1, "noise_multiplier": 1.0, **wrong})  # type: ignore[arg-type]


def test_dp_accounting_is_imported_on_first_use_only() -> None:
    code = "import ghostclip.accounting, sys; assert 'dp_accounting' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_remarks_of_the_accountant_reach_the_user(caplog):
    setting = {"noise_multiplier": 1.19, "sample_rate": 0.1, "steps": 30, "delta": 1e-5}
    assert accounting.epsilon(**setting, accountant="rdp") > accounting.epsilon(**setting)
    assert caplog.records == []
