"""Every logical batch has its step or is discarded, and charged, before the next one is taken."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
import torch
from charged_steps import private, steps

from ghostclip import BudgetExceededError, PrivacyError
from ghostclip.engine import PrivacyEngine
from ghostclip.sampling import BatchState


def small(batch_size: int = 1, **changes: Any) -> PrivacyEngine:
    """An engine of which a third of the batches is empty."""
    return private(dataset=runs.data(6), batch_size=batch_size, max_physical_batch_size=None, **changes)


def step_inside(engine: PrivacyEngine, batch: Any) -> None:
    for examples in batch.physical():
        engine.backward(runs.losses_of(engine.model, examples))
        engine.optimizer.step()
        engine.optimizer.zero_grad()


def every_second(engine: PrivacyEngine, batch: Any) -> None:
    runs.gather(engine, batch)
    if engine._snapshots.loader._taken % 2 == 0:
        engine.optimizer.step()
        engine.optimizer.zero_grad()


def first_part_only(engine: PrivacyEngine, batch: Any) -> None:
    for examples in batch.physical():
        engine.backward(runs.losses_of(engine.model, examples))
        break


def only_zeroed(engine: PrivacyEngine, batch: Any) -> None:
    runs.gather(engine, batch)
    engine.optimizer.zero_grad()


def swallowed(engine: PrivacyEngine, batch: Any) -> None:
    try:
        for _ in batch.physical():
            raise OSError
    except OSError:
        return


LOOPS = [step_inside, every_second, first_part_only, only_zeroed, swallowed, lambda engine, batch: None]


def train(engine: PrivacyEngine, loop: Callable[[PrivacyEngine, Any], None], seen: list[Any]) -> None:
    """Ten epochs of a loop, which goes through the batches ``seen``."""
    for _ in range(10):
        for batch in engine.batches():
            loop(engine, batch)
            seen.append(batch)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_batch_without_a_step_is_refused_when_the_next_is_taken(loop: Callable[[PrivacyEngine, Any], None]) -> None:
    engine, seen = small(), list[Any]()
    with pytest.raises(PrivacyError, match=r"had no step(.|\n)*for examples in batch\.physical\(\)(.|\n)*discard\(\)"):
        train(engine, loop, seen)
    assert engine.steps_taken == len(seen) - 1
    assert all(batch.state is BatchState.STEPPED for batch in seen[:-1])
    for _ in range(2 * (seen[-1].state is BatchState.COMPLETE)):
        with pytest.raises(PrivacyError, match="had no step"):
            next(iter(engine.batches()))
    charged = engine.steps_taken
    seen[-1].discard()
    assert engine.steps_taken == charged + 1
    steps(engine)


def test_the_last_batch_of_an_epoch_needs_its_step_too() -> None:
    engine = private(batch_size=24)
    with pytest.raises(PrivacyError, match="had no step"):
        for _ in engine.batches():
            pass
    assert engine.steps_taken == 0


def test_the_step_that_is_missing_may_still_be_taken() -> None:
    engine = private()
    epoch = iter(engine.batches())
    batch = next(epoch)
    runs.gather(engine, batch)
    with pytest.raises(PrivacyError, match="had no step"):
        next(epoch)
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    engine.step(next(epoch), runs.losses_of)
    assert engine.steps_taken == 2


def test_the_loop_in_the_message_trains() -> None:
    engine = small()
    for batch in engine.batches():
        runs.gather(engine, batch)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    assert engine.steps_taken == len(engine.batches())


def test_a_discarded_batch_is_charged_and_releases_nothing(tmp_path: Path) -> None:
    engine = private(ledger=tmp_path / "run.ledger")
    before = runs.weights(engine.model)
    for number, batch in enumerate(engine.batches()):
        runs.gather(engine, batch) if number % 2 else None
        batch.discard()
        batch.discard()
        assert all(parameter.grad is None for parameter in engine.model.parameters())
        with pytest.raises(PrivacyError, match="without a logical batch"):
            engine.optimizer.step()
        assert engine.steps_taken == sum(event.count for event in engine.events) == number + 1
        engine.save(tmp_path / "x")
        assert engine.restore(tmp_path / "x").steps == number + 1
        break
    assert torch.equal(runs.weights(engine.model), before)
    assert engine.epsilon() > 0
    batch = next(iter(engine.batches()))
    engine.step(batch, runs.losses_of)
    with pytest.raises(PrivacyError, match="this one had its step"):
        batch.discard()
    next(iter(engine.batches()))
    engine.batches().discard()
    engine.batches().discard()
    assert engine.steps_taken == 3


def test_a_discard_past_the_budget_is_refused_and_discards() -> None:
    engine = private(max_epsilon=0.1)
    batch = next(iter(engine.batches()))
    with pytest.raises(BudgetExceededError, match="one more step would pass max_epsilon"):
        batch.discard()
    next(iter(engine.batches()))


def test_an_exception_that_leaves_the_loops_discards() -> None:
    engine = private(self_check=False)

    def a_loop() -> None:
        for batch in runs.nonempty(engine):
            for examples in batch.physical():
                engine.backward(runs.losses_of(engine.model, examples))
                raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            a_loop()
    steps(engine)
    assert engine.steps_taken == 1


def failing(*_: Any) -> Any:
    raise MemoryError


@pytest.mark.parametrize("place", ["step", "backward", "charge", "loss function"])
def test_an_exception_in_the_engine_discards(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = private(self_check=False)
    epoch = runs.nonempty(engine)

    def a_turn(batch: Any) -> None:
        if place in ("step", "loss function"):
            engine.step(batch, failing if place == "step" else None)  # type: ignore[arg-type]
        runs.gather(engine, batch)
        engine.optimizer.step()

    for _ in range(3):
        batch = next(epoch)
        with monkeypatch.context() as patch:
            patch.setattr(engine._steps._clipper.passes, "clip", failing) if place == "backward" else None
            patch.setattr(engine._steps.release, "charge", failing) if place == "charge" else None
            with pytest.raises((MemoryError, TypeError)):
                a_turn(batch)
    engine.step(next(epoch), runs.losses_of)
    assert engine.steps_taken == 1


def test_a_call_that_is_mended_after_an_exception_still_needs_its_step() -> None:
    engine = private(self_check=False)
    epoch = runs.nonempty(engine)
    for examples in next(epoch).physical():
        with pytest.raises(ValueError, match="reduction"):
            engine.backward(runs.losses_of(engine.model, examples).sum())
        engine.backward(runs.losses_of(engine.model, examples))
    with pytest.raises(PrivacyError, match="had no step"):
        next(epoch)
