"""Releases before a training: charged first, once in each ledger, counted by each engine, inside of the target."""

import math
from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
import torch

from ghostclip import PrivacyEngine, accounting, private_mean
from ghostclip.errors import BudgetExceededError, PrivacyError
from ghostclip.events import Event, SampledGaussian
from ghostclip.ledger import Ledger
from ghostclip.noise.mean import PrivateMean

pytestmark = pytest.mark.usefixtures("coarse_losses")

MEAN = SampledGaussian(1.0, 8.0)
TARGET = {"noise_multiplier": None, "target_epsilon": 1.5, "steps": 4, "target_delta": 1e-3}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.ledger"


def released(**changes: Any) -> PrivateMean:
    return private_mean(torch.ones(24, 3), **changes)


def engine_for(before: Any, **changes: Any) -> PrivacyEngine:
    options = {"noise_multiplier": 2.0, "clipping": 0.5, "target_delta": 1e-3, **changes}
    return runs.engine_for(runs.network(), before=before, **options)


def spent(*events: Event) -> float:
    return accounting.epsilon_of(events, delta=1e-3)


def test_it_is_charged_before_the_first_step_and_counts() -> None:
    engine = engine_for([released()])
    assert (engine.events, engine.steps_taken) == ([MEAN], 0)
    runs.train(engine, 2)
    assert engine.steps_taken == 2
    assert engine.epsilon() == pytest.approx(spent(MEAN, SampledGaussian(1 / 3, 2.0, 2)), rel=1e-3)
    words = engine.guarantee()
    assert "1 step over Poisson samples at rate 1 with noise multiplier 8" in words
    assert "It includes 1 release over all examples before the training (noise multiplier 8)." in words


def test_two_engines_count_it_and_each_ledger_is_charged_once(path: Path) -> None:
    mean = released()
    first = engine_for([mean, mean], ledger=path)
    assert Ledger(path).events == [MEAN]
    second, apart, alone = engine_for([mean], ledger=path), engine_for([mean], ledger=f"{path}2"), engine_for([mean])
    for engine in (first, second, apart, alone):
        assert engine.events == [MEAN]
    assert Ledger(f"{path}2").events == [MEAN]
    runs.train(second, 1)
    assert first.epsilon() == pytest.approx(spent(MEAN, SampledGaussian(1 / 3, 2.0)), rel=1e-3)
    another = engine_for([mean, released()], ledger=path)
    assert sorted(event.count for event in another.events) == [1, 2]
    (charge, *_) = Ledger(path).contents.charges.values()
    assert (charge.run, charge.noise, charge.generator) == (mean.name, "standard", mean.generator)


def test_the_noise_is_calibrated_for_all_releases() -> None:
    engine, plain = engine_for([released()], **TARGET), engine_for([], **TARGET)
    expected = accounting.noise_for(
        lambda noise: [MEAN, SampledGaussian(1 / 3, noise, 4)], target_epsilon=1.5, delta=1e-3
    )
    assert engine.noise_multiplier == expected > plain.noise_multiplier
    runs.train(engine, 4)
    assert engine.epsilon() <= 1.5
    assert spent(*engine.events) == pytest.approx(1.5, rel=1e-3)
    with pytest.raises(BudgetExceededError, match="all 4 planned steps"):
        runs.train(engine, 1)


def test_a_release_like_the_steps_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full batches: mean and steps are the same event, and all planned steps may be taken."""
    monkeypatch.setattr(accounting, "noise_for", lambda *_, **__: 4.0)
    engine = engine_for([released(noise_multiplier=4.0)], **TARGET, batch_size=24)
    assert engine.noise_multiplier == 4.0
    runs.train(engine, 4)
    assert engine.events == [SampledGaussian(1.0, 4.0, 5)]
    assert engine.steps_taken == 4
    with pytest.raises(BudgetExceededError):
        runs.train(engine, 1)


def test_it_counts_for_the_largest_epsilon() -> None:
    limit = spent(MEAN, SampledGaussian(1 / 3, 2.0, 3)) + 1e-3
    with pytest.raises(BudgetExceededError, match="one more step would pass max_epsilon"):
        runs.train(engine := engine_for([released()], max_epsilon=limit), 10)
    assert engine.steps_taken == 3


def test_a_checkpoint_keeps_it(tmp_path: Path) -> None:
    mean = released()
    engine = engine_for([mean])
    runs.train(engine, 2)
    engine.save(tmp_path / "kept")
    for before in ([mean], []):
        again = engine_for(before)
        assert again.restore(tmp_path / "kept").steps == 2
        assert again.steps_taken == 2
        assert sorted(again.events, key=str) == sorted(engine.events, key=str)


def test_repeatable_noise_protects_nothing() -> None:
    seeded = released(noise="test", seed=1)
    assert engine_for([seeded]).epsilon() == math.inf
    with pytest.raises(ValueError, match=r"leaves nothing of target_epsilon = 1\.5"):
        engine_for([seeded], **TARGET)
    # A whole rehearsal from seeds has the noise of the private training.
    rehearsed, real = engine_for([seeded], noise="test", seed=1, **TARGET), engine_for([released()], **TARGET)
    assert rehearsed.noise_multiplier == real.noise_multiplier
    assert rehearsed.epsilon() == math.inf


@pytest.mark.parametrize(
    ("before", "changes", "error", "message"),
    [
        ([MEAN], {}, TypeError, "what ghostclip.private_mean returned; got SampledGaussian"),
        ([{"noise_multiplier": 0.5}], TARGET, ValueError, "released before spends epsilon = .* leaves nothing"),
        ([{"neighboring": "replace_one"}], {}, PrivacyError, "about replace_one of one example.* different things"),
        ([{}], {"unit_ids": list(range(24))}, PrivacyError, "the steps .*of one user.* protect different things"),
        ([{}], {"unit_ids": list(range(24)), **TARGET}, PrivacyError, "protect different things.* no unit_ids"),
        ({}, {}, TypeError, r"give before=\[released\]"),
    ],
)
def test_what_cannot_be_charged_is_refused(before, changes, error, message, path):
    """A dict stands for a release by these options."""
    given = released() if before == {} else [released(**each) if isinstance(each, dict) else each for each in before]
    with pytest.raises(error, match=message):
        engine_for(given, ledger=path, **changes)
    assert not path.exists() or Ledger(path).events == []


def test_a_number_before_is_refused() -> None:
    with pytest.raises(TypeError, match=r"before must be a list of what .* got 3 in it"):
        engine_for(3)  # type: ignore[arg-type]
