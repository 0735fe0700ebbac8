"""Beginning, ending and writing traces: whole files, refusals before anything is made, failures beside training."""

import copy
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import private_runs as runs
import pytest
import torch
from torch import Tensor, nn

from ghostclip import clipping as c
from ghostclip import traces

FIXED = {"sampling": "without_replacement", "self_check": False, "noise_multiplier": 1.0, "clipping": 0.3}


@pytest.fixture
def engine() -> Any:
    """An engine whose logical batches have 8 examples each, three of them in an epoch."""
    return runs.engine_for(runs.network(), **FIXED)


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_piece_that_is_tried_again_out_of_memory_counts_once(failing: int, tmp_path: Path) -> None:
    # The same examples in every run: of some, the difference below is next to nothing, and as large as rounding.
    engine = runs.engine_for(runs.network(), noise="test", seed=1, **FIXED)
    engine.trace(tmp_path / "t.npz")
    before, done, tried = copy.deepcopy(engine.model), [], []

    def losses(model: nn.Module, examples: Any) -> Tensor:
        found, passes = runs.losses_of(model, examples), []
        tried.append(len(found))
        done.extend([examples] if len(found) == 2 else [])

        def out_of_memory(grad: Tensor) -> None:
            passes.append(1)
            if len(found) > 2 and len(passes) == failing:
                raise MemoryError("no more")

        found.register_hook(out_of_memory)
        return found

    engine.step(next(iter(engine.batches())), losses)
    assert tried == [8, 4, 2, 2, 2, 2]
    found = traces.read(tmp_path / "t.npz")
    assert found["examples"].tolist() == [8]
    runs.losses_of(before, [torch.cat(parts) for parts in zip(*done, strict=True)]).mean().backward()
    squared = runs.grads(before).double().square().sum()
    expected = (8 * squared - np.square(found["norms"][0][-1].astype(float)).mean()) / 7
    assert found["squared_gradient"][0] == pytest.approx(float(expected), rel=1e-5)


def test_files_say_that_they_are_private_and_so_does_the_log(tmp_path: Path, caplog: Any) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    said = "raw data: contains norms of single examples without noise; not covered by the guarantee; don't publish"
    for suffix in ("npz", "parquet"):
        engine = runs.engine_for(runs.network(), **FIXED)
        with caplog.at_level(logging.WARNING, "ghostclip"):
            engine.trace(tmp_path / f"t.{suffix}")
        assert said in caplog.text
        caplog.clear()
        runs.train(engine)
        assert (tmp_path / f"t.{suffix}" / "_PRIVATE.txt").read_text() == f"{said}\n"
        assert traces.read(tmp_path / f"t.{suffix}")["privacy"] == said
        assert (tmp_path / f"t.{suffix}").stat().st_mode & 0o077 == 0
    (file,) = (tmp_path / "t.npz").glob("*.npz")
    with np.load(file) as arrays:
        assert arrays.files[0] == "privacy"
    table = parquet.read_table(tmp_path / "t.parquet")  # the folder as one table, as others read it
    assert table.column_names[:3] == ["step", "group", "norms"]
    assert table.num_rows == 3


def test_a_run_that_goes_on_can_be_read_and_a_part_that_was_begun_does_not_matter(engine: Any, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "t.npz"
    engine.trace(str(path), every=1)
    runs.train(engine)
    (path / ".step-0000000004.npz").write_bytes(b"half of")
    assert traces.read(path)["step"].tolist() == [1, 2, 3]


def test_both_kinds_hold_the_same(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    found = []
    for suffix in ("npz", "parquet"):
        torch.manual_seed(5)
        engine = runs.engine_for(runs.network(), noise="test", seed=1, clipping=c.PerLayer(0.2), noise_multiplier=1.0)
        engine.trace(tmp_path / f"t.{suffix}", every=2)
        runs.train(engine)
        found.append(traces.read(tmp_path / f"t.{suffix}"))
    one, other = found
    assert one.keys() == other.keys() >= {*traces.BY_GROUP, *traces.BY_STEP, "norms", "step", "examples"}
    assert one.pop("groups") == other.pop("groups") == ["0", "2", "all"]
    assert one.pop("privacy") == other.pop("privacy")
    for norms, others in zip(one.pop("norms"), other.pop("norms"), strict=True):
        assert norms.dtype == others.dtype == np.float32
        np.testing.assert_array_equal(norms, others)
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name])


@pytest.mark.parametrize("end", ["None", "close", "detach"])
def test_a_trace_ends(engine: Any, end: str, tmp_path: Path) -> None:
    trace = engine.trace(tmp_path / "t.npz", every=1)
    runs.train(engine)
    {"None": lambda: engine.trace(None), "close": trace.close, "detach": engine.detach}[end]()
    if end != "detach":
        runs.train(engine)
    assert traces.read(trace.path)["step"].tolist() == [1, 2, 3]


def test_one_that_is_ended_within_a_batch_leaves_it_out_and_another_begins_with_the_next(
    engine: Any, tmp_path: Path
) -> None:
    first = engine.trace(tmp_path / "1.npz", every=1)
    for place, batch in enumerate(engine.batches()):
        runs.gather(engine, batch)
        if place == 1:
            engine.trace(tmp_path / "2.npz", every=1)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    assert traces.read(first.path)["step"].tolist() == [1]
    assert traces.read(tmp_path / "2.npz")["step"].tolist() == [3]


SUFFIX = r"must end in \.parquet or \.npz"


@pytest.mark.parametrize(
    ("name", "every", "words"),
    [
        *(("t.npz", every, "every must be a whole number >= 1") for every in (0, 1.5)),
        *((name, 1, SUFFIX) for name in ("t.csv", "t")),
        ("mine.npz", 1, r"mine\.npz exists; give the path of a trace that is to be made"),
    ],
)
def test_what_can_not_be_traced_is_refused_and_nothing_is_made(
    engine: Any, name: str, every: Any, words: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.npz").write_text("mine")
    with pytest.raises((ValueError, TypeError, FileExistsError), match=words):
        engine.trace(tmp_path / name, every=every)
    if words == SUFFIX:
        with pytest.raises(ValueError, match=words):
            traces.read(tmp_path / name)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_engines_that_are_not_traced(engine: Any, tmp_path: Path) -> None:
    groups = {"all": ["0.*"], "rest": ["2.*"]}
    other = runs.engine_for(runs.network(), clipping=c.Grouped(groups, max_norm=1.0))
    with pytest.raises(ValueError, match="a group of parameters is called 'all'"):
        other.trace(tmp_path / "t.npz")
    engine.trace(tmp_path / "t.npz")
    with pytest.raises(ValueError, match="holds no traced step"):
        traces.read(tmp_path / "t.npz")


def test_without_pyarrow_the_error_says_what_to_do(engine: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs pyarrow: pip install pyarrow; \.npz needs nothing"):
        engine.trace(tmp_path / "t.parquet")
    assert not list(tmp_path.iterdir())


def test_compiled_steps_are_not_traced(engine: Any, tmp_path: Path) -> None:
    engine.trace(tmp_path / "t.npz")
    with pytest.raises(ValueError, match=r"trace\(\) and compile\(\) don't go together"):
        engine.compile()
    assert engine.trace(None) is None
    engine.compile()
    with pytest.raises(ValueError, match=r"trace\(\) and compile\(\) don't go together"):
        engine.trace(tmp_path / "u.npz")
    assert not (tmp_path / "u.npz").exists()


def test_a_disk_that_is_full_ends_the_trace_and_not_the_run(
    engine: Any, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    engine.trace(tmp_path / "t.npz", every=1)
    engine.step(next(iter(engine.batches())), runs.losses_of)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with caplog.at_level(logging.WARNING, "ghostclip"):
        runs.train(engine)
    assert caplog.text.count("ends here, since it can't be written: [Errno 28] No space left") == 1
    assert engine.steps_taken > 2
    assert traces.read(tmp_path / "t.npz")["step"].tolist() == [1]
