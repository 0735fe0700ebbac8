"""The scripts behind published figures run, in a setting that takes seconds, and write what they say."""

import json
import re

import pytest
from scripts import ROOT, script

from ghostclip.native import library

needs_compiler = pytest.mark.skipif(library("gram") is None, reason="no C compiler here")


def test_the_readme_table_needs_its_markers():
    with pytest.raises(ValueError, match="expected one line"):
        script("readme_table").with_table("no table here", "a table")


@pytest.mark.slow
def test_end_to_end_writes_a_row_for_each_setting(tmp_path, monkeypatch):
    module = script("end_to_end")
    monkeypatch.setattr(module, "EXAMPLES", 40)
    monkeypatch.setattr(module, "SETTINGS", {"default": (20, False)})
    module.main(["--models", "mlp", "--epochs", "2", "--out", str(tmp_path)])
    (row,) = json.loads((tmp_path / "end_to_end.json").read_text())["rows"]
    assert 0 < row["lowest"] <= row["over_plain"] <= row["highest"]
    assert row["epsilon_seconds"] > 0
    assert "\n| mlp | 20 | " in (tmp_path / "end_to_end.md").read_text()


def test_tables_that_are_older_than_what_a_step_runs_are_refused(tmp_path, monkeypatch, capsys):
    module = script("readme_table")
    page = tmp_path / "README.md"
    page.write_text(f"{module.START}\n{module.END}")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "PAGES", {"README.md": lambda: "a table"})
    later = ["2222222 Sum twice", "1111111 Measure faster"]
    monkeypatch.setattr(module, "changed_since", lambda commit: later)
    assert module.main([]) == 1
    said = capsys.readouterr().err
    assert "before '1111111 Measure faster' and 1 more commits" in said
    assert said.endswith("run make bench first\n")
    assert "a table" not in page.read_text()
    later.clear()
    assert module.main([]) == 0
    assert "a table" in page.read_text()


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


def test_learning_repeats_a_setting_and_tables_are_the_results(tmp_path, monkeypatch):
    module = script("learning")
    monkeypatch.setattr(module, "SETTINGS", {"cnn": module.Setting("CNN", 512, 1, width=0)})
    monkeypatch.setattr(module, "noise_for", lambda batch, epochs: 2.0)
    assert module.main(["--runs", "1", "--out", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "learning.json").read_text())["settings"].values()
    (run,) = row["runs"]
    assert run["noise_norm"] == pytest.approx(2.0 * 6090**0.5 / 512)
    assert run["snr"] > 0
    assert 0 <= run["accuracy"] <= 1
    results = json.loads((module.RESULTS / "learning.json").read_text())
    assert (module.RESULTS / "learning.md").read_text() == module.markdown(results)
    rows = [line for line in module.markdown(results).splitlines() if line.startswith("|")]
    assert "\n".join(rows) in (ROOT / "docs" / "learning.md").read_text()
