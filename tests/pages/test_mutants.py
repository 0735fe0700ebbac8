"""The tool that plants bugs, and the script that measures sensitivity: what they report can be believed."""

import json
import subprocess
import sys
from types import ModuleType

import pytest
from scripts import ran, script


@pytest.fixture
def tool() -> ModuleType:
    return script("mutants")


def test_the_table_fits_the_sources_and_bugs_have_names_of_their_own(tool):
    assert tool.stale(tool.table()) == []
    names = [mutant.name for mutant in tool.table()]
    assert len(set(names)) == len(names) >= 30


@pytest.mark.slow
def test_every_row_of_the_table_selects_tests(tool):
    rows = {mutant.name: list(mutant.tests) for mutant in tool.table()}
    selections = json.dumps([*rows.values(), ["tests/pages/test_mutants.py", "-k", "a_name_of_no_test"]])
    command = [sys.executable, "tests/support/selected_tests.py"]
    done = subprocess.run(command, cwd=tool.ROOT, input=selections, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *counts, nothing = json.loads(done.stdout)
    assert [name for name, count in zip(rows, counts, strict=True) if not count] == []
    assert nothing == 0


def test_the_published_table_is_complete(tool):
    """Every bug that is defined was planted and caught, by a test that is there and was asked."""
    results = tool.ROOT / "experiments" / "results"
    rows = json.loads((results / "mutants.json").read_text())
    assert [(row["name"], row["file"]) for row in rows] == [(mutant.name, mutant.file) for mutant in tool.table()]
    for row, mutant in zip(rows, tool.table(), strict=True):
        assert row["caught_by"] is not None, row["name"]
        file, _, test = row["caught_by"].partition("::")
        assert f"tests/{file}" in mutant.tests, row["name"]
        assert f"def {test.partition('[')[0]}(" in (tool.ROOT / "tests" / file).read_text(), row["name"]
    assert (results / "mutants.md").read_text() == tool.markdown(rows)


def test_a_source_text_that_is_gone_or_there_twice_is_noticed(tool, tmp_path):
    mutant = tool.table()[0]
    (tmp_path / mutant.file).parent.mkdir(parents=True)
    for text, found in ((mutant.source, []), ("", [mutant.name]), (2 * mutant.source, [mutant.name])):
        (tmp_path / mutant.file).write_text(text)
        assert tool.stale([mutant], tmp_path) == found


def test_tests_that_fail_without_a_bug_stop_it(tool, monkeypatch, tmp_path):
    monkeypatch.setattr(tool, "run", lambda folder, tests, *_: (1, "1 failed"))
    with pytest.raises(SystemExit, match="without any bug planted"):
        tool.check_baseline(tmp_path, tool.table()[:3])


def test_sensitivity_writes_figures_and_a_plot(tmp_path, monkeypatch):
    module = script("sensitivity")
    monkeypatch.setattr(module, "EXTREME", {})
    for name in module.ADVERSARIES.keys() - {"plain"}:
        monkeypatch.delitem(module.ADVERSARIES, name)
    results, page = ran(module, tmp_path, "--part", "0/1000000", "--dtypes", "float32")
    assert 0.999 < results["rows"][0]["ratio"] <= 1 + 1e-5
    assert "| Linear |" in page
    assert (tmp_path / "sensitivity.png").read_bytes().startswith(b"\x89PNG")
