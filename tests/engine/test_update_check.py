"""Trained parameters move in charged steps only, and stay the objects they were, or an error says so."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
import torch
from case_models import By, Wired
from charged_steps import MOVED, assert_all_refuse, private, steps
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from ghostclip import PrivacyError

pytestmark = pytest.mark.usefixtures("coarse_losses")


@torch.enable_grad()
def stepped_by(kind, model):
    """A second optimizer, by gradients of its own."""
    runs.plain_backward(model)
    kind(model.parameters(), lr=0.1).step()


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "sgd": partial(stepped_by, torch.optim.SGD),
    "adamw": partial(stepped_by, torch.optim.AdamW),
    "in place": lambda model: model[2].bias.add_(1.0),
    "at once": lambda model: torch._foreach_mul_(list(model.parameters()), 0.5),
    "state dict": lambda model: model.load_state_dict(runs.network().state_dict()),
    "other memory": lambda model: setattr(model[0].bias, "data", torch.zeros(8)),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.one_in(3)
def test_changes_from_outside_are_refused_until_they_are_accepted(name: str, gathered: bool, tmp_path: Path) -> None:
    """At the next batch and in every report; also where a batch was gathered, which then has no step."""
    engine = steps(private())
    if gathered:
        runs.gather(engine, next(runs.nonempty(engine)))
    with torch.no_grad():
        CHANGES[name](engine.model)
    assert_all_refuse(engine, MOVED, tmp_path)
    if gathered:
        engine.batches().discard()
    engine.optimizer.zero_grad()
    engine.accept_parameters()
    assert engine.epsilon() > 0
    engine.save(tmp_path / "x")
    assert steps(engine, 3).steps_taken == 4 + gathered


@pytest.mark.parametrize("name", ["sgd", "in place"])
def test_changes_after_a_release_that_failed_are_refused(name: str, tmp_path: Path, monkeypatch) -> None:
    engine = steps(private())
    monkeypatch.setattr(engine._steps.release, "_private", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        steps(engine)
    monkeypatch.undo()
    with torch.no_grad():
        CHANGES[name](engine.model)
    assert_all_refuse(engine, MOVED, tmp_path)


def test_a_second_optimizer_before_the_first_step_is_noticed(tmp_path: Path) -> None:
    """Between a batch's start and its first backward, and in all reports though nothing was spent."""
    engine = private()
    examples = next(next(runs.nonempty(engine)).physical())
    CHANGES["sgd"](engine.model)
    engine.optimizer.zero_grad()
    with pytest.raises(PrivacyError, match=MOVED):
        engine.backward(runs.losses_of(engine.model, examples))
    assert_all_refuse(engine, MOVED, tmp_path)


@pytest.mark.parametrize("closure", [False, True])
def test_an_optimizer_s_own_update_is_no_change(closure: bool) -> None:
    model = runs.network()
    engine = private(model, Decaying(model.parameters(), lr=0.01))
    LOOPS["closure" if closure else "by hand"](engine)
    assert steps(engine, 2).steps_taken == 5


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
@pytest.mark.parametrize("taken", [0, 2], ids=["before the first batch", "after steps"])
def test_types_and_objects_that_change_are_refused(name: str, taken: int, tmp_path: Path) -> None:
    """And within a batch at its step."""
    engine, within, (change, message) = steps(private(), taken), private(), OBJECTS[name]
    change(engine.model)
    assert_all_refuse(engine, message, tmp_path)
    with pytest.raises(PrivacyError, match=message):
        engine.accept_parameters()
    runs.gather(within, next(runs.nonempty(within)))
    change(within.model)
    with pytest.raises(PrivacyError, match=message):
        within.optimizer.step()
    assert within.steps_taken == 0


def test_modules_without_parameters_may_come_and_go() -> None:
    engine = steps(private())
    engine.model[1] = nn.ReLU()
    engine.model.append(nn.Identity())
    assert steps(engine).steps_taken == 2


# How it is set up: by torch's constructor; as timm's, which skips it and has dicts for hooks; as torch_optimizer's,
# which skips it; and as pytorch_optimizer's, which has torch patch its step, and no ``param_groups`` of its own.
LOOKAHEADS = ("proper", "with hooks", "without hooks", "patched")


@torch.no_grad()
def pull_back(count: int, fast: list[Tensor], slow: list[Tensor]) -> None:
    """After every second step slow weights go halfway to the fast ones, which start anew from there."""
    if count % 2 == 0:
        for one, other in zip(fast, slow, strict=True):
            one.copy_(other.lerp_(one, 0.5))


class Lookahead(Optimizer):
    """An optimizer around another, as libraries have them: every second step goes halfway back to slow weights."""

    def __init__(self, inner: Optimizer, kind: str) -> None:
        self.inner, self.count = inner, 0
        if kind == "proper":
            super().__init__(inner.param_groups, {})
        elif kind != "without hooks":
            self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        if kind == "patched":
            self._patch_step_function()
        else:
            self.param_groups = inner.param_groups
        if kind != "proper":
            self.defaults, self.state = inner.defaults, defaultdict(dict)
        self.fast = [parameter for group in inner.param_groups for parameter in group["params"]]
        self.slow = [parameter.detach().clone() for parameter in self.fast]

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


def around(name: str, inner: Optimizer) -> Any:
    """A Lookahead around the optimizer, of a class whose step torch hasn't patched before."""

    def step(self: Any, closure: Any = None) -> Any:
        value = self.inner.step(closure)
        self.count += 1
        pull_back(self.count, self.fast, self.slow)
        return value

    own: dict[str, Any] = {"step": step}
    if name == "patched":
        own["param_groups"] = property(lambda self: self.inner.param_groups)
    return type("Lookahead", (Lookahead,), own)(inner, name)


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
    with pytest.raises(PrivacyError, match=r"max-norm constraint.*accept_parameters.*where a forward writes"):
        LOOPS[loop](private(Wired(constrained, lift=nn.Linear(5, 8), head=nn.Linear(8, 3))))


def test_a_parametrization_constrains_a_weight() -> None:
    model = runs.network()
    parametrize.register_parametrization(model[0], "weight", By(lambda weight: torch.renorm(weight, 2, 0, 0.5)))
    engine = private(model)
    for loop in LOOPS.values():
        loop(engine)
    assert engine.steps_taken == 9
    assert float(model[0].weight.detach().norm(dim=1).max()) <= 0.5 + 1e-6
