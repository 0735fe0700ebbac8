"""The scripts behind published figures run, in a setting that takes seconds, and write what they say."""

import importlib
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from ghostclip.bench import reference
from ghostclip.native import library

ROOT = Path(__file__).resolve().parents[1]
needs_compiler = pytest.mark.skipif(library("gram") is None, reason="no C compiler here")


def script(name: str) -> ModuleType:
    """A script of the experiments folder as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "experiments" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_architectures_writes_figures_and_a_plot(tmp_path, capsys):
    words = ["--networks", "mlp", "--examples", "40", "--seconds", "0.1", "--out", str(tmp_path)]
    assert script("architectures").main(words) == 0
    results = json.loads((tmp_path / "architectures.json").read_text())
    methods = results["networks"]["mlp"]["methods"]
    assert list(methods) == ["nonprivate", "nxbp", "multiloss", "reweight", "cached"]
    assert all(row["seconds_per_epoch"]["rounds"] >= 3 for row in methods.values())
    assert methods["cached"]["gradient_error"] < 1e-4
    assert results["examples"] == 40
    assert (tmp_path / "architectures.png").read_bytes().startswith(b"\x89PNG")
    assert "mlp nonprivate 1.00x, nxbp" in capsys.readouterr().out


def test_an_epoch_sees_every_example_once():
    module, seen = script("architectures"), []
    workload = module.WORKLOADS["mlp"]
    step = module.Prepared(lambda inputs, targets: seen.append(inputs), None)
    module.epoch_of(step, workload, 70)()
    assert [len(inputs) for inputs in seen] == [32, 32, 6]
    assert len({tuple(row.flatten().tolist()) for inputs in seen for row in inputs}) == 70


def test_a_wrong_method_gets_no_figure(monkeypatch):
    module = script("architectures")
    monkeypatch.setattr(reference, "GATE", 0.0)
    monkeypatch.setattr(reference, "SLACK", 0.0)
    with pytest.raises(SystemExit, match=r"mlp: nxbp, .*cached clipped wrongly"):
        module.time_network("mlp", 32, 0.1)


def test_the_readme_table_needs_its_markers():
    with pytest.raises(ValueError, match="expected one line"):
        script("readme_table").with_table("no table here", "a table")


@pytest.mark.slow
def test_growth_writes_figures_and_a_plot(tmp_path):
    words = ["--seconds", "0.05", "--model-seconds", "0.05", "--batches", "2", "8", "--lengths", "4", "16"]
    words += ["--model-lengths", "8"]
    assert script("growth").main([*words, "--workloads", "mlp", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "growth.json").read_text())
    assert [row["batch_size"] for row in results["batches"]["mlp"]] == [2, 8]
    assert [set(row["ms"]) for row in results["lengths"]] == [{"gram", "direct", "auto", "plain"}] * 2
    assert all(spread["median"] > 0 for row in results["models"] for spread in row["over_nonprivate"].values())
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


def test_end_to_end_writes_a_row_for_each_setting(tmp_path, monkeypatch):
    module = script("end_to_end")
    monkeypatch.setattr(module, "EXAMPLES", 40)
    monkeypatch.setattr(module, "SETTINGS", {"default": (20, False)})
    module.main(["--models", "mlp", "--epochs", "2", "--out", str(tmp_path)])
    (row,) = json.loads((tmp_path / "end_to_end.json").read_text())["rows"]
    assert 0 < row["lowest"] <= row["over_plain"] <= row["highest"]
    assert row["epsilon_seconds"] > 0
    assert "\n| mlp | 20 | " in (tmp_path / "end_to_end.md").read_text()


def test_doubling_is_two_where_time_is_linear():
    module = script("growth")
    rows = [{"batch_size": b, "ms": {m: {"median": 3.0 * b} for m in module.METHODS}} for b in (2, 8, 16)]
    assert module.doubling(rows)["cached"] == pytest.approx([2.0, 2.0])


def test_largest_batch_is_compared_with_non_private_training(tmp_path, monkeypatch, capsys):
    module = script("largest_batch")
    need = {"nonprivate": 100, "reweight": 110, "cached": 200}
    monkeypatch.setattr(module, "peak", lambda workload, contender, size: need[contender] * size)
    words = ["--workloads", "mlp", "--contenders", "reweight", "cached", "--out", str(tmp_path)]
    assert module.main(words) == 0
    found = json.loads((tmp_path / "largest_batch.json").read_text())["workloads"]["mlp"]
    assert found["limit_bytes"] == 4 * 128 * 100
    assert 0.86 < found["over_nonprivate"]["reweight"] < 0.96
    assert 0.47 < found["over_nonprivate"]["cached"] < 0.53


@pytest.mark.parametrize(("limit", "start"), [(1000, 16), (1000, 4000), (7, 3), (1, 8), (0, 8)])
def test_the_largest_batch_is_found_to_within_five_percent(limit, start):
    asked = []

    def fits(size):
        asked.append(size)
        return size <= limit

    found = script("largest_batch").largest_batch(fits, start)
    assert limit / 1.05 - 1 < found <= limit
    assert len(asked) == len(set(asked)) < 16


def test_what_fails_while_memory_is_measured_is_raised(monkeypatch):
    module = script("largest_batch")
    monkeypatch.setattr(module, "ask", lambda task, steps: {"failed": f"KeyError: {task.contender!r}"})
    with pytest.raises(RuntimeError, match=r"unknown on mlp, batch 4: KeyError: 'unknown'"):
        module.peak("mlp", "unknown", 4)


def test_the_pages_tables_are_those_of_the_files_there(tmp_path):
    module = script("readme_table")
    (tmp_path / "bench.json").write_text((module.RESULTS / "bench.json").read_text())
    one = module.speed_tables(tmp_path)
    (tmp_path / "bench-two-threads.json").write_text((module.RESULTS / "bench-two-threads.json").read_text())
    two = module.speed_tables(tmp_path)
    assert one.startswith("## Networks\n")
    assert two.startswith(one)
    assert one.count("\n| gpt-128 |") == 3  # what it is, its time, its memory
    assert "## Two threads" in two.removeprefix(one)
    page = module.with_table(f"before\n{module.START}\nold\n{module.END}\nafter", two)
    assert page == f"before\n{module.START}\n\n{two}\n\n{module.END}\nafter"


def test_the_short_table_has_six_networks_beside_opacus(tmp_path):
    module = script("readme_table")
    results = module.read(module.PEERS)
    found = results["workloads"]["cnn"]["contenders"]
    for number, name in enumerate(module.COLUMNS, 1):
        found[name]["over_nonprivate"]["median"] = number + 0.126
    (tmp_path / module.PEERS).write_text(json.dumps(results | {"commit": "abc1234"}))
    lines = module.short_table(tmp_path).splitlines()
    assert len([line for line in lines if line.startswith("|")]) == 2 + 6
    assert lines[2].endswith("| 1.13 | 2.13 | 3.13 | 4.13 |")
    assert "at commit abc1234 on" in lines[-1]


@pytest.mark.slow
def test_demo_accuracy_repeats_what_make_demo_runs(tmp_path):
    module = script("demo_accuracy")
    assert module.main(["--only", "non-private", "--seeds", "2", "--repeats", "1", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "demo_accuracy.json").read_text())["trainings"]
    assert list(found) == ["non-private"]
    median, low, high, count = module.spread(found["non-private"])
    assert count == 2
    assert 0.95 < low <= median <= high <= 1.0
    assert f"| non-private | none | 690 | 2 | {median:.1%} |" in (tmp_path / "demo_accuracy.md").read_text()


@needs_compiler
def test_kernels_are_timed_beside_their_twins(tmp_path):
    module = script("kernels")
    words = ["--kernels", "rows of tables", "noise", "--workloads", "mlp", "--seconds", "0"]
    assert module.main([*words, "--batch-size", "4", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert [(row["file"], row["workload"], row["batch_size"]) for row in rows] == [
        ("native/rows.c", "mlp", 4),
        ("native/normal.c", "mlp", 4),
    ]
    assert all(row["ratio"]["rounds"] >= 3 and row["ratio"]["median"] > 0 for row in rows)
    assert "| noise | `native/normal.c` |" in (tmp_path / "kernels.md").read_text()


def test_every_c_function_that_python_calls_is_timed():
    module = script("kernels")
    folder = ROOT / "ghostclip" / "native"
    assert {kernel.file for kernel in module.KERNELS} | set(module.OTHERS) == {path.stem for path in folder.glob("*.c")}
    timed = {name for kernel in module.KERNELS for name in kernel.functions}
    helpers = {"padded", "pack", "pack_gates", "ghostclip_lanes"}
    for file in {kernel.file for kernel in module.KERNELS}:
        text = (folder / f"{file}.c").read_text()
        exported = set(re.findall(r"^(?:int|void|long|u?int64_t) (?:NAME\()?(\w+)\)?\(", text, re.MULTILINE))
        assert exported
        assert exported <= timed | helpers


def asked(kernel):
    """What a kernel's binding finds."""
    return kernel.binding.library(kernel.file)


@needs_compiler
def test_without_a_kernel_its_binding_says_so():
    module = script("kernels")
    for kernel in module.KERNELS:
        before = asked(kernel)
        with module.without(kernel):
            assert asked(kernel) is None
        assert asked(kernel) is before
        assert before is not None


def test_the_table_has_the_workload_that_gains_most():
    rows = [
        {"kernel": kernel, "workload": workload, "ratio": {"median": ratio}}
        for kernel, workload, ratio in (("a", "mlp", 0.97), ("b", "cnn", 1.0), ("a", "cnn", 0.8), ("a", "rnn", 0.9))
    ]
    assert [row["workload"] for row in script("kernels").best(rows)] == ["cnn", "cnn"]
