"""The documents and notebooks: their code runs and prints what they say, links exist, tables are the results'."""

import contextlib
import io
import json
import re
import shlex
import socket
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from documents import ROOT, blocks, run, text_of
from graphs import interpret
from scripts import script

from ghostclip import cli
from ghostclip.nn.base import LAYERS

DOCS = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", *DOCS]
NOTEBOOKS = ROOT / "notebooks"
# What `make test` leaves to `make test-all`: the pages that take longest, together four fifths of the time of all.
SLOW = {f"docs/{name}.md" for name in (
    "accelerate", "accounting", "audit", "checkpoints", "choosing_privately", "composed_clipping", "correlated_noise",
    "finetuning", "gpus", "huggingface", "index", "large_batches", "learning", "lightning", "monitoring", "observation",
    "per_layer_clipping", "private_mean", "several_processes", "training", "tutorial",
)}  # fmt: skip
# What a page is about and `make test` doesn't install.
NEEDS = {"docs/finetuning.md": "trl", "docs/lightning.md": "lightning", "docs/accelerate.md": "accelerate"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to run a page's code in, as the only process of a group where it asks for one; no graph is compiled."""
    monkeypatch.chdir(tmp_path)
    interpret(monkeypatch)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1], "RANK": 0, "WORLD_SIZE": 1}
    for name, value in address.items():
        monkeypatch.setenv(name, str(value))
    torch.manual_seed(0)
    if (accelerate := sys.modules.get("accelerate")) is not None:  # what other tests left in this process
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
    yield tmp_path
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_every_text_block_is_compared_with_what_code_prints():
    for page in PAGES:
        assert text_of(page).count("```text\n") == sum(expected is not None for _, expected in blocks(page)), page


WITH_CODE = [page for page in PAGES if "```python\n" in text_of(page)]


@pytest.fixture
def grid(page, request):
    """The coarse one for pages that take little time, which print the same digits of epsilon with it."""
    if page not in SLOW:
        request.getfixturevalue("coarse_losses")


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else []) for page in WITH_CODE]
)
@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")
@pytest.mark.usefixtures("declarations", "grid")
def test_the_code_of_a_page_runs_and_prints_what_it_says(page, folder):
    if page in NEEDS:
        pytest.importorskip(NEEDS[page])
    names = run(page)
    if page == "docs/own_layers.md":
        assert "Linear (declared)" in str(names["clipper"].explain())
    if page == "docs/tutorial.md":
        assert names["accuracy"] > 0.86  # 89 to 93% in twenty runs
    if page == "docs/clipping.md":  # what its comments say
        assert names["norms"].shape == (16,)
        assert {name: tuple(norm.shape) for name, norm in names["by_layer"].items()} == {"0": (16,), "3": (16,)}


def layers_of_torch() -> set[str]:
    """Names of the layers of torch.nn that have a rule."""
    public = {wrapper.__name__ for wrapper in LAYERS.values() if not wrapper.__name__.startswith("_")}
    return {name for name in public if hasattr(torch.nn, name)}


def test_every_layer_is_in_the_table_and_has_its_equation():
    section = text_of("docs/layers.md").partition("# Layers\n")[2].partition("\n## ")[0]
    named = {
        name for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert named == layers_of_torch()
    assert layers_of_torch() - set(re.findall(r"`(\w+)`", text_of("docs/equations.md"))) == set()


def widths(text: str) -> list[set[int]]:
    """The numbers of cells of the rows of each table; a bar in code or after a backslash parts no cells."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    tables = re.findall(r"(?:^[ ]*\|.*\n?)+", re.sub(r"`[^`\n]*`|\\\|", "", text), re.MULTILINE)
    return [{len(row.strip().strip("|").split("|")) for row in table.splitlines()} for table in tables]


def test_rows_of_tables_have_as_many_cells_as_their_headers():
    assert widths("| `a|b` | c \\| d |\n| --- | --- |\n| 1 | |\n\n| e |\n| --- |\n| 1 | 2 |\n") == [{2}, {1, 2}]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "experiments").rglob("*.md")]
    assert sum(len(widths(page.read_text())) for page in pages) > 100
    assert [page.name for page in pages if any(len(width) > 1 for width in widths(page.read_text()))] == []


def test_the_tables_of_figures_are_the_benchmark_s():
    module = script("readme_table")
    for page, tables in module.PAGES.items():
        assert module.with_table(text_of(page), tables()) == text_of(page)
    for work in (work for name in module.SPEED for work in module.read(name)["workloads"].values()):
        for name, row in work["contenders"].items():
            assert row.get("correct", True) or not re.match(r"reweight|cached|per-layer|compiled", name)


def test_what_the_demo_reaches_is_what_was_measured():
    module = script("demo_accuracy")
    results = json.loads((module.RESULTS / "demo_accuracy.json").read_text())
    assert f"median (range) of 20 runs:\n\n{module.table(results)}\n\n" in text_of("README.md")
    assert [module.spread(row)[-1] for row in results["trainings"].values()] == [20] * 10
    assert (module.RESULTS / "demo_accuracy.md").read_text() == module.markdown(results)


def anchors(document: Path) -> set[str]:
    """As GitHub makes them of the words of headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_lead_somewhere(document):
    place = ROOT / document
    for path, _, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)(#?)([^)]*)\)", place.read_text()):
        target = (place.parent / path) if path else place
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def test_every_page_is_linked_to_and_in_the_navigation_of_the_site():
    """Pages of a folder are linked to by the folder's first page, which the README links to."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    for page in DOCS:
        first = str(Path(page).parent / "index.md")
        listed = page in (first, f"docs/{Path(page).name}")
        assert (f"]({page})" in text_of("README.md")) if listed else (f"]({Path(page).name})" in text_of(first)), page
        assert re.search(rf"\b{re.escape(page.removeprefix('docs/'))}$", navigation, re.MULTILINE), page


def test_commands_their_options_and_make_targets_exist():
    """On lines of their own, and within a sentence: `ghostclip train --checkpoint DIR`."""
    shown = [line for page in PAGES for line in re.findall(r"^    ghostclip (.+)$", text_of(page), re.MULTILINE)]
    assert {shlex.split(line)[0] for line in shown} == set(cli.COMMANDS)
    for line in shown:
        assert callable(cli._parser().parse_args(shlex.split(line)).run), line
    for page in PAGES:
        for command, rest in re.findall(r"`ghostclip (\w+)([^`]*)`", text_of(page)):
            with contextlib.redirect_stdout(io.StringIO()) as help_text:
                assert cli.main([command, "--help"]) == 0, page
            for option in re.findall(r"--[a-z-]+", rest):
                assert option in help_text.getvalue(), (page, command, option)
        for name in re.findall(r"(?:^    |`)make ([a-z-]+)", text_of(page), re.MULTILINE):
            assert re.search(rf"^{name}:", text_of("Makefile"), re.MULTILINE), (page, name)


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


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in NOTEBOOKS.glob("*.ipynb")))
def test_a_notebook_runs_and_shows_what_is_committed(name):
    fresh = script("../notebooks/execute").executed(NOTEBOOKS / name)
    assert complaints(fresh) == []
    assert pictures(fresh) == pictures(nbformat.read(NOTEBOOKS / name, as_version=4))
    assert sum(pictures(fresh)) >= 3


@pytest.mark.parametrize("name", sorted(path.name for path in NOTEBOOKS.glob("*.ipynb")))
def test_a_committed_notebook_is_a_small_clean_run_from_top_to_bottom(name):
    text = (NOTEBOOKS / name).read_text()
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    nbformat.validate(notebook)
    assert len(text) < 400_000  # bytes, outputs included
    assert complaints(notebook) == []
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    words = re.sub(r'"image/png": "[^"]*"', "", text)
    assert not re.search(r"/(home|root|tmp|usr|work|Users)/", words)
