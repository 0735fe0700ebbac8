"""Accelerate: engines built before and after ``prepare`` train exactly as without it; the rest is refused."""

import os
from typing import Any

import private_runs as runs
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.utils.data import DataLoader

from ghostclip import GradientLeakError, PrivacyEngine, PrivacyError

accelerate = pytest.importorskip("accelerate")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:OMP_NUM_THREADS/MKL_NUM_THREADS unset"),
]

MAX_NORM = 0.3
ENGINE = {"batch_size": 8, "max_physical_batch_size": 3, "clipping": MAX_NORM, "noise": "test", "seed": 3}


@pytest.fixture(autouse=True)
def fresh_state():
    """Accelerate keeps its settings for the whole process."""
    yield
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


def prepared(accelerator: Any, after: bool, noise_multiplier: float = 0.0, dtype: torch.dtype = torch.float64) -> Any:
    """(model, optimizer, engine), as the training loop gets them."""
    model: nn.Module = runs.network(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.manual_seed(0)
    data, options = runs.data(dtype=dtype), {**ENGINE, "noise_multiplier": noise_multiplier}
    if after:
        model, optimizer = accelerator.prepare(model, optimizer)
        return model, optimizer, PrivacyEngine(model, optimizer, data, **options)
    engine = PrivacyEngine(model, optimizer, data, **options)
    model, optimizer = accelerator.prepare(model, optimizer)
    return model, optimizer, engine


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("spelled_out", [False, True])
def test_a_step_is_the_hand_written_one(after, spelled_out):
    model, optimizer, engine = prepared(accelerate.Accelerator(cpu=True), after)
    reference = runs.network(torch.float64)
    for batch in engine.batches():
        seen: list[Any] = []
        if spelled_out:
            for examples in batch.physical():
                seen.append(examples)
                engine.backward(runs.losses_of(model, examples))
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.step(
                batch, lambda model, examples, seen=seen: seen.append(examples) or runs.losses_of(model, examples)
            )
            # The self-check calls the function again, on other rows.
            seen = seen[-len(batch.sizes) :] if batch.sizes else []
        for p, total in zip(reference.parameters(), runs.clipped_sum(reference, seen, MAX_NORM), strict=True):
            p.data -= 0.5 * total / 8
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
    assert engine.steps_taken == 3


def bfloat16_run(accelerator: Any | None) -> list[torch.Tensor]:
    """Weights after an epoch in bfloat16 autocast, by Accelerate or by hand."""
    if accelerator is None:
        model = runs.network()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
        torch.manual_seed(0)
        engine = PrivacyEngine(model, optimizer, runs.data(), **ENGINE, noise_multiplier=1.0)
    else:
        model, optimizer, engine = prepared(accelerator, True, 1.0, torch.float32)
    for batch in engine.batches():
        for inputs, targets in batch.physical():
            with torch.autocast("cpu", torch.bfloat16) if accelerator is None else accelerator.autocast():
                outputs = model(inputs)
            assert accelerator is not None or outputs.dtype == torch.bfloat16
            engine.backward(nn.functional.cross_entropy(outputs.float(), targets, reduction="none"))
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_bfloat16_is_that_of_torch_to_the_bit():
    found = bfloat16_run(accelerate.Accelerator(cpu=True, mixed_precision="bf16"))
    for mine, plain in zip(found, bfloat16_run(None), strict=True):
        assert torch.equal(mine, plain)


def test_a_schedule_moves_once_a_step():
    accelerator = accelerate.Accelerator(cpu=True)
    _, optimizer, engine = prepared(accelerator, True)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5))
    runs.train(engine, after=schedule.step)
    assert schedule.get_last_lr() == [0.5**4]


def test_skipped_steps_are_refused():
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, engine = prepared(accelerator, True)
    with pytest.raises(PrivacyError, match="had no step"):  # noqa: PT012
        for batch in engine.batches():
            with accelerator.accumulate(model):
                runs.gather(engine, batch)
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("how", ["backward", "clip"])
def test_accelerate_s_own_backward_is_refused_and_its_clipping_finds_nothing(how):
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, engine = prepared(accelerator, True)
    batch = next(runs.nonempty(engine))
    for examples in batch.physical():
        if how == "backward":
            accelerator.backward(runs.losses_of(model, examples).mean())
            with pytest.raises(GradientLeakError):
                engine.backward(runs.losses_of(model, examples))
            return
        engine.backward(runs.losses_of(model, examples))
        assert accelerator.clip_grad_norm_(model.parameters(), 1e-3) == 0
    optimizer.step()
    assert float(runs.grads(model).norm()) > 1e-2


def test_a_prepared_loader_is_refused():
    accelerator = accelerate.Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(runs.data(), batch_size=8, shuffle=True))
    model = runs.network()
    with pytest.raises(PrivacyError, match="pass a plain DataLoader"):
        PrivacyEngine(model, torch.optim.SGD(model.parameters(), lr=0.5), loader, noise_multiplier=1.0)


def on_two(after: bool) -> Any:
    """What an epoch comes to on each rank: weights, epsilon; or the error."""
    rank = str(dist.get_rank())
    os.environ.update({"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})  # the group is there already
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    model, optimizer, engine = prepared(accelerator, after)
    try:
        for batch in engine.batches():
            for examples in batch.physical():
                engine.backward(runs.losses_of(model, examples))
            optimizer.step()
            optimizer.zero_grad()
    except PrivacyError as error:
        return str(error)
    return [p.detach().clone() for p in model.parameters()]


def test_two_processes_are_one(tmp_path):
    first, second = on_ranks(lambda: on_two(True), tmp_path)
    model, _, engine = prepared(accelerate.Accelerator(cpu=True), True)
    for batch in engine.batches():
        engine.step(batch, runs.losses_of)
    for one, other, alone in zip(first, second, model.parameters(), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, alone.detach(), rtol=1e-9, atol=1e-12)


def test_two_processes_need_prepare_first(tmp_path):
    assert all("give the engine that wrapper as model=" in said for said in on_ranks(lambda: on_two(False), tmp_path))
