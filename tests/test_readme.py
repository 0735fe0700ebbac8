"""The documents: their code runs, in order, and their tables say what the package does."""

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_experiments import script

import ghostclip
from ghostclip.bench import markdown
from ghostclip.nn.base import LAYERS

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document: str) -> Iterator[Any]:
    """The Python blocks of a document, compiled so that errors name its lines."""
    text = (ROOT / document).read_text()
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start(1))
        yield compile("\n" * line + found.group(1), document, "exec")


def run(document: str) -> dict[str, Any]:
    """All Python blocks of a document in one namespace, which is returned."""
    namespace: dict[str, Any] = {"__name__": document}
    for block in blocks(document):
        exec(block, namespace)
    return namespace


@pytest.fixture(scope="module")
def readme() -> tuple[dict[str, Any], str]:
    """The names README.md's code leaves behind, and what it printed."""
    torch.manual_seed(0)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        names = run("README.md")
    return names, printed.getvalue()


def test_the_readme_runs_and_spends_what_it_says(readme):
    names, printed = readme
    assert re.search(r"^epsilon [012]\.\d\d at delta 1e-5$", printed, re.MULTILINE)
    assert "BatchNorm2d" in printed
    assert 2.9 < names["engine"].epsilon() <= 3.0
    with pytest.raises(ghostclip.BudgetExceededError):
        names["engine"].step(next(iter(names["engine"].batches())), names["loss_fn"])


def test_the_readme_names_shapes_as_they_are(readme):
    names, _ = readme
    assert names["norms"].shape == (16,)
    assert {name: tuple(norm.shape) for name, norm in names["by_layer"].items()} == {"0": (16,), "3": (16,)}
    assert names["each"]["0.weight"].shape == (16, 4, 1, 3, 3)


def test_the_worked_example_of_a_layer_is_exact():
    before = dict(LAYERS)
    try:
        names = run("CONTRIBUTING.md")
        model = torch.nn.Sequential(names["Scale"](3)).double()
        clipper = ghostclip.GhostClipper(model)
        inputs = torch.randn(4, 2, 3, dtype=torch.float64)
        found = clipper.per_example_grads(model(inputs).square().sum((1, 2)) / 2)
        torch.testing.assert_close(found["0.weight"], inputs.square().sum(1))
    finally:
        LAYERS.clear()
        LAYERS.update(before)


@pytest.mark.usefixtures("declarations")
def test_the_page_on_own_layers_runs(capsys):
    names = run("docs/own_layers.md")
    assert "Linear (declared)" in capsys.readouterr().out
    assert names["result"].norms.shape == (32,)


def test_the_table_of_layers_is_complete():
    section = (ROOT / "README.md").read_text().partition("## Layers\n")[2].partition("\n## ")[0]
    named = {
        name for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    public = {wrapper.__name__ for wrapper in LAYERS.values() if not wrapper.__name__.startswith("_")}
    assert named == {name for name in public if hasattr(torch.nn, name)}


def test_the_table_of_figures_is_the_benchmark_s():
    text = (ROOT / "README.md").read_text()
    module = script("readme_table")
    assert module.with_table(text) == text
    results = json.loads(module.RESULTS.read_text())
    assert markdown(results) in text
    assert all(row.get("correct", True) for w in results["workloads"].values() for row in w["contenders"].values())


def test_what_the_demo_reaches_is_what_was_measured():
    module = script("demo_accuracy")
    results = json.loads((module.RESULTS / "demo_accuracy.json").read_text())
    said = " ".join((ROOT / "README.md").read_text().split())
    assert f"median and range of 20 runs: {module.sentence(results)}." in said
    assert [module.spread(row)[-1] for row in results["trainings"].values()] == [20] * 4
    assert (module.RESULTS / "demo_accuracy.md").read_text() == module.markdown(results)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/own_layers.md"])
def test_links_lead_somewhere(document):
    links = re.findall(r"\]\((?!https?://)([^)#]+)\)", (ROOT / document).read_text())
    assert [link for link in links if not (ROOT / document).parent.joinpath(link).exists()] == []


def test_the_readme_s_commands_exist():
    from ghostclip.cli import COMMANDS

    words = re.findall(r"^    ghostclip (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert words == list(COMMANDS)
    targets = (ROOT / "Makefile").read_text()
    for name in re.findall(r"(?:^    |`)make ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE):
        assert re.search(rf"^{name}:", targets, re.MULTILINE), name
