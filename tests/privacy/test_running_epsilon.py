"""`RunningEpsilon` is never below the full computation, and at most 1e-3 above it; calibration is verified finely."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from ghostclip import accounting
from ghostclip.accounting import RunningEpsilon, epsilon_of, running
from ghostclip.accounting.spent import Setting
from ghostclip.events import Event

SETTINGS = {
    "MNIST tutorials": (Setting(256 / 60_000), 1.1, 1e-5),
    "digits": (Setting(64 / 1797), 1.0, 1e-4),
    "little noise": (Setting(0.001), 0.6, 1e-6),
    "whole data set": (Setting(1.0), 30.0, 1e-5),
    "much noise": (Setting(0.01), 8.0, 1e-7),
    "replace one": (Setting(0.02, neighboring="replace_one"), 2.0, 1e-5),
    "fixed size": (Setting(0.02, sampling="without_replacement"), 2.0, 1e-5),
    "truncated": (Setting(0.02, sampling="truncated", dataset_size=5000, max_batch_size=150), 2.0, 1e-5),
    "turns": (Setting(0.04, sampling="cyclic_poisson", bands=4), 1.3, 1e-5),
}


def check(found: float, events: list[Event], delta: float) -> None:
    full = epsilon_of(events, delta=delta)
    assert full <= found <= full * (1 + 1e-3)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.one_in(5)
def test_growing_numbers_of_steps_are_bounded_from_above(name: str) -> None:
    setting, noise, delta = SETTINGS[name]
    asked = RunningEpsilon()
    for count in (1, 2, 3, 10, 11, 100, 1000, 2999):
        events = [setting.event(noise, count)]
        check(asked.epsilon(events, delta), events, delta)


EVENT, OTHER = Setting(0.01).event(1.0, 1), Setting(0.02).event(1.0, 1)
FURTHER = running.FURTHER
# What is asked one after the other: steps of EVENT, steps of OTHER, delta.
ASKED: dict[str, list[tuple[int, int, float]]] = {
    "past the plan": [(count, 0, 1e-5) for count in (2, 3, FURTHER + 1, 2 * FURTHER + 5)],
    "others before": [(count, 40, 1e-5) for count in (5, 6, 50)],
    "fewer": [(30, 0, 1e-5), (31, 0, 1e-5), (10, 0, 1e-5)],
    "others later": [(10, 1, 1e-5), (11, 2, 1e-5), (11, 3, 1e-5)],
    "another delta": [(11, 3, 1e-5), (11, 3, 1e-3)],
    "small deltas": [(count, 0, 1e-12) for count in (50, 51, 400)],
    "small deltas, many steps": [(count, 0, 1e-10) for count in (9_998, 9_999, 10_000)],
    "large deltas": [(count, 0, 0.3) for count in (50, 51, 400)],
}


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.one_in(math.inf)
def test_whatever_is_asked_next_is_bounded_from_above(name: str) -> None:
    asked = RunningEpsilon()
    for count, others, delta in ASKED[name]:
        events = [replace(event, count=n) for event, n in ((OTHER, others), (EVENT, count)) if n]
        check(asked.epsilon(events, delta), events, delta)


def test_few_steps_at_high_rates_are_bounded_closely() -> None:
    """Sums of few steps are below the lower end of those of many, and aren't taken for what is above the upper one."""
    asked = RunningEpsilon()
    for count in (1, 2, 10):
        events = [Setting(0.3).event(1.0, count)]
        check(asked.epsilon(events, 1e-5), events, 1e-5)


def test_answers_at_the_ends() -> None:
    asked, events = RunningEpsilon(), [Setting(0.01).event(1.0, 100)]
    assert asked.epsilon(events, 1e-5) == asked.epsilon(events, 1e-5) == epsilon_of(events, delta=1e-5)
    assert asked.epsilon([], 1e-5) == 0.0
    assert [asked.epsilon([Setting(0.01).event(0.0, count)], 1e-5) for count in (1, 2)] == [math.inf] * 2
    for count in (1, 2, 3):  # no epsilon reaches such a delta
        events = [Setting(0.01).event(1.0, count)]
        assert asked.epsilon(events, 1e-17) == epsilon_of(events, delta=1e-17) == math.inf


SMALL: dict[str, Any] = {"target_epsilon": 0.5, "sample_rate": 0.1, "steps": 20, "delta": 1e-5}
TARGETS: dict[str, dict[str, Any]] = {
    "small": SMALL,
    "readme": {"target_epsilon": 3.0, "sample_rate": 64 / 1024, "steps": 64, "delta": 1e-5},
    "rare examples": {"target_epsilon": 0.1, "sample_rate": 1e-3, "steps": 3_000, "delta": 1e-6},
    "whole data set": {"target_epsilon": 2.0, "sample_rate": 1.0, "steps": 100, "delta": 1e-5},
    "fixed size": SMALL | {"sampling": "without_replacement", "neighboring": "replace_one"},
    "truncated": SMALL | {"sampling": "truncated", "dataset_size": 300, "max_batch_size": 40},
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.one_in(6)
def test_calibrated_noise_is_the_least_on_the_fine_grid(name: str) -> None:
    spending = dict(TARGETS[name])
    noise, target = accounting.noise_multiplier(**spending), spending.pop("target_epsilon")
    assert accounting.epsilon(noise_multiplier=noise, **spending) <= target
    assert accounting.epsilon(noise_multiplier=noise / (1 + 1e-5), **spending) > target
