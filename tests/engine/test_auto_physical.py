"""max_physical_batch_size="auto": the size is found by trial, within the memory that may be used, without a trace."""

import copy
import ctypes
from collections.abc import Callable
from typing import Any

import private_runs as runs
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ghostclip
from ghostclip.engine import memory, micro_batching
from ghostclip.engine.memory import MemoryMeter

EXAMPLES = 200


class Counted(MemoryMeter):
    """Memory in which a trial of n examples takes 1000 + 10 n bytes; ``loss_fn`` says how many it saw."""

    def __init__(self, limit: int) -> None:
        self.limit, self.seen, self.sizes = limit, [0], list[int]()

    def now(self) -> int:
        return 1000

    def peak_of(self, work: Callable[[], None]) -> int:
        self.seen.append(0)
        work()
        return 1000 + 10 * self.seen[-1]

    def loss_fn(self, model: nn.Module, batch: Any) -> Tensor:
        self.sizes.append(len(batch[1]))
        self.seen[-1] = max(self.seen[-1], len(batch[1]))
        return runs.losses_of(model, batch)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    found = Counted(10**9)
    monkeypatch.setattr(micro_batching, "MemoryMeter", lambda device, given: found)
    return found


def model_of() -> nn.Module:
    model = runs.network()
    model.insert(2, nn.Dropout(0.2))
    return model


def engine_of(model: nn.Module, data: Any = None, **options: Any) -> ghostclip.PrivacyEngine:
    options = {"batch_size": 50, "noise": "test", "seed": 3, "noise_multiplier": 1.0, "self_check": False} | options
    options = {"clipping": 1.0, "max_physical_batch_size": "auto"} | options
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return runs.engine_for(model, optimizer, runs.data(EXAMPLES) if data is None else data, **options)


def reserve(model: nn.Module) -> int:
    """Bytes that are left for the update."""
    return 2 * sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("room", [75, 200, 470])
def test_the_largest_batch_that_fits_is_found(room: int, counted: Counted) -> None:
    engine = engine_of(model := model_of())
    counted.limit = 1000 + room + reserve(model)
    runs.train(engine, 8, counted.loss_fn)
    most = engine.batches().limit or 0
    assert 0.85 * (room // 10) - 1 <= most <= room // 10
    after = counted.sizes[len(counted.seen) - 1 :]
    assert max(after) <= most
    assert sum(after) > EXAMPLES


def test_where_nothing_fits_it_says_so_and_one_example_may_fit_where_two_do_not(counted: Counted) -> None:
    engine = engine_of(model := model_of(), batch_size=3)
    counted.limit = 1005
    with pytest.raises(MemoryError, match="one example don't fit"):
        runs.train(engine, None, counted.loss_fn)
    assert engine.steps_taken == 0
    counted.limit = 1015 + reserve(model)
    runs.train(engine, 5, counted.loss_fn)
    assert engine.batches().limit == 1


@pytest.mark.parametrize("runs_out", [False, True])
def test_sizes_beyond_a_leap_are_too_large(runs_out: bool, counted: Counted) -> None:
    """In what they take, or where memory runs out."""
    if not runs_out:
        counted.limit, smooth = 3000, counted.peak_of
        counted.peak_of = lambda work: smooth(work) + 2000 * (counted.seen[-1] > 20)  # type: ignore[method-assign]

    def losses_of(model: nn.Module, batch: Any) -> Tensor:
        if runs_out and len(batch[1]) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return counted.loss_fn(model, batch)

    runs.train(engine := engine_of(model_of()), 8, losses_of)
    assert engine.batches().limit == 16


@pytest.mark.parametrize("clipping", [1.0, ghostclip.clipping.Adaptive(1.0)])
def test_the_trials_leave_no_trace(clipping: Any, counted: Counted) -> None:
    """Nor do their batches, made of copies, count among those of which ownership is known."""
    trained, known = [], []
    for size in (None, "auto"):
        engine = engine_of(model_of(), max_physical_batch_size=size, clipping=copy.deepcopy(clipping))
        runs.train(engine, loss_fn=counted.loss_fn)
        trained.append(runs.weights(engine.model))
        layouts = engine._steps._clipper.passes._layouts
        known.append([structure.batches for structure in layouts._structures.values()])
    assert torch.equal(*trained)
    assert known[0] == known[1] == [len(engine.batches())]
    assert len(counted.sizes) > 2 * len(engine.batches())


def test_an_empty_batch_leaves_the_trials_to_the_next(counted: Counted) -> None:
    engine, sizes = engine_of(model_of(), batch_size=1), []
    for batch in engine.batches():
        sizes.append(sum(batch.sizes))
        engine.step(batch, runs.losses_of)
        assert (engine.batches().limit is None) == (not any(sizes))
    assert 0 in sizes


def test_a_loop_of_ones_own_needs_a_step_first(counted: Counted) -> None:
    engine = engine_of(model_of())
    for caller, call in (("backward", lambda: runs.train_by_hand(engine)), ("compile", engine.compile)):
        with pytest.raises(ghostclip.PrivacyError, match=rf"found by the first .* engine\.{caller}\(\) came before"):
            call()
    runs.train(engine)
    engine.compile()
    runs.train_by_hand(engine)


def test_a_batch_that_cant_be_divided_is_refused(counted: Counted) -> None:
    engine = engine_of(model_of(), [(torch.zeros(5), "a name")] * 100)
    with pytest.raises(TypeError, match="can't divide a batch: it holds something of type str"):
        runs.train(engine)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="a function of the GNU C library")
def test_a_limit_is_kept_for_real_passes() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 256, 3))

    data = TensorDataset(torch.randn(300, 3, 16, 16), torch.randint(3, (300,)))
    runs.train(engine_of(model(), TensorDataset(*data[:8]), batch_size=4))  # loads what a first step loads
    # What other tests left in this process would hold whole batches unmeasured.
    ctypes.CDLL(None).malloc_trim(0)
    room = 40 << 20
    limit = MemoryMeter(torch.device("cpu"), 1).now() + 2 * 2 * 4 * 64 * 256 * 3 + room
    runs.train(engine := engine_of(model(), data, batch_size=280, memory_limit=limit), 2)
    # One example's activations are 64 KiB a layer, a few times.
    assert 20 < (engine.batches().limit or 0) < 280
    assert 0 < MemoryMeter(torch.device("cpu"), None).limit < 1 << 50


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/one/two\n", {"one/memory.max": "1000\n", "one/two/memory.max": "max\n", "memory.max": "5000\n"}, 1000),
        ("4:memory:/one\n0::/\n", {"memory/one/memory.limit_in_bytes": "700\n"}, 700),
        ("0::/\n", {}, None),
    ],
)
def test_control_groups_are_read(lines, files, expected, tmp_path, monkeypatch):
    (tmp_path / "cgroup").write_text(lines)
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    monkeypatch.setattr(memory, "PROCESS", tmp_path)
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "groups")
    found = min(memory._limits_of_groups())
    assert found == expected if expected is not None else found > 1 << 60
