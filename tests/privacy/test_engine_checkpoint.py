"""Saving and restoring an engine: a run goes on as if never interrupted."""

import contextlib
import copy
from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
import torch
from checkpointed_runs import OPTIMIZERS, engine_of, go, private, state_of
from torch import Tensor, nn
from torch.optim import lr_scheduler

from ghostclip import PrivacyError, checkpoint
from ghostclip.clipping import Adaptive, PerLayer
from ghostclip.engine import PrivacyEngine

RUNS: dict[str, dict[str, Any]] = {name: {"optimizer": name} for name in OPTIMIZERS} | {
    "float64, per layer": {"optimizer": "adam", "dtype": torch.float64, "clipping": PerLayer(1.0)},
    "bfloat16, adaptive": {"optimizer": "adam", "dtype": torch.bfloat16, "clipping": Adaptive(0.5)},
    "fixed size": {"sampling": "without_replacement"},
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.one_in(3)
def test_a_restored_test_run_is_bit_equal_to_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    whole = go(engine_of(**copy.deepcopy(RUNS[name])), 7)
    for at in (1, 3, 5):
        go(engine_of(**copy.deepcopy(RUNS[name])), at).save(tmp_path / "x")
        other = engine_of(**copy.deepcopy(RUNS[name]))
        torch.manual_seed(99)
        found = other.restore(tmp_path / "x")
        assert (found.steps, found.epoch, found.steps_in_epoch) == (at, at // 3, at % 3)
        assert state_of(go(other, 7 - at)) == state_of(whole)
        assert other.steps_taken == 7
        assert other.clipping.sensitivity == whole.clipping.sensitivity


def test_saving_changes_nothing(tmp_path: Path) -> None:
    plain = state_of(go(engine_of(), 5))
    saving = engine_of()
    assert state_of(go(saving, 5, lambda: saving.save(tmp_path / "x"))) == plain


def scheduled() -> tuple[PrivacyEngine, Any]:
    engine = engine_of()
    parts = [lr_scheduler.ConstantLR(engine.optimizer), lr_scheduler.ExponentialLR(engine.optimizer, 0.9)]
    return engine, lr_scheduler.SequentialLR(engine.optimizer, parts, [2])


def test_schedules_go_on(tmp_path: Path) -> None:
    whole, plan = scheduled()
    go(whole, 6, plan.step)
    first, plan = scheduled()
    go(first, 3, plan.step).save(tmp_path / "x", extra={"schedule": plan})
    other, plan = scheduled()
    other.restore(tmp_path / "x", extra={"schedule": plan})
    assert state_of(go(other, 3, plan.step)) == state_of(whole)


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


def test_the_optimizer_s_tensors_keep_their_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "wide", lambda model: Wide(model.parameters()))
    whole = go(engine_of("wide", torch.bfloat16), 4)
    go(engine_of("wide", torch.bfloat16), 2).save(tmp_path / "x")
    other = engine_of("wide", torch.bfloat16)
    other.restore(tmp_path / "x")
    assert state_of(go(other, 2)) == state_of(whole)
    state = next(iter(other.optimizer.state.values()))
    assert (state["total"].dtype, state["seen"].dtype) == (torch.float64, torch.int64)


def test_a_half_done_batch_is_not_stored(tmp_path: Path) -> None:
    engine = go(private(), 1)
    batch = next(runs.nonempty(engine))
    engine.save(tmp_path / "x")
    parts = batch.physical()
    engine.backward(runs.losses_of(engine.model, next(parts)))
    for call in (engine.save, engine.restore):
        with pytest.raises(PrivacyError, match=r"inside of a logical batch, with private sums of 1 of its physical"):
            call(tmp_path / "x")
    for examples in parts:
        engine.backward(runs.losses_of(engine.model, examples))
    engine.optimizer.step()
    engine.save(tmp_path / "x")
    assert checkpoint.load(tmp_path / "x").public["progress"]["steps"] == 2


@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupted_batch_comes_again(at: int, tmp_path: Path) -> None:
    def losses_of(model: nn.Module, examples: list[Tensor]) -> Tensor:
        if engine.steps_taken >= at - 1:
            raise KeyboardInterrupt
        return runs.losses_of(model, examples)

    engine, other = private(batch_size=12, self_check=False), private(batch_size=12)
    with contextlib.suppress(KeyboardInterrupt):
        runs.train(engine, loss_fn=losses_of)
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


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(5, 5), nn.Linear(5, 5)
        self.out.weight = self.into.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("passing", torch.zeros(1), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.into(inputs) * self.scale)


def test_tied_weights_buffers_and_wrapping_survive(tmp_path: Path) -> None:
    options = {"dataset": runs.data(), "noise": "test", "seed": 1, "noise_multiplier": 1.0, "clipping": 1.0}
    whole, other = (runs.engine_for(Tied(), **options) for _ in range(2))
    whole.model.scale.fill_(3.0)
    go(whole, 2).save(tmp_path / "x")
    other.restore(tmp_path / "x")
    assert other.model.into.weight is other.model.out.weight
    assert list(checkpoint.load(tmp_path / "x").public["model"]) == list(Tied().state_dict())
    assert torch.equal(other.model.scale, torch.tensor(3.0))
    torch.testing.assert_close(runs.weights(go(other, 2).model), runs.weights(go(whole, 2).model))


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
