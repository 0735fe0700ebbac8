"""The engine and its ledger: charged before release, counted across runs, stopped before a budget is passed."""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
from ledgers import charged, spent

from ghostclip import accounting
from ghostclip.accounting import affordable, targets
from ghostclip.engine import PrivacyEngine
from ghostclip.errors import BudgetExceededError, PrivacyError
from ghostclip.events import FixedSizeGaussian, SampledGaussian
from ghostclip.ledger import Account, Ledger
from ghostclip.noise.gaussian import Aes, ChaCha

PRIVATE = {"noise_multiplier": 1.0, "clipping": 0.5, "target_delta": 1e-3}
EVENT = SampledGaussian(1 / 3, 1.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accountant of a closed form, and noise of 1 for every target, where it doesn't matter what they are."""

    def epsilon_of(events: Any, *, delta: float, accountant: str = "pld", coarser: int = 1) -> float:
        terms = [event.count * (event.sample_rate / event.noise_multiplier) ** 2 for event in events]
        return 4 * math.sqrt(sum(terms)) + sum(terms)

    class Running:
        def epsilon(self, events: Any, delta: float) -> float:
            return epsilon_of(events, delta=delta)

    for place in (accounting, targets):
        monkeypatch.setattr(place, "epsilon_of", epsilon_of)
    monkeypatch.setattr(accounting, "RunningEpsilon", Running)
    monkeypatch.setattr(accounting, "noise_for", lambda *arguments, **more: 1.0)


def stepped(engine: PrivacyEngine, steps: int) -> PrivacyEngine:
    runs.train(engine, steps)
    return engine


def engine_for(path: Path | Ledger | None, **changes: Any) -> PrivacyEngine:
    return runs.engine_for(runs.network(), ledger=path, **{**PRIVATE, **changes})


def steps_until_refused(engine: PrivacyEngine, match: str) -> int:
    with pytest.raises(BudgetExceededError, match=match):
        stepped(engine, 10**6)
    return engine.steps_taken


def epsilon(steps: int, before: list[Any] | None = None) -> float:
    return accounting.epsilon_of([*(before or []), replace(EVENT, count=steps)], delta=1e-3)


@pytest.mark.parametrize("block", [1, 4])
def test_each_release_is_in_the_file_before_it_happens(path: Path, block: int) -> None:
    engine = engine_for(Ledger(path, block=block))
    seen: list[int] = []
    release = engine._steps.release._noise.release
    engine._steps.release._noise.release = lambda *a: (seen.append(spent(path)), release(*a))[1]  # type: ignore[method-assign]
    stepped(engine, 6)
    assert seen == [-(-step // block) * block for step in range(1, 7)]
    engine.detach()
    assert spent(path) == 6


@pytest.mark.usefixtures("quick")
def test_epsilon_is_of_everything_in_the_ledger(path: Path) -> None:
    engine = stepped(engine_for(path), 3)
    assert engine.epsilon() == epsilon(3)
    another = stepped(engine_for(path, noise_multiplier=2.0), 2)
    more = SampledGaussian(1 / 3, 2.0, 2)
    assert engine.epsilon() == pytest.approx(epsilon(3, [more]), rel=1e-12)
    assert another.epsilon() == pytest.approx(epsilon(3, [more]), rel=1e-12)
    engine.detach()
    another.detach()
    later = engine_for(path)
    assert later.epsilon() == pytest.approx(epsilon(3, [more]), rel=1e-12)
    assert sorted(later.events, key=str) == sorted([replace(EVENT, count=3), more], key=str)
    assert (later.steps_taken, later.ledger.head.records) == (0, 5)


def test_the_ledger_knows_the_run_s_settings(path: Path) -> None:
    stepped(engine_for(path, noise="test", seed=3), 1).detach()
    (charge,) = Ledger(path).contents.charges.values()
    assert (charge.noise, charge.event.noise_multiplier, charge.event.sample_rate) == ("test", 0.0, 1 / 3)
    made_by = [f"{stream.generator}, seeded (noise='test' counts as none)" for stream in (ChaCha, Aes)]
    assert charge.generator in made_by
    assert engine_for(path).epsilon() == math.inf


@pytest.mark.usefixtures("coarse_losses")
def test_the_guarantee_names_the_noise_of_all_that_the_ledger_counts(path: Path) -> None:
    """Not that of the last run alone, nor of a run that gave all its steps back; a record may lack the generator."""
    first = stepped(engine_for(path), 2)
    made_by = first._snapshots.noise.generator_for(first.model)
    assert f"Its noise comes from {made_by}. M" in first.guarantee()
    first.detach()
    later = engine_for(path, noise="hardened")
    assert f"Its noise comes from {made_by}" not in later.guarantee()
    stepped(later, 1)
    hardened = "AES-256, a cipher, in OpenSSL, with a key of its own for each step"
    assert f"Its noise comes from {made_by}; of other steps from {hardened}. M" in later.guarantee()
    later.detach()
    charged(Ledger(path).account(), 1, EVENT).close()
    last = stepped(engine_for(path), 1)
    said = f"{made_by}; of other steps from {hardened}; of other steps from a generator that was not recorded. M"
    for _ in range(2):
        assert said in last.guarantee()
        last.detach()


def most_within(limit: float, before: list[Any] | None = None) -> int:
    """How many steps stay within an epsilon, by counting."""
    steps = 0
    while epsilon(steps + 1, before) <= limit:
        steps += 1
    return steps


@pytest.mark.usefixtures("quick")
def test_planned_steps_are_counted_across_runs(path: Path) -> None:
    planned = {"noise_multiplier": None, "target_epsilon": 2.0, "steps": 7}
    stepped(engine_for(path, **planned), 4).detach()
    assert steps_until_refused(engine_for(path, **planned), f"all 7 planned steps were taken .*{path}") == 3
    assert spent(path) == 7


@pytest.mark.usefixtures("quick")
def test_what_else_is_in_the_ledger_counts_for_the_target(path: Path) -> None:
    stepped(engine_for(path, noise_multiplier=2.0), 2).detach()
    planned = {"noise_multiplier": None, "target_epsilon": 4.0, "steps": 40}
    engine = engine_for(path, **planned)
    past = [SampledGaussian(1 / 3, 2.0, 2)]
    assert steps_until_refused(engine, r"one more step would pass target_epsilon = 4\.0") == most_within(4.0, past) > 0


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("with_ledger", [False, True])
def test_a_budget_is_used_to_the_last_step(path: Path, with_ledger: bool) -> None:
    engine = engine_for(path if with_ledger else None, max_epsilon=9.0)
    message = r"one more step would pass max_epsilon = 9\.0 at delta = 0\.001: epsilon = [78]\."
    assert steps_until_refused(engine, message) == most_within(9.0) > 1
    assert spent(path) == most_within(9.0) if with_ledger else not path.exists()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("place", "name", "lost"), [(os, "write", 3), (os, "fsync", 3), (Account, "charge", 1)])
def test_what_an_interruption_leaves_counts_for_the_budget(path: Path, place: Any, name: str, lost: int) -> None:
    engine, work = stepped(engine_for(Ledger(path, block=3), max_epsilon=9.0), 3), getattr(place, name)

    def interrupted(*arguments: Any) -> None:
        work(*arguments)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            stepped(engine, 1)
    steps_until_refused(engine, "would pass max_epsilon")
    assert engine.epsilon() <= 9.0
    assert engine.steps_taken + lost == spent(path) == most_within(9.0)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("block", [1, 5])
def test_two_engines_share_a_budget(path: Path, block: int) -> None:
    ledger: Any = Ledger(path, block=block)
    engines = engine_for(ledger, max_epsilon=20.0), engine_for(ledger, max_epsilon=20.0, noise_multiplier=0.8)
    while True:
        try:
            stepped(min(engines, key=lambda engine: engine.steps_taken), 1)
        except BudgetExceededError:
            break
    assert engines[0].epsilon() <= 20.0
    # What the other one has in its block is out of reach.
    more = [SampledGaussian(1 / 3, 0.8, block), *engines[0].events]
    assert accounting.epsilon_of(more, delta=1e-3) > 20.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_epsilon": 0.0}, "max_epsilon must be a finite number > 0"),
        ({"max_epsilon": math.nan}, "max_epsilon must be a finite number > 0"),
        ({"max_epsilon": 3.0, "noise_multiplier": 0.0}, r"max_epsilon=3\.0 can't be kept without private noise"),
        ({"max_epsilon": 3.0, "noise": "test", "seed": 1}, r"max_epsilon=3\.0 can't be kept without private noise"),
    ],
)
def test_budgets_that_mean_nothing(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_for(None, **changes)


@pytest.mark.parametrize(
    "other", [replace(EVENT, relation="replace_one"), replace(EVENT, unit="user")], ids=["relation", "unit"]
)
def test_a_ledger_about_other_neighbours_is_refused(path: Path, other: SampledGaussian) -> None:
    charged(Ledger(path).account(), 1, other).close()
    with pytest.raises(PrivacyError, match="protect different things and don't add up"):
        engine_for(path)
    charged(Ledger(path).account(), 1, other).close()  # and it isn't kept open


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("past", [[], [SampledGaussian(0.3, 2.0, 3), FixedSizeGaussian(0.1, 1.5, 2)]], ids=len)
@pytest.mark.parametrize("limit", [0.1, 2.5, 20.0])
@pytest.mark.parametrize("off", [0.5, 1.2])
def test_affordable_steps_are_those_a_slow_count_finds(
    past: list[Any], limit: float, off: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = accounting.epsilon_of

    def epsilon_of(events: Any, *, delta: float, accountant: str = "pld", coarser: int = 1) -> float:
        return exact(events, delta=delta) * (off if accountant == "rdp" else 1.0)

    monkeypatch.setattr(targets, "epsilon_of", epsilon_of)
    found = affordable(past, EVENT, max_epsilon=limit, delta=1e-3)
    assert found == most_within(limit, past)
    for most in (0, 1, found, found + 1, 2 * found):
        assert affordable(past, EVENT, max_epsilon=limit, delta=1e-3, most=most) == min(most, found)


@pytest.mark.parametrize("way", ["restore", "load_state_dict"])
@pytest.mark.usefixtures("coarse_losses")
def test_steps_taken_without_the_ledger_are_in_it_once_the_training_goes_on_with_it(path: Path, way: str) -> None:
    """Or the next run on these data would be told that they weren't spent."""
    alone, saved = stepped(engine_for(None), 3), path.with_suffix(".checkpoint")
    alone.save(saved)
    for steps in (4, 5):
        with_ledger = engine_for(path)
        with_ledger.restore(saved) if way == "restore" else with_ledger.load_state_dict(alone.state_dict())
        assert spent(path) == with_ledger.steps_taken == steps - 1
        stepped(with_ledger, 1).detach()
        assert spent(path) == steps
        assert engine_for(path).epsilon() == with_ledger.epsilon()
        alone = with_ledger
        alone.save(saved)


@pytest.mark.usefixtures("coarse_losses")
def test_steps_that_are_taken_in_leave_fewer_of_a_block_that_was_reserved(path: Path) -> None:
    alone = stepped(engine_for(None), 5)
    most = stepped(engine_for(None), 8).epsilon(delta=PRIVATE["target_delta"])
    engine = stepped(engine_for(path, max_epsilon=most * 1.0001), 1)
    engine.load_state_dict(alone.state_dict())
    assert steps_until_refused(engine, "one more step would pass max_epsilon") == 8
