"""A restored engine never forgets what was spent: older checkpoints, runs that part, plans and ledgers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
import torch
from checkpointed_runs import go, private
from torch.optim import lr_scheduler

from ghostclip import BudgetExceededError, LedgerError, PrivacyError, accounting, checkpoint
from ghostclip.engine import PrivacyEngine


def test_an_older_checkpoint_never_lowers_what_was_spent(tmp_path: Path) -> None:
    engine = go(private(noise_multiplier=3.0), 2)
    engine.save(tmp_path / "x")
    go(engine, 2)
    spent, found = engine.epsilon(), engine.restore(tmp_path / "x")
    assert (found.steps, engine.steps_taken, engine.epsilon()) == (2, 4, spent)
    go(engine, 2)
    setting: dict[str, Any] = {"noise_multiplier": 3.0, "sample_rate": 8 / 24, "delta": 1e-5}
    full = accounting.epsilon(steps=6, **setting)
    assert full <= engine.epsilon() <= full * (1 + 1e-3)
    engine.save(tmp_path / "y")
    later = private(noise_multiplier=3.0)
    assert later.restore(tmp_path / "y").steps == 4
    assert later.epsilon() == accounting.epsilon(steps=6, **setting)


def test_runs_that_part_and_meet_again_count_each_step_once(tmp_path: Path) -> None:
    first = go(private(), 2)
    first.save(tmp_path / "first")
    second = private()
    second.restore(tmp_path / "first")
    go(second, 3).save(tmp_path / "second")
    go(first, 1)
    first.restore(tmp_path / "second")
    assert first.steps_taken == 2 + 3 + 1
    first.restore(tmp_path / "second")
    assert first.steps_taken == 6


def test_redone_steps_draw_fresh_samples_and_noise(tmp_path: Path) -> None:
    engine = go(private(), 1)
    engine.save(tmp_path / "x")
    ends = []
    for other in (engine, private(), private()):
        other.restore(tmp_path / "x")
        go(other, 1)
        ends.append(runs.weights(other.model))
    assert not any(torch.equal(ends[left], ends[right]) for left in range(3) for right in range(left))


def test_no_state_of_private_noise_is_stored(tmp_path: Path) -> None:
    go(private(), 2).save(tmp_path / "x")
    stored = checkpoint.load(tmp_path / "x")
    assert (stored.private["noise"], stored.private["sampler"]) == ({}, None)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PrivacyEngine]:
    """Engines with a plan, whose calibration isn't what is tested here."""
    monkeypatch.setattr(accounting, "noise_for", lambda *_, **__: 3.0)
    return lambda **length: private(noise_multiplier=None, target_epsilon=4.0, **length)


def test_a_plan_holds_over_interruptions(planned: Callable[..., PrivacyEngine], tmp_path: Path) -> None:
    go(planned(steps=4), 3).save(tmp_path / "x")
    other = planned(steps=4)
    other.restore(tmp_path / "x")
    go(other, 1)
    with pytest.raises(BudgetExceededError, match="all 4 planned steps"):
        go(other, 1)


@pytest.mark.parametrize("length", [{"steps": 5}, {"epochs": 1}])
def test_another_plan_is_refused(length: dict[str, int], planned: Callable[..., PrivacyEngine], tmp_path: Path) -> None:
    planned(steps=4).save(tmp_path / "x")
    with pytest.raises(PrivacyError, match=r"another configuration: planned_steps is 4 in it and [35] here"):
        planned(**length).restore(tmp_path / "x")


def test_a_restore_that_fails_late_has_not_forgotten_what_was_spent(tmp_path: Path) -> None:
    engine = go(private(), 3)
    engine.save(tmp_path / "x", extra={"plan": lr_scheduler.ConstantLR(engine.optimizer)})

    class Broken(lr_scheduler.ConstantLR):
        def load_state_dict(self, state: Any) -> None:
            raise RuntimeError("broken")

    other = private()
    with pytest.raises(RuntimeError, match="broken"):
        other.restore(tmp_path / "x", extra={"plan": Broken(other.optimizer)})
    assert other.steps_taken == 3


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "run.ledger"


def test_with_a_ledger_what_a_run_spent_after_its_checkpoint_counts(tmp_path: Path, ledger: Path) -> None:
    engine = go(private(ledger=ledger), 2)
    engine.save(tmp_path / "x")
    go(engine, 2)
    engine.detach()
    other = private(ledger=ledger)
    found = other.restore(tmp_path / "x")
    go(other, 1)
    assert found.steps == 2
    assert sum(event.count for event in other.events) == 5
    assert other.events == other.ledger.events
    other.save(tmp_path / "x")
    other.detach()
    again = private(ledger=ledger)
    assert again.restore(tmp_path / "x").steps == 3
    assert sum(event.count for event in again.events) == 5


def test_a_checkpoint_with_a_ledger_needs_that_ledger(tmp_path: Path, ledger: Path) -> None:
    engine = go(private(ledger=ledger), 1)
    old = ledger.read_bytes()
    engine.detach()
    engine = go(private(ledger=ledger), 1)
    engine.save(tmp_path / "x")
    engine.detach()
    with pytest.raises(LedgerError, match=r"belongs to a run with a ledger.*build the engine with ledger=\.\.\."):
        private().restore(tmp_path / "x")
    other = private(ledger=tmp_path / "other.ledger")
    with pytest.raises(LedgerError, match="is another one, or an older copy; put the file of that run back"):
        other.restore(tmp_path / "x")
    (tmp_path / "old.ledger").write_bytes(old)
    rolled_back = private(ledger=tmp_path / "old.ledger")
    with pytest.raises(LedgerError, match="another one, or an older copy"):
        rolled_back.restore(tmp_path / "x")


def test_a_checkpoint_without_a_ledger_adds_to_one(tmp_path: Path, ledger: Path) -> None:
    go(private(), 2).save(tmp_path / "x")
    other = go(private(ledger=ledger), 1)
    other.restore(tmp_path / "x")
    assert sum(event.count for event in other.events) == 3
