"""Every update has the engine's noise and charge, whatever was done to the optimizer's hooks and step."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import private_runs as runs
import pytest
import torch
from charged_steps import by_hand, private, steps
from graphs import interpret
from torch import Tensor

from ghostclip import PrivacyError
from ghostclip.clipping import Adaptive
from ghostclip.engine import PrivacyEngine


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


every_loss = pytest.mark.parametrize("lose", LOST)


@every_loss
def test_a_loop_by_hand_without_the_engine_s_hooks_steps_with_nothing(lose: Callable[[PrivacyEngine], None]) -> None:
    engine = steps(private())
    lose(engine)
    before = runs.weights(engine.model)
    by_hand(engine, engine.optimizer)
    assert torch.equal(runs.weights(engine.model), before)
    with pytest.raises(PrivacyError, match="had no step"):
        next(iter(engine.batches()))
    assert engine.steps_taken == 1


KINDS: dict[str, dict[str, Any]] = {
    "standard": {},
    "hardened": {"noise": "hardened"},
    "adaptive": {"clipping": Adaptive(1.0)},
    "compiled": {},
}


@every_loss
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(8)
def test_engine_step_releases_with_noise_even_without_hooks(
    lose: Callable[[PrivacyEngine], None], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpret(monkeypatch)
    found = []
    for broken in (False, True):
        model = runs.network()
        engine = private(model, torch.optim.SGD(model.parameters(), lr=0.5), batch_size=24, **KINDS[kind])
        engine._steps.release._private = noted = Releases(engine._steps.release._private)
        engine.compile() if kind == "compiled" else None
        lose(engine) if broken else None
        before = runs.weights(model)
        steps(engine, 3)
        assert engine.steps_taken == 3
        assert engine.epsilon() > 0
        torch.testing.assert_close(runs.weights(model), before - 0.5 * sum(noted.made), atol=1e-5, rtol=1e-5)
        found.append(len(noted.made))
    assert found == [3, 3]


class Releases:
    """Notes what is put in place of sums."""

    def __init__(self, private: Callable[[list[Any], list[Tensor]], list[Tensor]]) -> None:
        self.private, self.made = private, []

    def __call__(self, parameters: list[Any], sums: list[Tensor]) -> list[Tensor]:
        before = [total.clone() for total in sums]
        private = self.private(parameters, sums)
        assert not any(torch.equal(total / 24, part) for total, part in zip(before, private, strict=True))
        self.made.append(torch.cat([part.flatten() for part in private]))
        return private


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


def test_a_closure_that_is_not_called_is_a_step_with_nothing() -> None:
    model = runs.network()
    engine = private(model, Wordless(model.parameters()))
    runs.gather(engine, next(runs.nonempty(engine)))
    before = runs.weights(model)
    with pytest.raises(PrivacyError, match=r"without the engine's noise or charge \(its closure was not called"):
        engine.optimizer.step(lambda: None)
    assert torch.equal(runs.weights(model), before)
    assert engine.steps_taken == 0
    model = runs.network()
    # torch calls hooks in SGD's own step once there was an SGD.
    torch.optim.SGD(model.parameters(), lr=0.1)
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
