"""Saving and restoring an engine: a run goes on as if never interrupted."""

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
from checkpointed_runs import OPTIMIZERS, engine_of, go, private, state_of
from torch import Tensor, nn
from torch.optim import lr_scheduler

import ghostclip
from ghostclip import PrivacyError, checkpoint
from ghostclip.clipping import Adaptive, PerLayer
from ghostclip.engine import PrivacyEngine


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.one_in(3)
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
import sys; sys.path.insert(0, "tests/support")
import checkpointed_runs as runs
engine = runs.engine_of("adam")
engine.restore(sys.argv[1])
runs.go(engine, 3).save(sys.argv[1])
"""


@pytest.mark.slow
def test_another_process_goes_on(tmp_path: Path) -> None:
    whole = go(engine_of("adam"), 5)
    go(engine_of("adam"), 2).save(tmp_path / "x")
    subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "x")], cwd=Path(__file__).parents[2], check=True, timeout=120
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


def test_a_half_done_batch_is_not_stored(tmp_path: Path) -> None:
    engine = go(private(), 1)
    batch = next(runs.nonempty(engine))
    engine.save(tmp_path / "x")
    parts = batch.physical()
    engine.backward(runs.losses_of(engine.model, next(parts)))
    sums = engine._steps._sums
    before = [total.clone() for total in sums.complete(engine.model.parameters())]
    for call in (engine.save, engine.restore):
        with pytest.raises(PrivacyError, match=r"inside of a logical batch, with private sums of 1 of its physical"):
            call(tmp_path / "x")
    assert all(map(torch.equal, sums.complete(engine.model.parameters()), before))
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
