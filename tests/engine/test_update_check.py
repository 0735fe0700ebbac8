"""Trained parameters move in charged steps only, and stay the objects they were, or an error says so."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
import torch
from charged_steps import MOVED, assert_all_refuse, private, steps
from torch import nn

from ghostclip import PrivacyError

OTHERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "sgd without foreach": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, foreach=False, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("first", [0, 2], ids=["at first", "after steps"])
def test_a_second_optimizer_is_noticed_at_the_next_batch_and_in_every_report(
    name: str, first: int, tmp_path: Path
) -> None:
    engine = steps(private(), first)
    runs.gather(engine, next(runs.nonempty(engine)))
    runs.plain_backward(engine.model)
    OTHERS[name](engine.model.parameters(), lr=0.1).step()
    assert_all_refuse(engine, MOVED, tmp_path)
    assert engine.steps_taken == first


def test_a_second_optimizer_is_noticed_between_a_batch_s_start_and_its_first_backward() -> None:
    engine = private()
    other = torch.optim.SGD(engine.model.parameters(), lr=0.1)
    examples = next(next(runs.nonempty(engine)).physical())
    runs.losses_of(engine.model, examples).mean().backward()
    other.step()
    other.zero_grad()
    with pytest.raises(PrivacyError, match=MOVED):
        engine.backward(runs.losses_of(engine.model, examples))
    assert all(parameter.grad is None for parameter in engine.model.parameters())


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "in place": lambda model: model[2].bias.add_(1.0),
    "zeros": lambda model: nn.init.zeros_(model[0].weight),
    "at once": lambda model: torch._foreach_mul_(list(model.parameters()), 0.5),
    "state dict": lambda model: model.load_state_dict(runs.network().state_dict()),
    "vector": lambda model: nn.utils.vector_to_parameters(torch.zeros(8 * 5 + 8 + 3 * 8 + 3), model.parameters()),
    "clipped": lambda model: model[0].weight.clamp_(-0.1, 0.1),
    "averaged": lambda model: model[0].weight.lerp_(torch.zeros(8, 5), 0.1),
    "other memory": lambda model: setattr(model[0].bias, "data", torch.zeros(8)),
}


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
@pytest.mark.one_in(3)
def test_changes_from_outside_are_refused_until_they_are_accepted(name: str, tmp_path: Path) -> None:
    with torch.enable_grad():
        engine = steps(private())
    CHANGES[name](engine.model)
    assert_all_refuse(engine, MOVED, tmp_path)
    engine.accept_parameters()
    assert engine.epsilon() > 0
    engine.save(tmp_path / "x")
    with torch.enable_grad():
        steps(engine, 3)
    assert engine.steps_taken == 4


def test_values_written_through_data_are_not_seen() -> None:
    """As SECURITY.md says."""
    engine = steps(private())
    engine.model[0].weight.data.add_(1.0)
    assert steps(engine).steps_taken == 2


def test_what_comes_before_the_first_batch_needs_no_acceptance(tmp_path: Path) -> None:
    engine = private()
    engine.model.load_state_dict({name: value + 1 for name, value in engine.model.state_dict().items()})
    assert engine.epsilon() == 0
    steps(engine, 2).save(tmp_path / "x")


def test_frozen_parameters_may_change_and_thawed_ones_may_not(tmp_path: Path) -> None:
    engine = steps(private())
    layer = engine.model[0].requires_grad_(False)
    nn.init.zeros_(layer.weight)
    engine.epsilon()
    layer.requires_grad_(True)
    assert_all_refuse(engine, MOVED, tmp_path)
    layer.requires_grad_(False)
    steps(engine)
    layer.requires_grad_(True)
    steps(engine)


def test_sums_that_are_gathered_can_not_be_accepted_away() -> None:
    engine = private()
    parts = next(runs.nonempty(engine)).physical()
    engine.backward(runs.losses_of(engine.model, next(parts)))
    torch.nn.init.zeros_(engine.model[0].bias)
    with pytest.raises(PrivacyError, match=r"engine\.accept_parameters\(\) was called inside of a logical batch"):
        engine.accept_parameters()
    examples = next(parts)
    with pytest.raises(PrivacyError, match=MOVED):
        engine.backward(runs.losses_of(engine.model, examples))


def test_restoring_and_reports_within_a_step_are_no_changes(tmp_path: Path) -> None:
    engine = steps(private())
    engine.save(tmp_path / "x")
    engine.restore(tmp_path / "x")
    reported: list[float] = []
    for register in (engine.optimizer.register_step_pre_hook, engine.optimizer.register_step_post_hook):
        register(lambda *_: reported.append(engine.epsilon()))
    steps(engine)
    assert len(reported) == 2
    nn.init.zeros_(engine.model[0].bias)
    engine.restore(tmp_path / "x")
    steps(engine)


def test_a_detached_engine_reports_what_it_spent() -> None:
    engine = steps(private())
    spent = engine.epsilon()
    engine.detach()
    nn.init.zeros_(engine.model[0].bias)
    assert engine.epsilon() == spent


class Decaying(torch.optim.SGD):
    """Changes parameters after its parent's step, whose hooks are called for both."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        value = super().step(closure)
        torch._foreach_mul_(self.param_groups[0]["params"], 0.9)
        return value


@pytest.mark.parametrize(
    "make",
    [Decaying, *OTHERS.values(), lambda p, lr: torch.optim.Adam(p, lr=lr, fused=True)],
    ids=["decaying", *OTHERS, "fused"],
)
@pytest.mark.parametrize("closure", [False, True])
def test_an_optimizer_s_own_update_is_no_change(make: Callable[..., Any], closure: bool) -> None:
    model = runs.network()
    engine = private(model, make(model.parameters(), lr=0.01))
    for batch in engine.batches():
        if closure:
            engine.optimizer.step(lambda batch=batch: runs.gather(engine, batch))
        else:
            runs.gather(engine, batch)
            engine.optimizer.step()
        engine.optimizer.zero_grad()
    steps(engine, 2)
    assert engine.steps_taken == 5


def replaced(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def grown(model: nn.Sequential) -> None:
    model.append(nn.Linear(3, 3))


OBJECTS: dict[str, tuple[Callable[[nn.Sequential], Any], str]] = {
    "bfloat16": (lambda model: model.to(torch.bfloat16), "is torch.bfloat16 and was torch.float32"),
    "float64": (lambda model: model.double(), "is torch.float64 and was torch.float32"),
    "one layer": (lambda model: model[2].half(), r"'2\.weight' is torch.float16"),
    "assigned": (
        lambda model: model.load_state_dict(runs.network().state_dict(), assign=True),
        r"'0\.weight' is another object",
    ),
    "a parameter": (replaced, r"'0\.weight' is another object"),
    "a layer": (lambda model: model.__setitem__(2, nn.Linear(8, 3)), r"'2\.weight' is another object"),
    "one more": (grown, r"'3\.weight' is another object"),
    "one less": (lambda model: model.__delitem__(2), r"'2\.weight' is another object"),
    "without": (lambda model: setattr(model[0], "bias", None), r"'0\.bias' is another object"),
}


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("when", ["before the first batch", "after steps", "before the step"])
def test_types_and_objects_that_change_are_refused(name: str, when: str, tmp_path: Path) -> None:
    engine = private()
    change, message = OBJECTS[name]
    if when == "before the step":
        runs.gather(engine, next(runs.nonempty(engine)))
        change(engine.model)
        with pytest.raises(PrivacyError, match=message):
            engine.optimizer.step()
    else:
        steps(engine, 2 * (when == "after steps"))
        change(engine.model)
        assert_all_refuse(engine, message, tmp_path)
        with pytest.raises(PrivacyError, match=message):
            engine.accept_parameters()
    assert engine.steps_taken == 2 * (when == "after steps")


def test_modules_without_parameters_may_come_and_go() -> None:
    engine = steps(private())
    engine.model[1] = nn.ReLU()
    steps(engine)
    engine.model.append(nn.Identity())
    assert steps(engine).steps_taken == 3
