"""The notebooks: each runs from top to bottom, and what is committed are outputs of such a run."""

import importlib.util
import re
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
SIZE = 400_000  # bytes, outputs included


def pictures(notebook: nbformat.NotebookNode) -> list[int]:
    """How many pictures each code cell shows."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [sum("image/png" in output.get("data", {}) for output in cell.outputs) for cell in cells]


def complaints(notebook: nbformat.NotebookNode) -> list[str]:
    """What the cells wrote to stderr, but for notices of slow work, and errors."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    lines = [line for each in outputs if each.get("name") == "stderr" for line in each.text.splitlines()]
    errors = [str(output) for output in outputs if output.output_type == "error"]
    return errors + [line for line in lines if not re.fullmatch(r"ghostclip: .*; this takes .*", line)]


def test_there_is_a_notebook():
    assert "quickstart.ipynb" in NOTEBOOKS


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs_and_shows_what_is_committed(name):
    spec = importlib.util.spec_from_file_location("execute", FOLDER / "execute.py")
    execute = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(execute)
    fresh = execute.executed(FOLDER / name)
    assert complaints(fresh) == []
    assert pictures(fresh) == pictures(nbformat.read(FOLDER / name, as_version=4))
    assert sum(pictures(fresh)) >= 3


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_is_committed_is_a_small_clean_run_from_top_to_bottom(name):
    text = (FOLDER / name).read_text()
    notebook = nbformat.read(FOLDER / name, as_version=4)
    nbformat.validate(notebook)
    assert len(text) < SIZE
    assert complaints(notebook) == []
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    words = re.sub(r'"image/png": "[^"]*"', "", text)
    assert not re.search(r"/(home|root|tmp|usr|work|Users)/", words)
