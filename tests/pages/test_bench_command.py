"""The benchmark as a command: what it prints and writes, what mistakes and Ctrl-C end in."""

import json
import re
import subprocess

import pytest
from tiny_bench import TINY, broken

from ghostclip import cli
from ghostclip.bench import CONTENDERS, WORKLOADS, Contender, compare, machine, markdown
from ghostclip.bench.contenders import by_filling_gradients
from ghostclip.bench.machine import commit, describe, in_words
from ghostclip.bench.table import full_markdown

FEW = ["--contenders", "reweight,cached,nxbp", "--seconds", "0.05"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """A workload of milliseconds, and a quiet machine."""
    monkeypatch.setitem(WORKLOADS, "tiny", TINY)
    monkeypatch.setattr("os.getloadavg", lambda: (0.1, 0.0, 0.0))
    # Of this process, in which other tests look at memory.
    monkeypatch.setattr("ghostclip.cli.bench.keep_freed_memory", lambda: None)


def main(words):
    return cli.main(["bench", *words])


def result(**contenders):
    """A result of the command with these rows."""
    about = dict.fromkeys(contenders, "")
    return {
        "machine": describe(),
        "contenders": about,
        "workloads": {"tiny": {"batch_size": 6, "contenders": contenders}},
    }


def timed(median, **more):
    spread = {"median": median, "low": median, "high": median, "rounds": 3}
    return {"ms": spread, "over_nonprivate": spread, **more}


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
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "ghostclip" / "bench" / "machine.py"))
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
def test_mistakes_end_with_status_2_and_one_line(words, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("ghostclip: ")
    name, value = words[0].strip("-"), words[1]
    assert name in shown.err or name.replace("-", "_") in shown.err
    assert repr(value) in shown.err or f"got {value}" in shown.err or value in ("", "cuda")
    assert shown.err.count("\n") == 1


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
