"""max_physical_batch_size="auto": the size is found by trial, within the memory that may be used, without a trace."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ghostclip
from ghostclip.engine import memory, micro_batching
from ghostclip.engine.memory import MemoryMeter

EXAMPLES = 200
CPU = torch.device("cpu")


class Counted(MemoryMeter):
    """Memory in which a trial of n examples takes 1000 + 10 n bytes; the model says how many it saw."""

    def __init__(self, limit: int) -> None:
        self.limit, self.seen = limit, [0]

    def now(self) -> int:
        return 1000

    def peak_of(self, work: Callable[[], None]) -> int:
        self.seen.append(0)
        work()
        return 1000 + 10 * self.seen[-1]


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))


def data_of() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(EXAMPLES, 6), torch.randint(3, (EXAMPLES,)))


def engine_of(model: nn.Module, data: Any = None, **options: Any) -> ghostclip.PrivacyEngine:
    options = {"batch_size": 50, "noise": "test", "seed": 3, "noise_multiplier": 1.0, "self_check": False} | options
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return ghostclip.PrivacyEngine(model, optimizer, data_of() if data is None else data, **options)


def losses_of(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets, reduction="none")


def train(engine: ghostclip.PrivacyEngine, loss_fn: Callable[..., Tensor] = losses_of, epochs: int = 2) -> None:
    for _ in range(epochs):
        for batch in engine.batches():
            engine.step(batch, loss_fn)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Counted]:
    def use(limit: int) -> Counted:
        found = Counted(limit)
        monkeypatch.setattr(micro_batching, "MemoryMeter", lambda device, given: found)
        return found

    return use


def watched(found: Counted, sizes: list[int]) -> Callable[..., Tensor]:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        sizes.append(len(batch[1]))
        found.seen[-1] = max(found.seen[-1], len(batch[1]))
        return losses_of(model, batch)

    return loss_fn


@pytest.mark.parametrize("room", [40, 75, 130, 200, 470])
def test_the_largest_batch_that_fits_is_found(room: int, counted: Callable[[int], Counted]) -> None:
    model = model_of()
    reserve = 2 * sum(parameter.nbytes for parameter in model.parameters())
    found, sizes = counted(1000 + room + reserve), []
    engine = engine_of(model, max_physical_batch_size="auto")
    train(engine, watched(found, sizes))
    most = engine.batches().limit
    fits = room // 10
    assert most is not None
    assert 0.85 * fits - 1 <= most <= fits
    after = sizes[len(found.seen) - 1 :]
    assert max(after) <= most
    assert sum(after) > EXAMPLES


def test_where_nothing_fits_it_says_so_and_one_example_may_fit_where_two_do_not(counted) -> None:
    found, model = counted(1005), model_of()
    engine = engine_of(model, max_physical_batch_size="auto", batch_size=3)
    with pytest.raises(MemoryError, match="one example don't fit"):
        train(engine, watched(found, []))
    assert engine.steps_taken == 0
    found.limit = 1015 + 2 * sum(parameter.nbytes for parameter in model.parameters())
    train(engine, watched(found, []), epochs=1)
    assert engine.batches().limit == 1


def out_of_memory(model: nn.Module, batch: Any) -> Tensor:
    if len(batch[1]) > 20:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return losses_of(model, batch)


@pytest.mark.parametrize("leaps", [True, False])
def test_sizes_beyond_a_leap_or_out_of_memory_are_too_large(leaps: bool, counted: Callable[[int], Counted]) -> None:
    found = counted(3000 if leaps else 10**9)
    smooth = found.peak_of
    found.peak_of = lambda work: smooth(work) + 2000 * (leaps and found.seen[-1] > 20)  # type: ignore[method-assign]
    engine = engine_of(model_of(), max_physical_batch_size="auto")
    train(engine, watched(found, []) if leaps else out_of_memory)
    assert engine.batches().limit == 16


def test_a_batch_that_fits_is_not_divided(counted: Callable[[int], Counted]) -> None:
    found, sizes = counted(10**9), list[int]()
    engine = engine_of(model_of(), max_physical_batch_size="auto")
    train(engine, watched(found, sizes), epochs=3)
    assert len(sizes) == len(found.seen) - 1 + 3 * len(engine.batches())


def test_a_batch_that_cant_be_divided_is_refused(counted: Callable[[int], Counted]) -> None:
    counted(10**9)
    engine = engine_of(model_of(), [(torch.zeros(6), "a name")] * 100, max_physical_batch_size="auto")
    with pytest.raises(TypeError, match="can't divide a batch: it holds something of type str"):
        train(engine, lambda model, batch: batch)


@pytest.mark.parametrize("clipping", [1.0, ghostclip.clipping.PerLayer(1.0), ghostclip.clipping.Adaptive(1.0)])
def test_the_trials_leave_no_trace(clipping: Any, counted: Callable[[int], Counted]) -> None:
    trained = {}
    for size in (None, "auto"):
        counted(10**9)
        model = model_of()
        torch.manual_seed(5)
        train(engine_of(model, max_physical_batch_size=size, clipping=copy.deepcopy(clipping)), epochs=1)
        trained[size] = [parameter.detach().clone() for parameter in model.parameters()]
    for one, other in zip(trained[None], trained["auto"], strict=True):
        assert torch.equal(one, other)


def test_an_empty_batch_leaves_the_trials_to_the_next(counted: Callable[[int], Counted]) -> None:
    counted(10**9)
    engine = engine_of(model_of(), batch_size=1, max_physical_batch_size="auto")
    sizes = []
    for batch in engine.batches():
        sizes.append(sum(batch.sizes))
        engine.step(batch, losses_of)
        assert (engine.batches().limit is None) == (not any(sizes))
    assert 0 in sizes


def test_a_loop_of_ones_own_needs_a_step_first(counted: Callable[[int], Counted]) -> None:
    counted(10**9)
    model = model_of()
    engine = engine_of(model, max_physical_batch_size="auto")
    (examples,) = next(iter(engine.batches())).physical()
    with pytest.raises(ghostclip.PrivacyError, match=r"found by engine\.step"):
        engine.backward(losses_of(model, examples))
    with pytest.raises(ghostclip.PrivacyError, match=r"found by engine\.step"):
        engine.compile()
    for batch in engine.batches():
        engine.step(batch, losses_of)
    engine.compile()
    for batch in engine.batches():
        for examples in batch.physical():
            engine.backward(losses_of(model, examples))
        engine.optimizer.step()
        engine.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_physical_batch_size": "big"}, "max_physical_batch_size must be a number, 'auto' or None"),
        ({"max_physical_batch_size": "auto", "memory_limit": 0}, "memory_limit must be"),
        ({"max_physical_batch_size": "auto", "memory_limit": "1GB"}, "memory_limit must be"),
        ({"max_physical_batch_size": 8, "memory_limit": 10**9}, 'memory_limit is for max_physical_batch_size="auto"'),
        ({"memory_limit": 10**9}, 'memory_limit is for max_physical_batch_size="auto"'),
        ({"max_physical_batch_size": "auto", "unit_ids": [0] * EXAMPLES}, "don't go together"),
        ({"max_physical_batch_size": "auto", "sampling": "truncated"}, "max_batch_size must be given"),
    ],
)
def test_arguments_that_are_wrong(options: dict[str, Any], match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        engine_of(model_of(), **options)


@pytest.mark.skipif(not memory.PROCESS.exists(), reason="memory is measured on Linux")
def test_resident_memory_is_measured() -> None:
    found = MemoryMeter(CPU, 1)
    before = found.now()
    size = 64 << 20
    peak = found.peak_of(lambda: torch.ones(size // 4).sum().item())
    assert before + 0.8 * size < peak < before + 3 * size
    assert found.peak_of(lambda: None) < peak - 0.5 * size
    assert 0 < MemoryMeter(CPU, None).limit < 1 << 50


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="a function of the GNU C library")
def test_a_limit_is_kept_for_real_passes() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 256, 3))

    data = TensorDataset(torch.randn(300, 3, 16, 16), torch.randint(3, (300,)))
    train(engine_of(model(), TensorDataset(*data[:8]), batch_size=4), epochs=1)  # loads what a first step loads
    # What other tests left in this process would hold whole batches unmeasured.
    ctypes.CDLL(None).malloc_trim(0)
    room = 40 << 20
    limit = MemoryMeter(CPU, 1).now() + 2 * 2 * 4 * 64 * 256 * 3 + room
    engine = engine_of(model(), data, batch_size=280, max_physical_batch_size="auto", memory_limit=limit)
    train(engine, epochs=2)
    most = engine.batches().limit
    # One example's activations are 64 KiB a layer, a few times.
    assert most is not None
    assert 20 < most < 280


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/one/two\n", {"one/memory.max": "1000\n", "one/two/memory.max": "max\n", "memory.max": "5000\n"}, 1000),
        (
            "4:memory:/one\n3:cpuset:/\n0::/\n",
            {"memory/one/memory.limit_in_bytes": "700\n", "memory/memory.limit_in_bytes": "900\n"},
            700,
        ),
        ("0::/\n", {}, None),
    ],
)
def test_control_groups_are_read(
    lines: str, files: dict[str, str], expected: int | None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cgroup").write_text(lines)
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    monkeypatch.setattr(memory, "PROCESS", tmp_path)
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "groups")
    found = min(memory._limits_of_groups())
    assert found == expected if expected is not None else found > 1 << 60


def hinge_in_batch(model: nn.Module, batch: Any) -> Tensor:
    """Examples meet where they are close: two of them hardly ever are."""
    outputs = model(batch[0])
    gaps = (outputs.unsqueeze(1) - outputs.unsqueeze(0)).square().sum(2)
    return outputs.square().sum(1) + (0.05 - gaps).clamp_min(0).sum(1)


def test_copies_of_one_example_prove_nothing(counted: Callable[[int], Counted]) -> None:
    """In a first sample of one example trials are made of its copies, between which hinge_in_batch has no gradient."""
    counted(10**9)
    close = torch.randn(6) + 1e-2 * torch.randn(EXAMPLES, 6)
    data = TensorDataset(close, torch.zeros(EXAMPLES, dtype=torch.int64))
    for seed in range(50):
        engine = engine_of(nn.Linear(6, 2), data, batch_size=2, seed=seed, max_physical_batch_size="auto")
        sizes, refused = [], False
        try:
            for batch in engine.batches():
                sizes.append(sum(batch.sizes))
                engine.step(batch, hinge_in_batch)
        except ghostclip.UnsupportedModelError:
            refused = True
        if next(size for size in sizes if size) == 1:
            break
    assert refused
    *before, last = [size for size in sizes if size]
    assert set(before) == {1}
    assert last > 1  # the first batch in which examples can meet
