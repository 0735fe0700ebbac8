"""Saving and restoring an engine: a run goes on as if never interrupted, and never forgets what it spent."""

import contextlib
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import ghostclip
from ghostclip import BudgetExceededError, LedgerError, PrivacyError, accounting, checkpoint
from ghostclip.clipping import Adaptive, Custom, PerLayer
from ghostclip.engine import PrivacyEngine


def groups(model: nn.Sequential, **changes: Any) -> torch.optim.Optimizer:
    """Two groups with settings of many kinds."""
    first, second = model[0].parameters(), model[2].parameters()
    return torch.optim.AdamW(
        [{"params": [*first], "betas": (0.5, 0.9), "weight_decay": 0.0}, {"params": [*second], **changes}],
        lr=0.01, amsgrad=True, foreach=False,
    )  # fmt: skip


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01)),
    "groups": groups,
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, centered=True),
}


def engine_of(optimizer: str = "momentum", dtype: torch.dtype = torch.float32, **changes: Any) -> PrivacyEngine:
    """An engine with repeatable noise over a network with dropout."""
    model = runs.network(dtype)
    model.insert(2, nn.Dropout(0.2)) if optimizer != "groups" else None
    torch.manual_seed(3)
    options = {"noise": "test", "seed": 5, "noise_multiplier": 1.0, "clipping": 1.0, "max_physical_batch_size": 3}
    return runs.engine_for(model, OPTIMIZERS[optimizer](model), runs.data(dtype=dtype), **{**options, **changes})


def private(**changes: Any) -> PrivacyEngine:
    """An engine whose noise is private."""
    return engine_of(noise="standard", seed=None, **changes)


def go(engine: PrivacyEngine, steps: int, after: Callable[[], Any] = lambda: None) -> PrivacyEngine:
    """So many steps, epoch after epoch."""
    while steps:
        for batch in engine.batches():
            engine.step(batch, runs.losses_of)
            after()
            steps -= 1
            if not steps:
                break
    return engine


def state_of(engine: PrivacyEngine) -> list[Any]:
    """All numbers that training has made."""
    numbers: dict[str, Tensor] = {}
    rest = checkpoint.packed([engine.model.state_dict(), engine.optimizer.state_dict()], numbers, "state.x")
    return [rest, {name: (tensor.dtype, tensor.tolist()) for name, tensor in numbers.items()}]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_restored_test_run_is_bit_equal_to_an_uninterrupted_one(optimizer: str, tmp_path: Path) -> None:
    whole = go(engine_of(optimizer), 7)
    for at in (1, 3, 5):
        go(engine_of(optimizer), at).save(tmp_path / "x")
        other = engine_of(optimizer)
        torch.manual_seed(99)
        found = other.restore(tmp_path / "x")
        assert (found.steps, found.epoch, found.steps_in_epoch) == (at, at // 3, at % 3)
        assert state_of(go(other, 7 - at)) == state_of(whole)
        assert other.steps_taken == 7


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("clipping", [PerLayer(1.0), Adaptive(0.5)], ids=["per layer", "adaptive"])
def test_so_it_is_in_other_types_and_policies(dtype: torch.dtype, clipping: Any, tmp_path: Path) -> None:
    def fresh() -> PrivacyEngine:
        policy = Adaptive(0.5) if isinstance(clipping, Adaptive) else clipping
        return engine_of("adam", dtype, clipping=policy, sampling="without_replacement")

    whole = go(fresh(), 5)
    go(fresh(), 2).save(tmp_path / "x")
    other = fresh()
    other.restore(tmp_path / "x")
    assert state_of(go(other, 3)) == state_of(whole)
    if isinstance(clipping, Adaptive):
        assert other._snapshots.policy.max_norm == whole._snapshots.policy.max_norm != 0.5


def test_saving_changes_nothing(tmp_path: Path) -> None:
    plain = state_of(go(engine_of(), 5))
    saving = engine_of()
    assert state_of(go(saving, 5, lambda: saving.save(tmp_path / "x"))) == plain


SCRIPT = """
import sys; sys.path.insert(0, "tests")
import test_engine_checkpoint as t
engine = t.engine_of("adam")
engine.restore(sys.argv[1])
t.go(engine, 3).save(sys.argv[1])
"""


@pytest.mark.slow
def test_another_process_goes_on(tmp_path: Path) -> None:
    whole = go(engine_of("adam"), 5)
    go(engine_of("adam"), 2).save(tmp_path / "x")
    subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "x")], cwd=Path(__file__).parent.parent, check=True, timeout=120
    )
    other = engine_of("adam")
    assert other.restore(tmp_path / "x").steps == 5
    assert state_of(other) == state_of(whole)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "multi": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 2, 4]),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=20),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "in a row": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_go_on(schedule: str, tmp_path: Path) -> None:
    def fresh() -> tuple[PrivacyEngine, Any]:
        engine = engine_of()
        return engine, SCHEDULES[schedule](engine.optimizer)

    whole, plan = fresh()
    go(whole, 6, plan.step)
    first, plan = fresh()
    go(first, 3, plan.step).save(tmp_path / "x", extra={"schedule": plan})
    other, plan = fresh()
    other.restore(tmp_path / "x", extra={"schedule": plan})
    assert state_of(go(other, 3, plan.step)) == state_of(whole)


def test_a_plateau_s_infinite_best_comes_back(tmp_path: Path) -> None:
    first, other = engine_of(), engine_of()
    plans = [lr_scheduler.ReduceLROnPlateau(engine.optimizer) for engine in (first, other)]
    plans[1].best = 1.0
    first.save(tmp_path / "x", extra={"plateau": plans[0]})
    other.restore(tmp_path / "x", extra={"plateau": plans[1]})
    assert plans[1].best == plans[0].best == float("inf")


class Wide(torch.optim.Optimizer):
    """Sums up gradients in float64 and counts in an int64 tensor, whatever type the parameters have."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            total = state.get("total", torch.zeros_like(parameter, dtype=torch.float64))
            state["total"], state["seen"] = total + parameter.grad, state.get("seen", torch.tensor(0)) + 1
            state["nested"] = {"half": [total.to(torch.float16)], "none": None}
            parameter.sub_(state["total"].to(parameter.dtype), alpha=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_optimizer_s_tensors_keep_their_types(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "wide", lambda model: Wide(model.parameters()))
    whole = go(engine_of("wide", dtype), 4)
    go(engine_of("wide", dtype), 2).save(tmp_path / "x")
    other = engine_of("wide", dtype)
    other.restore(tmp_path / "x")
    assert state_of(go(other, 2)) == state_of(whole)
    kinds = {
        name: value.dtype for name, value in next(iter(other.optimizer.state.values())).items() if name != "nested"
    }
    assert kinds == {"total": torch.float64, "seen": torch.int64}


def test_an_older_checkpoint_never_lowers_what_was_spent(tmp_path: Path) -> None:
    engine = go(private(noise_multiplier=3.0), 2)
    engine.save(tmp_path / "x")
    go(engine, 2)
    spent, found = engine.epsilon(), engine.restore(tmp_path / "x")
    assert (found.steps, engine.steps_taken, engine.epsilon()) == (2, 4, spent)
    go(engine, 2)
    setting: dict[str, Any] = {"noise_multiplier": 3.0, "sample_rate": 8 / 24, "delta": 1e-5}
    assert engine.epsilon() == accounting.epsilon(steps=6, **setting)
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multiplier": 1.5}, r"noise_multiplier is 1\.0 in it and 1\.5 here"),
        ({"batch_size": 6}, r"sampling is Poisson\(.*batch_size=8.* in it and Poisson\(.*batch_size=6.* here"),
        ({"sampling": "without_replacement"}, r"sampling is Poisson\(.* in it and WithoutReplacement\(.* here"),
        ({"neighboring": "replace_one"}, "relation='add_or_remove_one'.* in it and .*relation='replace_one'"),
        ({"clipping": 2.0}, r"clipping is Flat\(max_norm=1\.0\) in it and Flat\(max_norm=2\.0\) here"),
        ({"clipping": PerLayer(1.0)}, r"clipping is Flat\(max_norm=1\.0\) in it and PerLayer\("),
        ({"clipping": Adaptive(1.0)}, r"clipping is Flat\(max_norm=1\.0\) in it and Adaptive\("),
        ({"clipping": Custom(torch.ones_like, 1.0)}, r"clipping is .* and Custom\(function=.*ones_like"),
        ({"noise": "standard", "seed": None}, "noise is test in it and standard here"),
        ({"seed": 6}, "seed is 5 in it and 6 here"),
        ({"optimizer": "adam"}, "the optimizer's class is torch.optim.sgd.SGD in it and torch.optim.adam.Adam here"),
        ({"dtype": torch.float64}, r"0\.weight is float32 \[8, 5\] in it and float64 \[8, 5\] here"),
    ],
)
def test_another_configuration_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    go(engine_of(), 2).save(tmp_path / "x")
    other = go(engine_of(**changes), 1)
    before = state_of(other)
    with pytest.raises(PrivacyError, match=f"is of another configuration: .*{message}"):
        other.restore(tmp_path / "x")
    assert state_of(other) == before
    assert other.steps_taken == 1
    go(other, 1)


def test_another_data_set_model_or_frozen_parameter_is_refused(tmp_path: Path) -> None:
    go(engine_of(), 1).save(tmp_path / "x")
    wide, frozen = nn.Sequential(nn.Linear(5, 3)), runs.network()
    frozen[0].bias.requires_grad_(False)
    cases = [
        (runs.network(), runs.data(25), "the number of examples is 24 in it and 25 here"),
        (wide, runs.data(), r"0\.weight is float32 \[8, 5\] in it and float32 \[3, 5\] here; .* and \d+ more"),
        (frozen, runs.data(), r"trained is \['0\.weight', '0\.bias', .* in it and \['0\.weight', '2\.weight'"),
    ]
    for model, data, message in cases:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        other = runs.engine_for(model, optimizer, data, noise="test", seed=5, noise_multiplier=1.0, clipping=1.0)
        with pytest.raises(PrivacyError, match=message):
            other.restore(tmp_path / "x")


def test_parameters_in_another_order_are_refused(tmp_path: Path) -> None:
    go(engine_of(), 1).save(tmp_path / "x")
    model = engine_of().model
    optimizer = torch.optim.SGD(reversed([*model.parameters()]), lr=0.1, momentum=0.9, nesterov=True)
    other = runs.engine_for(model, optimizer, noise="test", seed=5, noise_multiplier=1.0, clipping=1.0)
    with pytest.raises(PrivacyError, match=r"the optimizer's group 0 is \['0\.weight', .* in it and \['3\.bias'"):
        other.restore(tmp_path / "x")


@pytest.mark.parametrize("length", [{"steps": 5}, {"epochs": 1}])
def test_another_plan_is_refused(length: dict[str, int], planned: Callable[..., PrivacyEngine], tmp_path: Path) -> None:
    planned(steps=4).save(tmp_path / "x")
    with pytest.raises(PrivacyError, match=r"another configuration: planned_steps is 4 in it and [35] here"):
        planned(**length).restore(tmp_path / "x")


def test_a_half_done_batch_is_not_stored(tmp_path: Path) -> None:
    engine = go(private(), 1)
    batch = next(runs.nonempty(engine))
    engine.save(tmp_path / "x")
    parts = batch.physical()
    engine.backward(runs.losses_of(engine.model, next(parts)))
    before = runs.grads(engine.model)
    for call in (engine.save, engine.restore):
        with pytest.raises(PrivacyError, match=r"inside of a logical batch, with private sums of 1 of its physical"):
            call(tmp_path / "x")
    assert torch.equal(runs.grads(engine.model), before)
    for examples in parts:
        engine.backward(runs.losses_of(engine.model, examples))
    engine.optimizer.step()
    engine.save(tmp_path / "x")
    assert checkpoint.load(tmp_path / "x").public["progress"]["steps"] == 2


def interrupt_a_batch(engine: PrivacyEngine) -> None:
    for examples in next(runs.nonempty(engine)).physical():
        engine.backward(runs.losses_of(engine.model, examples))
        raise KeyboardInterrupt


def test_an_interrupted_batch_is_discarded_and_the_rest_stored(tmp_path: Path) -> None:
    engine = go(private(), 2)
    with pytest.raises(KeyboardInterrupt):
        interrupt_a_batch(engine)
    engine.save(tmp_path / "x")
    other = private()
    assert other.restore(tmp_path / "x").steps == other.steps_taken == 2
    go(other, 1)


@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupted_batch_comes_again(at: int, tmp_path: Path) -> None:
    def losses_of(model: nn.Module, examples: list[Tensor]) -> Tensor:
        if engine.steps_taken >= at - 1:
            raise KeyboardInterrupt
        return runs.losses_of(model, examples)

    engine, other = private(batch_size=12, self_check=False), private(batch_size=12)
    with contextlib.suppress(KeyboardInterrupt):
        for batch in engine.batches():
            engine.step(batch, losses_of)
    taken = engine._snapshots.loader._taken
    engine.save(tmp_path / "x")
    found = other.restore(tmp_path / "x")
    assert found.steps == found.steps_in_epoch == engine.steps_taken == taken - 1 == at - 1
    other.save(tmp_path / "x")
    assert other.restore(tmp_path / "x") == found
    assert len([runs.leave(other) for _ in other.batches()]) == 2 - (at - 1)


def test_an_epoch_goes_on_where_it_was(tmp_path: Path) -> None:
    engine = private(batch_size=4)
    assert len(engine.batches()) == 6
    go(engine, 8).save(tmp_path / "x")
    other = private(batch_size=4)
    found = other.restore(tmp_path / "x")
    assert (found.steps, found.epoch, found.steps_in_epoch) == (8, 1, 2)
    assert [len([runs.leave(other) for _ in other.batches()]) for _ in range(2)] == [4, 6]
    assert len(other.batches()) == 6


def test_batches_of_before_a_restore_are_refused(tmp_path: Path) -> None:
    engine = private()
    epoch = iter(engine.batches())
    engine.step(next(epoch), runs.losses_of)
    engine.save(tmp_path / "x")
    engine.restore(tmp_path / "x")
    with pytest.raises(PrivacyError, match=r"engine\.restore\(\) was called inside of a loop.*start a new loop"):
        next(epoch)
    go(engine, 2)


def test_extra_objects_must_be_the_same(tmp_path: Path) -> None:
    engine = private()
    plan = lr_scheduler.ConstantLR(engine.optimizer)
    engine.save(tmp_path / "x", extra={"plan": plan})
    with pytest.raises(PrivacyError, match=r"saved with extra=\['plan'\], and restore got \[\]"):
        engine.restore(tmp_path / "x")
    with pytest.raises(PrivacyError, match=r"restore got \['other'\]"):
        engine.restore(tmp_path / "x", extra={"other": plan})
    for wrong, message in [(plan, "extra must be a dict"), ({"epoch": 3}, r"extra\['epoch'\] must be an object with")]:
        with pytest.raises(TypeError, match=message):
            engine.save(tmp_path / "x", extra=wrong)  # type: ignore[arg-type]


class Unstorable:
    def state_dict(self) -> Any:
        return {"hook": print}

    def load_state_dict(self, state: Any) -> None: ...


def test_an_extra_state_that_needs_code_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PrivacyError, match=r"private\.extra\.mine\.hook is a builtins\.builtin_function_or_method"):
        private().save(tmp_path / "x", extra={"mine": Unstorable()})
    assert not (tmp_path / "x").exists()


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


def test_damage_is_logged_and_the_one_before_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = private()
    go(engine, 3, lambda: engine.save(tmp_path / "x"))
    (tmp_path / "x" / "optimizer.safetensors").write_bytes(b"torn")
    other = private()
    with caplog.at_level(logging.WARNING):
        found = other.restore(tmp_path / "x")
    assert (found.path, found.steps) == (checkpoint.previous_of(tmp_path / "x"), 2)
    assert "optimizer.safetensors has 4 of its" in caplog.text


def test_tied_weights_buffers_and_wrapping_survive(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(5, 5), nn.Linear(5, 5)
            self.out.weight = self.into.weight
            self.register_buffer("scale", torch.tensor(2.0))
            self.register_buffer("passing", torch.zeros(1), persistent=False)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.out(self.into(inputs) * self.scale)

    def fresh() -> PrivacyEngine:
        torch.manual_seed(0)
        model = Tied()
        return runs.engine_for(model, noise="test", seed=1, noise_multiplier=1.0, clipping=1.0)

    whole = go(fresh(), 4)
    first = go(fresh(), 2)
    first.model.scale.fill_(3.0)
    whole_scale = first.model.scale.clone()
    first.save(tmp_path / "x")
    other = fresh()
    other.restore(tmp_path / "x")
    assert other.model.into.weight is other.model.out.weight
    assert torch.equal(other.model.scale, whole_scale)
    plain = ghostclip.unwrap(Tied())
    assert list(checkpoint.load(tmp_path / "x").public["model"]) == list(plain.state_dict())
    other.model.scale.fill_(2.0)
    torch.testing.assert_close(runs.weights(go(other, 2).model), runs.weights(whole.model))


def test_a_detached_or_foreign_tensor_type_is_named(tmp_path: Path) -> None:
    engine = private()
    engine.model.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(PrivacyError, match=r"model\.phase is of type torch\.complex64"):
        engine.save(tmp_path / "x")


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


@pytest.mark.slow
def test_a_compiled_engine_goes_on(tmp_path: Path) -> None:
    def fresh() -> PrivacyEngine:
        engine = engine_of("adam", torch.float64, max_physical_batch_size=None)
        # Padding moves random numbers from one example to another.
        engine.model[2].p = 0.0
        engine.compile()
        return engine

    first = go(fresh(), 12)
    first.save(tmp_path / "x")
    other = fresh()
    other.restore(tmp_path / "x")
    assert state_of(other) == state_of(first)
    assert other.steps_taken == 12
    # Going back changes tensors that graphs were made for.
    ends = []
    for _ in range(2):
        other.restore(tmp_path / "x")
        ends.append(runs.weights(go(other, 12).model))
    assert not torch.allclose(ends[0], runs.weights(first.model))
    torch.testing.assert_close(*ends)
    torch.testing.assert_close(runs.weights(go(first, 12).model), ends[0])
