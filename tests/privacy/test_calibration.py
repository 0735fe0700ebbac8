"""Calibration by PLD searches on a coarse grid of losses first; what it returns is verified on the fine one."""

from typing import Any

import pytest

from ghostclip import accounting
from ghostclip.accounting import calibration

SMALL: dict[str, Any] = {"target_epsilon": 0.5, "sample_rate": 0.1, "steps": 20, "delta": 1e-5}
SETTINGS: dict[str, dict[str, Any]] = {
    "small": SMALL,
    "readme": {"target_epsilon": 3.0, "sample_rate": 64 / 1024, "steps": 64, "delta": 1e-5},
    "rare examples": {"target_epsilon": 1.0, "sample_rate": 1e-3, "steps": 20_000, "delta": 1e-6},
    "whole data set": {"target_epsilon": 2.0, "sample_rate": 1.0, "steps": 100, "delta": 1e-5},
    "fixed size": SMALL | {"sampling": "without_replacement", "neighboring": "replace_one"},
    "truncated": SMALL | {"sampling": "truncated", "dataset_size": 300, "max_batch_size": 40},
}


@pytest.fixture
def fine(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The values of epsilon that a search finds on the fine grid."""
    found: list[float] = []
    epsilon_of = calibration.epsilon_of

    def counting(*args: Any, coarser: int = 1, **options: Any) -> float:
        value = epsilon_of(*args, coarser=coarser, **options)
        if coarser == 1:
            found.append(value)
        return value

    monkeypatch.setattr(calibration, "epsilon_of", counting)
    return found


def check(noise: float, setting: dict[str, Any]) -> None:
    """It is within the target, and a relative 1e-5 less is not."""
    spending = {name: value for name, value in setting.items() if name != "target_epsilon"}
    assert accounting.epsilon(noise_multiplier=noise, **spending) <= setting["target_epsilon"]
    assert accounting.epsilon(noise_multiplier=noise / (1 + 1e-5), **spending) > setting["target_epsilon"]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.one_in(5)
def test_few_epsilons_on_the_fine_grid_are_enough(name: str, fine: list[float]) -> None:
    noise = accounting.noise_multiplier(**SETTINGS[name])
    assert len(fine) <= (5 if name == "rare examples" else 3)
    check(noise, SETTINGS[name])


@pytest.mark.parametrize("coarser", [1, 1000])
@pytest.mark.slow
def test_a_grid_that_misleads_costs_time_only(coarser: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "COARSER", coarser)
    check(accounting.noise_multiplier(**SMALL), SMALL)


def test_a_coarse_grid_without_a_root_costs_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    epsilon_of = calibration.epsilon_of
    monkeypatch.setattr(calibration, "epsilon_of", lambda *args, coarser=1, **options: epsilon_of(*args, **options)
                        if coarser == 1 else 1e6)  # fmt: skip
    check(accounting.noise_multiplier(**SMALL), SMALL)
