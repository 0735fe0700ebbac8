"""The scripts behind published claims: they run in seconds, refuse wrong methods, and write pages from figures."""

import importlib
import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from ghostclip.bench import CONTENDERS, WORKLOADS, methods, reference

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "papers" / "results"


@pytest.fixture(autouse=True)
def papers(monkeypatch):
    """`experiments` can be imported; what scripts register is forgotten afterwards."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr("os.getloadavg", lambda: (0.1, 0.0, 0.0))
    monkeypatch.setattr(methods, "MODULES", [])
    with mock.patch.dict(CONTENDERS), mock.patch.dict(WORKLOADS):
        yield


def script(name):
    return importlib.import_module(f"experiments.papers.{name}")


def write(name, results, folder):
    """A script's page of these results, without its plot."""
    module = script(name)
    writer = script("lee_kifer") if hasattr(module, "FIGURE") else module
    with mock.patch.object(writer, "plot", create=True):
        writer.write(*([module.FIGURE] if hasattr(module, "FIGURE") else []), results, folder)
    return (folder / f"{name}.md").read_text()


def ran(name, words, folder):
    """The figures of a tiny run, after its page was compared with what they make."""
    torch.manual_seed(0)
    assert script(name).main([*words, "--out", str(folder)]) == 0
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    page, results = (folder / f"{name}.md").read_text(), json.loads((folder / f"{name}.json").read_text())
    assert write(name, results, folder) == page
    return results, page


def published():
    return sorted(path.stem for path in RESULTS.glob("*.json"))


@pytest.mark.parametrize("name", published())
def test_a_published_page_is_what_the_script_makes_of_its_figures(name, tmp_path):
    assert (
        write(name, json.loads((RESULTS / f"{name}.json").read_text()), tmp_path)
        == (RESULTS / f"{name}.md").read_text()
    )


def test_the_list_of_claims_has_every_script_and_what_came_of_it():
    index = script("index")
    names = [name for name, _ in index.scripts()]
    assert set(published()) <= set(names)
    assert {"epsilons", "lee_kifer_depth", "subramani"} <= set(names)
    assert "index" not in names
    page = (RESULTS / "README.md").read_text()
    for name in published():
        found = json.loads((RESULTS / f"{name}.json").read_text()).get("finding", "see the page")
        assert f"[{name}.py](../{name}.py) | [{name}.md]({name}.md) | {found} |" in page


TINY = ["--seconds", "0.05"]


@pytest.mark.parametrize("figure", ["architectures", "batch", "depth", "images", "large"])
@pytest.mark.slow
def test_a_figure_of_lee_and_kifer_is_timed_and_written(figure, tmp_path):
    results, page = ran(f"lee_kifer_{figure}", [*TINY, "--first", "1"], tmp_path)
    ((label, row),) = results["settings"].items()
    found = row["contenders"]
    for name in ("nxbp", "multiloss", "reweight", "cached"):
        assert found[name]["correct"]
        assert found[name]["over_nonprivate"]["rounds"] >= 3
    assert found["reweight"]["nxbp_over"]["median"] > 0
    assert f"| {label} | {row['batch_size']} |" in page
    assert "authors: fastgc is not importable" in page


def test_a_wrong_method_gets_no_figure(monkeypatch):
    timing = script("timing")
    monkeypatch.setattr(reference, "GATE", 0.0)
    monkeypatch.setattr(reference, "SLACK", 0.0)
    with pytest.raises(SystemExit, match=r"MLP: wrong or broken: .*reweight"):
        timing.time_all([timing.Setting("MLP", "mlp", 4)], ("nonprivate", "reweight"), 0.01)


@pytest.mark.parametrize("fixed", [0, 300])
@pytest.mark.parametrize(("most", "start"), [(1000, 16), (1000, 4000), (7, 3), (1, 8), (0, 8)])
def test_the_largest_batch_is_found_to_within_five_percent(most, start, fixed):
    asked = []

    def need(size):
        asked.append(size)
        return fixed + 10 * size

    found = script("memory").largest_batch(need, fixed + 10 * most + 9, start)
    assert most / 1.05 - 1 < found <= most
    assert len(asked) == len(set(asked)) < 8
