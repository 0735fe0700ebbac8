"""Lightning and Fabric in two processes train as one process does; a loop with Fabric is the hand-written one."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("lightning")

import lightning
import lightning_runs as lr
import private_runs as runs
import torch
import torch.distributed as dist
from lightning.fabric.plugins import DoublePrecision
from lightning.fabric.plugins.environments import LightningEnvironment
from ranks import on_ranks

from ghostclip import LossShapeError, PrivacyError
from ghostclip.integrations.lightning import setup_fabric

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:It is recommended to use .self.log:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
]


def as_rank() -> dict[str, Any]:
    """Settings of Trainer or Fabric in one of the forked processes, whose group is there already."""
    rank = str(dist.get_rank())
    os.environ.update({"LOCAL_RANK": rank, "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    return {"devices": 2, "strategy": "ddp", "plugins": [LightningEnvironment()]}


def fitted(folder: Any, manual: bool, **settings: Any) -> Any:
    module, steps = lr.Module(manual), lr.Steps()
    trainer, callback = lr.fit(folder, module, callbacks=[steps], precision="64-true", engine=lr.EXACT, **settings)
    sizes = [sum(each) for each in steps.sizes]
    return steps.weights[-1], sizes, trainer.global_step, callback.engine.steps_taken


@pytest.mark.parametrize("manual", [False, True])
def test_two_processes_fit_as_one(manual, tmp_path):
    first, second = on_ranks(lambda: fitted(tmp_path / "fit", manual, **as_rank()), tmp_path)
    alone = fitted(tmp_path, manual)
    for one, other, expected in zip(first[0], second[0], alone[0], strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-12)
    assert [sum(each) for each in zip(first[1], second[1], strict=True)] == alone[1]  # shares of the same samples
    assert first[2:] == second[2:] == alone[2:] == (6, 6)


class Float64(DoublePrecision):
    """Leaves outputs in float64, which Fabric rounds to float32: the slow loop is in float64 too."""

    def convert_output(self, data: Any) -> Any:
        return data


def fabric_loop(plugins: Sequence[Any] = (), **settings: Any) -> list[lr.Tensor]:
    """Weights after an epoch with Fabric in float64, compared with the slow loop on one process."""
    fabric = lightning.Fabric(accelerator="cpu", plugins=[Float64(), *plugins], **{"devices": 1, **settings})
    fabric.launch()
    model: Any = runs.network(torch.float64)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=lr.RATE)
    data = lr.loader().dataset
    model, optimizer, engine = setup_fabric(fabric, model, optimizer, data, batch_size=lr.BATCH, **lr.EXACT)
    steps = lr.Steps()
    for batch in engine.batches():
        seen = []
        for examples in batch.physical():
            inputs, targets = fabric.to_device([examples[0].double(), examples[1]])
            seen.append([inputs, targets])
            engine.backward(runs.losses_of(model, [inputs, targets]))
        optimizer.step()
        optimizer.zero_grad()
        steps.weights.append([p.detach().clone() for p in model.parameters()])
        steps.examples.append(seen)
        steps.sizes.append(batch.sizes)
    if "strategy" not in settings:
        lr.assert_steps_are_hand_written(steps)
    assert engine.steps_taken == 3
    return steps.weights[-1]


def test_a_loop_with_fabric_is_the_hand_written_one():
    assert len(fabric_loop()) == 4


def test_two_processes_with_fabric(tmp_path):
    first, second = on_ranks(lambda: fabric_loop(**as_rank()), tmp_path)
    for one, other, alone in zip(first, second, fabric_loop(), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, alone, rtol=1e-9, atol=1e-12)


def with_fabric(precision: Any = None, **options: Any) -> Any:
    """(fabric, model, optimizer, engine)."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    model: Any = runs.network()
    made = setup_fabric(fabric, model, torch.optim.SGD(model.parameters(), lr=lr.RATE), lr.loader().dataset, **options)
    return fabric, *made


def test_bfloat16_and_checkpoints_with_fabric(tmp_path):
    options = {"noise_multiplier": 1.0, "noise": "test", "seed": 3, "batch_size": lr.BATCH}
    _, model, _, engine = with_fabric("bf16-mixed", **options)
    runs.train(engine, 1)
    engine.save(tmp_path / "run")
    runs.train(engine, 2)
    expected = runs.weights(model)
    engine.restore(tmp_path / "run")
    runs.train(engine, 2)
    assert torch.equal(runs.weights(model), expected)


@pytest.mark.parametrize(("how", "error"), [("backward", PrivacyError), ("mean", LossShapeError), ("clip", None)])
def test_fabric_s_own_backward_is_refused_and_its_clipping_finds_nothing(how, error):
    options = {"batch_size": 8, "noise_multiplier": 1.0, "max_physical_batch_size": 3}
    fabric, model, optimizer, engine = with_fabric(**options)
    batch = next(runs.nonempty(engine))
    with pytest.raises(error) if error else contextlib.nullcontext():
        for examples in batch.physical():
            losses = runs.losses_of(model, examples)
            if how == "backward":
                fabric.backward(losses.mean())
            else:
                engine.backward(losses.mean() if how == "mean" else losses)
        if how == "clip":
            assert fabric.clip_gradients(model, optimizer, max_norm=1e-3) == 0
        optimizer.step()
    if error is None:
        assert float(runs.grads(model).norm()) > 1e-2


def test_precisions_and_strategies_of_fabric_are_refused():
    model = runs.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr.RATE)
    with pytest.raises(PrivacyError, match="precision='16-true'"):
        setup_fabric(lightning.Fabric(accelerator="cpu", devices=1, precision="16-true"), model, optimizer, runs.data())
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    fabric.strategy.__class__ = type("DeepSpeedStrategy", (type(fabric.strategy),), {})
    with pytest.raises(PrivacyError, match="DeepSpeedStrategy"):
        setup_fabric(fabric, model, optimizer, runs.data())
    with pytest.raises(TypeError, match="'sigmas' is no option"):
        setup_fabric(lightning.Fabric(accelerator="cpu", devices=1), model, optimizer, runs.data(), sigmas=1.0)
