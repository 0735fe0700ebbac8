"""Bounds for membership attacks beside those of riskcal, by the authors of Kulynych et al. 2024."""

from typing import Any

import numpy as np
import pytest

from ghostclip import accounting

analysis = pytest.importorskip("riskcal.calibration.dpsgd")

RATES = np.array([1e-3, 0.01, 0.1, 0.9])


@pytest.mark.parametrize(
    ("sigma", "rate", "steps"),
    [
        *(pytest.param(*setting, marks=pytest.mark.slow) for setting in ((2.0, 0.2, 50), (0.6, 0.1, 1))),
        (1.0, 0.01, 100),
    ],
)
def test_bounds_are_riskcal_s(sigma: float, rate: float, steps: int) -> None:
    """Their rates are from two roundings of the losses, one for each neighbour, ours from one: never below theirs."""
    setting: dict[str, Any] = {"noise_multiplier": sigma, "sample_rate": rate}
    found = accounting.risk(**setting, steps=steps)
    theirs = 1 - analysis.get_beta_for_dpsgd(**setting, num_steps=steps, alpha=RATES)
    ours = np.array([found.true_positive_rate(float(wrong)) for wrong in RATES])
    assert (theirs - 1e-12 <= ours).all()
    assert (ours <= theirs + 1e-5).all()
    assert found.advantage == pytest.approx(analysis.get_advantage_for_dpsgd(**setting, num_steps=steps), abs=1e-9)


@pytest.mark.slow
def test_noise_for_an_advantage_is_riskcal_s() -> None:
    setting = {"sample_rate": 0.05, "steps": 100}
    theirs = analysis.find_noise_multiplier_for_advantage(advantage=0.1, sample_rate=0.05, num_steps=100)
    assert accounting.noise_multiplier(target_advantage=0.1, **setting) == pytest.approx(theirs, rel=1e-3)
