"""The benchmark: its gate finds wrong gradients; what the command prints and writes, what mistakes end in."""

import json
import math
import os
import re
import subprocess
import sys

import pytest
import torch
from commands import mistake
from tiny_bench import TINY, broken, unable

from ghostclip import cli
from ghostclip.bench import CONTENDERS, WORKLOADS, Contender, Workload, compare, line_up
from ghostclip.bench.contenders import by_filling_gradients
from ghostclip.bench.losses import class_losses
from ghostclip.bench.machine import commit, describe, in_words
from ghostclip.bench.memory import _counter, peaks
from ghostclip.bench.naive import multiloss, nxbp
from ghostclip.bench.reference import relative_error
from ghostclip.bench.table import full_markdown, markdown

MIB = 2**20
NONPRIVATE = {"nonprivate": CONTENDERS["nonprivate"]}


def unclipped(model, losses, max_norm):
    """A contender that forgets to clip."""

    def add(inputs, targets):
        losses(model(inputs), targets).sum().backward()

    return add


def test_every_contender_that_is_there_passes_the_gate():
    quick = {name: entry for name, entry in CONTENDERS.items() if not name.endswith("compiled")}
    field = line_up(TINY, quick)
    assert field.errors.pop("nonprivate") is None
    assert set(field.errors) >= {"reweight", "cached", "nxbp", "multiloss"}
    assert set(field.errors) | {"nonprivate"} == set(quick)
    assert all(error < 1e-5 for error in field.errors.values())
    assert field.absent == {}


def test_wrong_broken_and_missing_contenders_are_told_apart():
    chosen = NONPRIVATE | {
        "unclipped": Contender("unclipped", "", by_filling_gradients(unclipped)),
        "broken": Contender("broken", "", by_filling_gradients(broken)),
        "unable": Contender("unable", "", by_filling_gradients(unable)),
        "absent": Contender("absent", "", by_filling_gradients(broken), lambda: "not installed"),
    }
    rows = compare(TINY, chosen, seconds=0.01)["contenders"]
    assert rows["unclipped"]["gradient_error"] > 0.1
    assert rows["unclipped"]["correct"] is False
    assert rows["broken"] == {"failed": "RuntimeError: out of paper\nsecond line"}
    assert rows["unable"] == {"missing": "no such layer here"}
    assert rows["absent"] == {"missing": "not installed"}


def test_the_gate_opens_no_wider_than_rounding_needs():
    assert line_up(TINY, NONPRIVATE).gate == 1e-4
    torch.manual_seed(0)
    model, (inputs, targets) = TINY.model(), TINY.batch(6)

    def noisy(outputs, targets, reduction="none"):
        """Losses that depend a little on how many rows were computed together."""
        return class_losses(outputs * (1 + 1e-4 * len(outputs)), targets, reduction)

    field = line_up(Workload("noisy", "", 6, lambda: model, lambda size: (inputs, targets), noisy), NONPRIVATE)
    assert 1e-4 < field.gate <= 1e-2


def test_relative_error_counts_nan_and_missing_parameters_as_infinite():
    expected = {"w": torch.ones(2, dtype=torch.float64)}
    assert relative_error({"w": torch.tensor([1.0, 2.0])}, expected) == pytest.approx(1 / math.sqrt(2))
    assert relative_error({"w": torch.tensor([1.0, 2.0])}, expected, {"w": 100.0}) == pytest.approx(0.1)
    assert relative_error({"w": torch.tensor([1.0, math.nan])}, expected) == math.inf
    assert relative_error({}, expected) == math.inf
    assert relative_error({"w": torch.ones(3)}, expected) == math.inf


def loss_fn(model, batch):
    return class_losses(model(batch[0]), batch[1])


def summed(model, method, *batches):
    """What the calls with these batches add to p.grad, in one vector, and the norms of the last."""
    model.zero_grad()
    for batch in batches:
        norms = method(model, loss_fn, batch, 2.0)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads]), norms


@pytest.mark.parametrize("method", [nxbp, multiloss])
def test_naive_calls_add_up_and_leave_out_what_is_not_finite(method):
    torch.manual_seed(0)
    model, (inputs, targets) = TINY.model().double(), TINY.batch(6)
    model.unused = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    batch = [inputs.double(), targets]
    none, start, end = ([part[rows] for part in batch] for rows in (slice(0, 0), slice(0, 2), slice(2, 6)))
    torch.testing.assert_close(summed(model, method, none, start, end)[0], summed(model, method, batch)[0])
    assert summed(model, method, none)[1].shape == (0,)
    others, _ = summed(model, method, [part[1:] for part in batch])
    batch[0][0, 0] = math.nan
    found, norms = summed(model, method, batch)
    assert torch.isfinite(norms).tolist() == [False] + [True] * 5
    torch.testing.assert_close(found, others)


@pytest.mark.slow  # three processes, each of which imports torch
def test_a_fresh_process_finds_what_a_step_needs():
    found = peaks("mlp", ["nxbp"], batch_size=4096)
    plain = found["nonprivate"]
    # Gradients and Adam's two moments are 1.6 MiB; inputs of the hidden layers 4096 x (128 + 256) x 4 bytes, twice.
    assert 6 * MIB < plain["peak"] < 60 * MIB
    assert found["nxbp"]["over_nonprivate"] == found["nxbp"]["peak"] / plain["peak"] < 1


COUNTED = """
import ctypes
libc = ctypes.CDLL(None)
for name in ("malloc", "calloc", "realloc", "aligned_alloc"):
    getattr(libc, name).restype = ctypes.c_void_p
now, most = libc.ghostclip_allocated, libc.ghostclip_most_allocated
now.restype = most.restype = ctypes.c_long
size, floor = ctypes.c_size_t, now()
most()
blocks = [libc.malloc(size(100_000)), libc.calloc(size(10), size(20_000)), libc.aligned_alloc(size(64), size(64_000))]
held = now() - floor
grown = libc.realloc(ctypes.c_void_p(blocks[0]), size(1_000_000))
for block in (grown, *blocks[1:]):
    libc.free(ctypes.c_void_p(block))
print(held, most() - floor, most() - floor, now() - floor)
"""


@pytest.mark.skipif(_counter() is None, reason="no compiler, or not glibc")
def test_allocated_bytes_are_counted():
    environment = {**os.environ, "LD_PRELOAD": _counter(), "PYTHONMALLOC": "malloc"}
    command = [sys.executable, "-c", COUNTED]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    held, most, since, left = map(int, done.stdout.split())
    assert 364_000 <= held < 364_000 + 20_000
    # While it grew, the first block was counted once; Python's own objects come on top.
    assert 1_264_000 <= most < 1_264_000 + 120_000
    assert since < 20_000
    assert left < 20_000


FEW = ["--contenders", "reweight,cached,nxbp", "--seconds", "0.05"]


@pytest.fixture
def tiny(monkeypatch):
    """A workload of milliseconds, and a quiet machine."""
    monkeypatch.setitem(WORKLOADS, "tiny", TINY)
    monkeypatch.setattr("os.getloadavg", lambda: (0.1, 0.0, 0.0))
    # Of this process, in which other tests look at memory.
    monkeypatch.setattr("ghostclip.cli.bench.keep_freed_memory", lambda: None)


def main(words: list[str]) -> int:
    return cli.main(["bench", *words])


def result(**contenders):
    """A result of the command with these rows."""
    workloads = {"tiny": {"batch_size": 6, "contenders": contenders}}
    return {"machine": describe(), "contenders": dict.fromkeys(contenders, ""), "workloads": workloads}


def timed(median, **more):
    spread = {"median": median, "low": median, "high": median, "rounds": 3}
    return {"ms": spread, "over_nonprivate": spread, **more}


@pytest.mark.usefixtures("tiny")
def test_it_prints_a_table_and_writes_every_figure(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (3.25, 0.0, 0.0))
    out = tmp_path / "new" / "bench.json"
    assert main(["--workloads", "tiny", *FEW, "--out", str(out)]) == 0
    printed, results = capsys.readouterr(), json.loads(out.read_text())
    assert "load average is 3.25" in printed.err
    assert printed.out.strip() == markdown(results)
    assert results["machine"]["threads"] == 1
    assert results["workloads"]["tiny"]["contenders"]["cached"]["nxbp_over"]["rounds"] >= 3
    assert in_words(results["machine"]) in printed.out
    assert results["commit"] == commit()
    assert out.with_suffix(".md").read_text() == full_markdown(results) + "\n"


def test_results_name_their_commit_and_nothing_outside_of_a_checkout(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    monkeypatch.setattr("ghostclip.bench.machine.__file__", str(tmp_path / "ghostclip" / "bench" / "machine.py"))
    assert commit() is None
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    clean = commit()
    assert re.fullmatch(r"[0-9a-f]{7,}", clean)
    for name in ("results.json", "ghostclip/code.py"):
        assert commit() == clean
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("new\n")
        subprocess.run([*git, "add", name], check=True)
    assert commit() == f"{clean}-dirty"
    row = timed(1.0)
    results = result(nonprivate={"ms": row["ms"]}, cached=row | {"correct": True})
    assert "Measured at" not in markdown(results)
    assert f"Measured at commit {clean}." in markdown(results | {"commit": clean})


@pytest.mark.usefixtures("tiny")
def test_ctrl_c_keeps_what_was_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(WORKLOADS, "second", TINY)
    done = iter([compare, KeyboardInterrupt])

    def interrupted(*arguments, **named):
        now = next(done)
        if now is KeyboardInterrupt:
            raise now
        return now(*arguments, **named)

    monkeypatch.setattr("ghostclip.cli.bench.compare", interrupted)
    status = main(["--workloads", "tiny,second", *FEW, "--out", str(tmp_path / "bench.json")])
    assert status == 130
    assert "1 workloads were measured" in capsys.readouterr().err
    assert list(json.loads((tmp_path / "bench.json").read_text())["workloads"]) == ["tiny"]


@pytest.mark.parametrize(
    "words",
    [
        ["--workloads", "mpl"], ["--contenders", ""], ["--seconds", "0"], ["--seconds", "soon"], ["--device", "cuda"],
        ["--threads", "0"], ["--memory", "none"], ["--batch-size", "-1"],
    ],
)  # fmt: skip
@pytest.mark.usefixtures("tiny")
def test_mistakes_end_with_status_2_and_one_line(words, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said, name, value = mistake(capsys, "bench", *words), words[0].strip("-"), words[1]
    assert name in said or name.replace("-", "_") in said
    assert repr(value) in said or f"got {value}" in said or value in ("", "cuda")


@pytest.mark.usefixtures("tiny")
def test_a_wrong_contender_of_ours_is_status_1_and_a_wrong_library_is_a_finding(monkeypatch, capsys):
    bad = Contender("cached", "", by_filling_gradients(broken))
    words = ["--workloads", "tiny", "--seconds", "0.01", "--contenders"]
    monkeypatch.setitem(CONTENDERS, "library", bad)
    assert main([*words, "library"]) == 0
    assert "tiny, library failed: RuntimeError: out of paper" in capsys.readouterr().out
    monkeypatch.setitem(CONTENDERS, "cached", bad)
    assert main([*words, "cached"]) == 1
    assert "- tiny, cached failed: RuntimeError: out of paper" in capsys.readouterr().out.splitlines()


def test_the_fastest_other_is_one_that_is_right():
    rows = result(nonprivate=timed(1.0), cached=timed(1.2, correct=True), vmap=timed(3.0, correct=True),
                  jax=timed(2.0, correct=False, gradient_error=0.5), fastdp={"missing": "not installed"})  # fmt: skip
    short, full = markdown(rows), full_markdown(rows)
    assert "| vmap 3.00 (3.00 to 3.00) |" in short
    assert "WRONG (off by 0.5)" in full
    assert "- tiny, fastdp missing: not installed" in short.splitlines()
