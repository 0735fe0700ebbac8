"""Released weights may be averaged and constrained: exactly, or an error says how."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
import torch
from charged_steps import MOVED, private, steps
from lookaheads import LOOKAHEADS, around, pull_back
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ghostclip import PrivacyError
from ghostclip.engine import PrivacyEngine


def by_hand(engine: PrivacyEngine, optimizer: Any) -> None:
    for batch in engine.batches():
        runs.gather(engine, batch)
        optimizer.step()
        optimizer.zero_grad()


def by_closure(engine: PrivacyEngine, optimizer: Any) -> None:
    for batch in engine.batches():
        optimizer.step(lambda batch=batch: runs.gather(engine, batch))
        optimizer.zero_grad()


def by_the_engine(engine: PrivacyEngine, optimizer: Any) -> None:
    for batch in engine.batches():
        engine.step(batch, runs.losses_of)


LOOPS = {"by hand": by_hand, "closure": by_closure, "engine.step": by_the_engine}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", LOOKAHEADS)
def test_an_optimizer_around_another_steps_with_what_is_released(name: str, loop: str) -> None:
    model, reference = runs.network(), runs.network()
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    engine = private(model, around(name, inner))
    other = torch.optim.Adam(reference.parameters(), lr=0.1)
    fast, slow = list(reference.parameters()), [p.detach().clone() for p in reference.parameters()]
    released: list[list[Tensor]] = []
    engine.optimizer.register_step_post_hook(
        lambda *_: released.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    )
    for _ in range(2):
        LOOPS[loop](engine, engine.optimizer)
    assert engine.steps_taken == len(released) == 6
    for count, grads in enumerate(released, 1):
        for parameter, grad in zip(fast, grads, strict=True):
            parameter.grad = grad
        other.step()
        pull_back(count, fast, slow)
    assert torch.equal(runs.weights(model), runs.weights(reference))


@pytest.mark.parametrize("name", LOOKAHEADS)
def test_sums_are_noisy_when_the_inner_optimizer_steps(name: str) -> None:
    model = runs.network()
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = private(model, around(name, inner), noise_multiplier=100.0)
    seen: list[Tensor] = []
    inner.register_step_pre_hook(lambda *_: seen.append(runs.grads(model)))
    by_hand(engine, engine.optimizer)
    assert all(float(grads.norm()) > 10.0 for grads in seen)


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
    with pytest.raises(PrivacyError, match=f"Lookahead.*build the engine with the outermost.*{MOVED[-17:]}"):
        by_hand(engine, outer)


def test_an_optimizer_of_torch_s_own_stays_as_it_is() -> None:
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        model = runs.network()
        optimizer = kind(model.parameters(), lr=0.1)
        step, before = kind.step, dict(vars(optimizer))
        private(model, optimizer).detach()
        assert kind.step is step
        assert {name: vars(optimizer)[name] for name in before} == before


class Constrained(nn.Module):
    """A network whose forward writes to a weight."""

    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.lift, self.head, self.write = nn.Linear(5, 8), nn.Linear(8, 3), write

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self.lift.weight)
        return self.head(self.lift(x).tanh())


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "copied": lambda weight: weight.copy_(torch.renorm(weight, 2, 0, 0.5)),
    "renorm": lambda weight: weight.renorm_(2, 0, 0.5),
    "clamp": lambda weight: weight.clamp_(-0.1, 0.1),
    "divided": lambda weight: weight.div_(weight.norm()),
    "standardized": lambda weight: torch.nn.init.zeros_(weight),
}


@pytest.mark.parametrize("loop", ["by hand", "engine.step"])
@pytest.mark.parametrize("name", WRITES)
def test_a_forward_that_writes_to_a_weight_is_told_what_to_do(name: str, loop: str) -> None:
    engine = private(Constrained(WRITES[name]))
    with pytest.raises(PrivacyError, match=r"forward.*max-norm constraint.*accept_parameters"):
        LOOPS[loop](engine, engine.optimizer)


@pytest.mark.parametrize("name", WRITES)
def test_a_weight_may_be_written_to_after_the_step_if_that_is_accepted(name: str) -> None:
    engine = private()
    for _ in range(4):
        steps(engine)
        with torch.no_grad():
            WRITES[name](engine.model[0].weight)
        engine.accept_parameters()
    assert engine.steps_taken == 4


class MaxNorm(nn.Module):
    """Rows of a weight of at most norm 0.5."""

    def forward(self, weight: Tensor) -> Tensor:
        return torch.renorm(weight, 2, 0, 0.5)


def test_a_parametrization_constrains_a_weight() -> None:
    model = runs.network()
    parametrize.register_parametrization(model[0], "weight", MaxNorm())
    engine = private(model)
    for loop in LOOPS.values():
        loop(engine, engine.optimizer)
    assert engine.steps_taken == 9
    assert float(model[0].weight.detach().norm(dim=1).max()) <= 0.5 + 1e-6
