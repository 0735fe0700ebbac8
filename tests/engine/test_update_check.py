"""Trained parameters move in charged steps only, and stay the objects they were, or an error says so."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
import torch
from case_models import By, Wired
from charged_steps import MOVED, assert_all_refuse, private, steps
from lookaheads import LOOKAHEADS, around, pull_back
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ghostclip import PrivacyError

OTHERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


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
    examples = next(next(runs.nonempty(engine)).physical())
    runs.plain_backward(engine.model)
    torch.optim.SGD(engine.model.parameters(), lr=0.1).step()
    engine.optimizer.zero_grad()
    with pytest.raises(PrivacyError, match=MOVED):
        engine.backward(runs.losses_of(engine.model, examples))


@pytest.mark.parametrize("closure", [False, True])
def test_an_optimizer_s_own_update_is_no_change(closure: bool) -> None:
    model = runs.network()
    engine = private(model, Decaying(model.parameters(), lr=0.01))
    LOOPS["closure" if closure else "by hand"](engine)
    assert steps(engine, 2).steps_taken == 5


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "in place": lambda model: model[2].bias.add_(1.0),
    "at once": lambda model: torch._foreach_mul_(list(model.parameters()), 0.5),
    "state dict": lambda model: model.load_state_dict(runs.network().state_dict()),
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
    assert engine.guarantee().startswith("epsilon")
    nn.init.zeros_(engine.model[0].bias)
    assert engine.epsilon() == spent
    for state in (engine.guarantee, engine.model_card):
        with pytest.raises(PrivacyError, match="changed outside of this engine's charged steps"):
            state()


class Decaying(torch.optim.SGD):
    """Changes parameters after its parent's step, whose hooks are called for both."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        value = super().step(closure)
        torch._foreach_mul_(self.param_groups[0]["params"], 0.9)
        return value


OBJECTS: dict[str, tuple[Callable[[nn.Sequential], Any], str]] = {
    "bfloat16": (lambda model: model.to(torch.bfloat16), "is torch.bfloat16 and was torch.float32"),
    "one layer": (lambda model: model[2].half(), r"'2\.weight' is torch.float16"),
    "assigned": (
        lambda model: model.load_state_dict(runs.network().state_dict(), assign=True),
        r"'0\.weight' is another object",
    ),
    "a layer": (lambda model: model.__setitem__(2, nn.Linear(8, 3)), r"'2\.weight' is another object"),
    "one more": (lambda model: model.append(nn.Linear(3, 3)), r"'3\.weight' is another object"),
    "one less": (lambda model: model.__delitem__(2), r"'2\.weight' is another object"),
}


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("before", [0, 2], ids=["before the first batch", "after steps"])
def test_types_and_objects_that_change_are_refused(name: str, before: int, tmp_path: Path) -> None:
    engine = steps(private(), before)
    change, message = OBJECTS[name]
    change(engine.model)
    assert_all_refuse(engine, message, tmp_path)
    with pytest.raises(PrivacyError, match=message):
        engine.accept_parameters()


@pytest.mark.parametrize("name", OBJECTS)
def test_types_and_objects_that_change_within_a_batch_are_refused_at_its_step(name: str) -> None:
    engine = private()
    runs.gather(engine, next(runs.nonempty(engine)))
    change, message = OBJECTS[name]
    change(engine.model)
    with pytest.raises(PrivacyError, match=message):
        engine.optimizer.step()
    assert engine.steps_taken == 0


def test_modules_without_parameters_may_come_and_go() -> None:
    engine = steps(private())
    engine.model[1] = nn.ReLU()
    steps(engine)
    engine.model.append(nn.Identity())
    assert steps(engine).steps_taken == 3


LOOPS = {"by hand": runs.train_by_hand, "closure": runs.train_by_closure, "engine.step": runs.train}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", LOOKAHEADS)
@pytest.mark.one_in(2)
def test_an_optimizer_around_another_steps_with_what_is_released(name: str, loop: str) -> None:
    model, reference = runs.network(), runs.network()
    engine = private(model, around(name, torch.optim.Adam(model.parameters(), lr=0.1)))
    other = torch.optim.Adam(reference.parameters(), lr=0.1)
    fast, slow = list(reference.parameters()), [p.detach().clone() for p in reference.parameters()]
    released: list[list[Tensor]] = []
    engine.optimizer.register_step_post_hook(lambda *_: released.append([p.grad.clone() for p in model.parameters()]))
    for _ in range(2):
        LOOPS[loop](engine)
    assert engine.steps_taken == len(released) == 6
    for count, grads in enumerate(released, 1):
        for parameter, grad in zip(fast, grads, strict=True):
            parameter.grad = grad
        other.step()
        pull_back(count, fast, slow)
    assert torch.equal(runs.weights(model), runs.weights(reference))


def test_what_an_inner_optimizer_holds_is_saved_and_restored(tmp_path: Path) -> None:
    model = runs.network()
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    engine = steps(private(model, around("with hooks", inner)), 2)
    before = [state["exp_avg"].clone() for state in inner.state.values()]
    engine.save(tmp_path / "x")
    steps(engine).restore(tmp_path / "x")
    assert all(map(torch.equal, before, [inner.state[parameter]["exp_avg"] for parameter in model.parameters()]))
    assert steps(engine).steps_taken == 4


@pytest.mark.parametrize("name", ["proper", "with hooks", "patched"])
def test_the_engine_of_an_inner_optimizer_names_the_outer_one(name: str) -> None:
    model = runs.network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, outer = private(model, inner), around(name, inner)

    def train() -> None:
        for batch in engine.batches():
            runs.gather(engine, batch)
            outer.step()
            outer.zero_grad()

    with pytest.raises(PrivacyError, match=r"outside of this engine's charged steps.*the outermost as Lookahead"):
        train()


def constrained(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.lift.weight.copy_(torch.renorm(m.lift.weight, 2, 0, 0.5))
    return m.head(m.lift(x).tanh())


@pytest.mark.parametrize("loop", ["by hand", "engine.step"])
def test_a_forward_that_writes_to_a_weight_is_told_what_to_do(loop: str) -> None:
    with pytest.raises(PrivacyError, match=r"where a forward writes.*accept_parameters.*max-norm constraint"):
        LOOPS[loop](private(Wired(constrained, lift=nn.Linear(5, 8), head=nn.Linear(8, 3))))


def test_a_parametrization_constrains_a_weight() -> None:
    model = runs.network()
    parametrize.register_parametrization(model[0], "weight", By(lambda weight: torch.renorm(weight, 2, 0, 0.5)))
    engine = private(model)
    for loop in LOOPS.values():
        loop(engine)
    assert engine.steps_taken == 9
    assert float(model[0].weight.detach().norm(dim=1).max()) <= 0.5 + 1e-6
