"""What sampling by turns is charged as: against dp-accounting called directly, and what may never be added up."""

import math
from dataclasses import replace
from typing import Any

import dp_accounting
import pytest
from dp_accounting import gaussian_mechanism, pld, rdp

from ghostclip import accounting
from ghostclip.errors import LedgerError
from ghostclip.events import CyclicGaussian, CyclicPoissonGaussian, JointGaussian, SampledGaussian, mechanism_of, within
from ghostclip.ledger.records import encoded

SETTING: dict[str, Any] = {"noise_multiplier": 1.3, "sample_rate": 0.02, "steps": 100, "delta": 1e-5}


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(("bands", "steps"), [(8, 100), (8, 96), (8, 97), (50, 30), (3, 1)])
@pytest.mark.one_in(3)
def test_epsilon_is_that_of_as_many_poisson_samples_as_turns(bands: int, steps: int, accountant: str) -> None:
    kind = pld.PLDAccountant if accountant == "pld" else rdp.RdpAccountant
    spent = kind(neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    gaussian = dp_accounting.GaussianDpEvent(1.3)
    event = gaussian if bands == 50 else dp_accounting.PoissonSampledDpEvent(bands * 0.02, gaussian)
    spent.compose(event, math.ceil(steps / bands))
    options = {**SETTING, "steps": steps, "accountant": accountant}
    got = accounting.epsilon(**options, sampling="cyclic_poisson", bands=bands)
    assert got == pytest.approx(spent.get_epsilon(1e-5), rel=1e-7)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_one_band_is_poisson_sampling_to_the_last_digit(accountant: str) -> None:
    for options in ({}, {"bands": 1}):
        got = accounting.epsilon(**SETTING, accountant=accountant, sampling="cyclic_poisson", **options)
        assert got == accounting.epsilon(**SETTING, accountant=accountant)


@pytest.mark.parametrize(("sampling", "bands"), [("cyclic_poisson", 8), ("cyclic", 1), ("cyclic", 80)])
@pytest.mark.usefixtures("coarse_losses")
def test_epsilon_noise_and_steps_are_inverse_to_each_other(sampling: str, bands: int) -> None:
    kind: dict[str, Any] = {"sampling": sampling, "bands": bands, "sample_rate": 0.02, "delta": 1e-5}
    spent = [accounting.epsilon(**kind, noise_multiplier=noise, steps=100) for noise in (2.0, 6.0)]
    assert spent == sorted(spent, reverse=True)
    noise = accounting.noise_multiplier(**kind, target_epsilon=2.0, steps=100)
    assert 1.999 < accounting.epsilon(**kind, noise_multiplier=noise, steps=100) <= 2.0
    steps = accounting.max_steps(**kind, target_epsilon=2.0, noise_multiplier=noise)
    # All steps of a turn cost as much as its first one.
    period = bands if sampling == "cyclic_poisson" else 50
    assert steps >= 100
    assert steps % period == 0
    assert accounting.epsilon(**kind, noise_multiplier=noise, steps=steps) <= 2.0
    assert accounting.epsilon(**kind, noise_multiplier=noise, steps=steps + 1) > 2.0
    assert accounting.epsilon(**kind, noise_multiplier=noise, steps=0) == 0.0


@pytest.mark.parametrize(("steps", "bands", "squared"), [(50, 1, 1), (51, 1, 2), (200, 50, 4), (200, 51, 12)])
def test_cyclic_batches_are_one_gaussian_release(steps: int, bands: int, squared: int) -> None:
    """Its sensitivity is the root of the number of turns; where columns share rows, more by how many meet."""
    noise = 6.0
    got = accounting.epsilon(**{**SETTING, "steps": steps, "noise_multiplier": noise}, sampling="cyclic", bands=bands)
    expected = gaussian_mechanism.get_epsilon_gaussian(noise / math.sqrt(squared), 1e-5)
    assert got == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sampling": "cyclic_poisson", "bands": 51},
            r"bands \* sample_rate, .* must be at most 1; got 1.02.*50 bands",
        ),
        ({"sampling": "cyclic_poisson", "bands": 0}, "bands must be a whole number >= 1; got 0"),
        ({"bands": 2}, r'bands must be 1 unless sampling="cyclic_poisson" or "cyclic"; got 2'),
        ({"sampling": "truncated", "bands": 2}, "bands must be 1 unless"),
    ],
)
def test_bands_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        accounting.epsilon(**SETTING, **options)
    with pytest.raises(ValueError, match=f"^{message}"):
        accounting.noise_multiplier(target_epsilon=1.0, sample_rate=0.02, steps=10, delta=1e-5, **options)
    with pytest.raises(ValueError, match=f"^{message}"):
        accounting.max_steps(target_epsilon=1.0, sample_rate=0.02, noise_multiplier=1.0, delta=1e-5, **options)


def turns(*events: Any) -> float:
    return accounting.epsilon_of(events, delta=1e-5, accountant="rdp")


def test_steps_add_up_to_turns_within_one_mechanism_only() -> None:
    """Three steps of two runs each are a turn each, and six steps of one run are one turn."""
    step = CyclicPoissonGaussian(0.16, 1.3, separation=8, mechanism="one")
    once, twice = (accounting.epsilon_of([SampledGaussian(0.16, 1.3, n)], delta=1e-5, accountant="rdp") for n in (1, 2))
    assert turns(replace(step, count=6)) == turns(*[step] * 6) == turns(replace(step, count=8)) == once
    assert turns(replace(step, count=3), replace(step, count=3, mechanism="two")) == twice
    assert turns(replace(step, count=9)) == twice
    unnamed = replace(step, count=3, mechanism="")
    assert turns(unnamed, unnamed) == twice
    with pytest.raises(LedgerError, match="without a mechanism can't be written to a ledger"):
        encoded(unnamed)
    with pytest.raises(LedgerError, match="without a mechanism"):
        encoded(JointGaussian((replace(unnamed, count=1),)))


def test_a_sensitivity_above_1_counts_as_less_noise() -> None:
    event = CyclicGaussian(1.0, 3.0, 7, separation=4, sensitivity=1.5, mechanism="one")
    assert event.turns == SampledGaussian(1.0, 2.0 / math.sqrt(2))
    joint = JointGaussian((replace(event, count=1, sensitivity=1.0, noise_multiplier=z) for z in (3.0, 4.0)), 7)  # type: ignore[arg-type]
    assert turns(joint) == pytest.approx(turns(SampledGaussian(1.0, 2.4, 2)), rel=1e-12)
    assert mechanism_of(joint) == "one"
    assert mechanism_of(SampledGaussian(0.1, 1.0)) is None
    renamed = within(joint, "two")
    assert {part.mechanism for part in renamed.events} == {"two"}
    assert within(SampledGaussian(0.1, 1.0), "two") == SampledGaussian(0.1, 1.0)


def test_words_name_the_sampling_and_the_correlation() -> None:
    event = CyclicPoissonGaussian(0.16, 1.3, 9, separation=8, correlation="BandedToeplitz(bands=8)", mechanism="one")
    said = accounting.guarantee([event], delta=1e-5, accountant="rdp")
    assert (
        "after 9 steps over Poisson samples of 8 groups in turn at rate 0.16 with noise multiplier 1.3, correlated by "
        "BandedToeplitz(bands=8)." in said
    )
    buffered = CyclicGaussian(1.0, 2.0, separation=4, sensitivity=1.25, correlation="BufferedToeplitz(buffers=3)")
    assert accounting.samples(buffered).endswith(", correlated by BufferedToeplitz(buffers=3) of sensitivity 1.25")
    cyclic = accounting.samples(CyclicGaussian(1.0, 2.0, separation=4))
    assert cyclic == "batches in a fixed order, each example once in 4 steps, at rate 1 with noise multiplier 2"


def test_a_running_epsilon_is_never_below_and_stays_within_a_turn() -> None:
    running, step = accounting.RunningEpsilon(), CyclicPoissonGaussian(0.16, 1.3, separation=4, mechanism="one")
    found = [running.epsilon([replace(step, count=count)], 1e-5) for count in range(1, 10)]
    for count, value in enumerate(found, 1):
        exact = accounting.epsilon_of([replace(step, count=count)], delta=1e-5)
        assert exact <= value <= exact * (1 + 1e-3)
    assert len(set(found)) == 3
