"""Every logical batch has its step or is discarded, and charged; every update has the engine's noise and charge."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
import torch
from charged_steps import private, steps
from graphs import interpret

from ghostclip import BudgetExceededError, PrivacyError
from ghostclip.clipping import Adaptive, PerLayer
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
    engine.backward(runs.losses_of(engine.model, next(batch.physical()))) if batch.sizes else None


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
    with pytest.raises(PrivacyError, match=r"had no step: .*for examples in batch\.physical\(\).*discard\(\)"):
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


def test_the_step_that_is_missing_may_still_be_taken() -> None:
    """Also after the last batch of an epoch."""
    engine = private(batch_size=24)
    epoch = iter(engine.batches())
    runs.gather(engine, next(epoch))
    with pytest.raises(PrivacyError, match="had no step"):
        next(epoch)
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    assert steps(engine).steps_taken == 2


@pytest.mark.usefixtures("coarse_losses")
def test_a_discarded_batch_is_charged_and_releases_nothing(tmp_path: Path) -> None:
    engine = private(ledger=tmp_path / "run.ledger")
    before = runs.weights(engine.model)
    for charged in (1, 2):
        batch = next(iter(engine.batches()))
        runs.gather(engine, batch) if charged == 2 else None
        batch.discard()
        batch.discard()
        with pytest.raises(PrivacyError, match="without a logical batch"):
            engine.optimizer.step()
        assert engine.steps_taken == sum(event.count for event in engine.events) == charged
        engine.save(tmp_path / "x")
        assert engine.restore(tmp_path / "x").steps == charged
    assert torch.equal(runs.weights(engine.model), before)
    assert engine.epsilon() > 0
    engine.step(batch := next(iter(engine.batches())), runs.losses_of)
    with pytest.raises(PrivacyError, match="this one had its step"):
        batch.discard()
    next(iter(engine.batches()))
    engine.batches().discard()
    engine.batches().discard()
    assert engine.steps_taken == 4


@pytest.mark.usefixtures("coarse_losses")
def test_a_discard_past_the_budget_is_refused_and_discards() -> None:
    engine = private(max_epsilon=0.1)
    batch = next(iter(engine.batches()))
    with pytest.raises(BudgetExceededError, match="one more step would pass max_epsilon"):
        batch.discard()
    next(iter(engine.batches()))


def test_no_batch_is_taken_from_another_loop_while_the_first_is_there(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever could would look for a batch to their liking, and have the others for nothing."""
    engine = private(self_check=False)
    for _ in runs.nonempty(engine):
        for _ in range(2):
            with pytest.raises(PrivacyError, match="had no step"):
                next(iter(engine.batches()))
        break
    assert "left before its step" not in caplog.text
    runs.nonempty(engine)  # nothing is left of the first
    engine.step(next(iter(engine.batches())), runs.losses_of)
    assert "left before its step, by an exception or a break, and is not charged" in caplog.text
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


def hooks_lost(engine: PrivacyEngine) -> None:
    engine.optimizer.__init__(engine.model.parameters(), lr=0.5)  # type: ignore[misc]


def hooks_cleared(engine: PrivacyEngine) -> None:
    engine.optimizer._optimizer_step_pre_hooks.clear()
    engine.optimizer._optimizer_step_post_hooks.clear()


@torch.no_grad()
def plain_update(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        if parameter.grad is not None:
            parameter.sub_(0.5 * parameter.grad)


def replaced_on_instance(engine: PrivacyEngine) -> None:
    engine.optimizer.step = lambda closure=None: plain_update(engine.optimizer)  # type: ignore[method-assign]


def replaced_on_class(engine: PrivacyEngine) -> None:
    engine.optimizer.__class__ = type("Patched", (torch.optim.SGD,), {})
    type(engine.optimizer).step = lambda self, closure=None: plain_update(self)  # type: ignore[method-assign]


LOST = [hooks_lost, hooks_cleared, replaced_on_instance, replaced_on_class]


@pytest.mark.parametrize("lose", LOST)
def test_a_loop_by_hand_without_the_engine_s_hooks_steps_with_nothing(lose: Callable[[PrivacyEngine], None]) -> None:
    engine = steps(private())
    lose(engine)
    before = runs.weights(engine.model)
    runs.gather(engine, next(runs.nonempty(engine)))
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    assert torch.equal(runs.weights(engine.model), before)
    with pytest.raises(PrivacyError, match="had no step"):
        next(iter(engine.batches()))
    assert engine.steps_taken == 1


@pytest.mark.parametrize("lose", LOST)
@pytest.mark.parametrize("kind", ["standard", "adaptive", "compiled"])
@pytest.mark.one_in(6)
def test_engine_step_releases_with_noise_even_without_hooks(lose, kind, monkeypatch):
    """The same sums and the same noise as with them."""
    interpret(monkeypatch)
    found = []
    for change in (lambda engine: None, lose):
        clipping = Adaptive(1.0) if kind == "adaptive" else 1.0
        engine = private(batch_size=24, noise="test", seed=3, clipping=clipping)
        engine.compile() if kind == "compiled" else None
        change(engine)
        assert steps(engine, 3).steps_taken == 3
        found.append(runs.weights(engine.model))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


class Deaf(torch.optim.SGD):
    """Takes a closure and doesn't call it."""

    def step(self, closure: Any = None) -> Any:
        return super().step()


class Wordless(torch.optim.Optimizer):
    """Steps without calling the closure or a parent's step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        plain_update(self)


@pytest.mark.parametrize("frozen_first", [True, False])
@pytest.mark.parametrize("after", [1, 3])
def test_what_is_trained_stays_within_a_logical_batch(after: int, frozen_first: bool) -> None:
    """Sums of one partition would get the noise of another one."""
    engine = private(batch_size=24, max_physical_batch_size=8, clipping=PerLayer(1.0))
    before, part = runs.weights(engine.model), engine.model[0].requires_grad_(not frozen_first)
    batch = next(batch for batch in engine.batches() if len(batch.sizes) == 3)

    def gather_and_step() -> None:
        for number, examples in enumerate(batch.physical(), 1):
            engine.backward(runs.losses_of(engine.model, examples))
            if number == after:
                part.requires_grad_(frozen_first)
        engine.optimizer.step()

    with pytest.raises(PrivacyError, match="other parameters are trained than when the first gradients"):
        gather_and_step()
    assert engine.steps_taken == 0
    assert torch.equal(runs.weights(engine.model), before)


def test_a_closure_that_is_not_called_is_a_step_with_nothing() -> None:
    model = runs.network()
    engine = private(model, Wordless(model.parameters()))
    runs.gather(engine, next(runs.nonempty(engine)))
    before = runs.weights(model)
    with pytest.raises(PrivacyError, match=r"without the engine's noise or charge \(its closure was not called"):
        engine.optimizer.step(lambda: None)
    assert torch.equal(runs.weights(model), before)
    assert engine.steps_taken == 0
    torch.optim.SGD(model.parameters(), lr=0.1)  # torch calls hooks in SGD's own step once there was an SGD
    engine = private(model, Deaf(model.parameters(), lr=0.1))
    runs.gather(engine, next(runs.nonempty(engine)))
    engine.optimizer.step(lambda: pytest.fail("called"))
    assert engine.steps_taken == 1


@pytest.mark.parametrize(
    "take", [copy.copy, copy.deepcopy, pickle.dumps, lambda engine: copy.deepcopy({"trainer": [engine]})]
)
def test_an_engine_is_not_copied_or_pickled(take: Callable[[Any], Any]) -> None:
    engine = steps(private())
    with pytest.raises(PrivacyError, match=r"can't be copied or pickled.*build a new engine.*restore\(\)"):
        take(engine)
    copy.deepcopy((engine.model, engine.optimizer))
    steps(engine)
