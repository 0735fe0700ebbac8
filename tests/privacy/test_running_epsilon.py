"""`RunningEpsilon`: epsilon asked in a loop is never below the full computation, and at most 1e-3 above it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ghostclip
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
}


def check(found: float, events: list[Event], delta: float) -> None:
    full = epsilon_of(events, delta=delta)
    assert full <= found <= full * (1 + 1e-3)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.one_in(4)
def test_growing_numbers_of_steps_are_bounded_from_above(name: str) -> None:
    setting, noise, delta = SETTINGS[name]
    asked = RunningEpsilon()
    for count in (1, 2, 3, 10, 11, 100, 1000, 2999):
        events = [setting.event(noise, count)]
        check(asked.epsilon(events, delta), events, delta)


@pytest.mark.slow
def test_it_goes_on_past_the_steps_it_planned_for() -> None:
    setting, noise, delta = SETTINGS["MNIST tutorials"]
    asked = RunningEpsilon()
    for count in (2, 3, running.FURTHER, running.FURTHER + 1, 2 * running.FURTHER + 5):
        events = [setting.event(noise, count)]
        check(asked.epsilon(events, delta), events, delta)


@pytest.mark.one_in(math.inf)
def test_other_events_before_count_too() -> None:
    before = Setting(0.05).event(3.0, 40)
    asked = RunningEpsilon()
    for count in (5, 6, 50):
        events = [before, Setting(0.01).event(1.0, count)]
        check(asked.epsilon(events, 1e-5), events, 1e-5)


@pytest.mark.slow
def test_fewer_steps_other_kinds_and_another_delta_start_anew() -> None:
    event, other = Setting(0.01).event(1.0, 1), Setting(0.02).event(1.0, 1)
    asked = RunningEpsilon()
    for events, delta in (
        ([replace(event, count=30)], 1e-5),
        ([replace(event, count=31)], 1e-5),
        ([replace(event, count=10)], 1e-5),
        ([replace(event, count=10), other], 1e-5),
        ([replace(event, count=11), replace(other, count=2)], 1e-5),
        ([replace(event, count=11), replace(other, count=3)], 1e-5),
        ([replace(event, count=11), replace(other, count=3)], 1e-3),
    ):
        check(asked.epsilon(events, delta), events, delta)


def test_the_first_answer_is_the_full_computation_and_is_repeated() -> None:
    events = [Setting(0.01).event(1.0, 100)]
    asked = RunningEpsilon()
    assert asked.epsilon(events, 1e-5) == asked.epsilon(events, 1e-5) == epsilon_of(events, delta=1e-5)


def test_nothing_and_no_noise() -> None:
    asked = RunningEpsilon()
    assert asked.epsilon([], 1e-5) == 0.0
    assert asked.epsilon([Setting(0.01).event(0.0, 1)], 1e-5) == math.inf
    assert asked.epsilon([Setting(0.01).event(0.0, 2)], 1e-5) == math.inf


def test_a_delta_that_no_epsilon_reaches() -> None:
    asked = RunningEpsilon()
    for count in (1, 2, 3):
        events = [Setting(0.01).event(1.0, count)]
        assert asked.epsilon(events, 1e-17) == epsilon_of(events, delta=1e-17) == math.inf


@pytest.mark.slow
def test_small_and_large_deltas_near_the_ends() -> None:
    for delta in (1e-12, 0.3):
        asked = RunningEpsilon()
        for count in (50, 51, 400):
            events = [Setting(0.02).event(1.5, count)]
            check(asked.epsilon(events, delta), events, delta)


@pytest.mark.slow
def test_an_engine_asked_at_every_step_composes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 3)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(3, (64,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = ghostclip.PrivacyEngine(model, optimizer, data, batch_size=8, noise_multiplier=1.0)
    full = []
    monkeypatch.setattr(running, "epsilon_of", lambda *args, **kw: full.append(1) or epsilon_of(*args, **kw))
    spent = []
    for batch in engine.batches():
        engine.step(batch, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"))
        spent.append(engine.epsilon())
    assert len(full) == 1
    assert spent == sorted(spent)
    check(spent[-1], engine.events, 1e-5)
    assert spent[-1] == pytest.approx(accounting.epsilon_of(engine.events, delta=1e-5), rel=1e-3)
