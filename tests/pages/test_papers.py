"""The scripts behind published claims, which write pages from figures, and other libraries as contenders."""

import importlib
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from tiny_bench import TINY
from torch.utils.data import Subset

from experiments.papers.paired import Hypothesis, Interval, interval
from experiments.papers.training import Setting, engine_for, losses_of
from ghostclip import datasets
from ghostclip.bench import BASELINE, CONTENDERS, WORKLOADS, line_up, methods, reference
from ghostclip.clipping import ByLayer, Composed, Flat, Quantiles
from ghostclip.models import CNN

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
    results = json.loads((RESULTS / f"{name}.json").read_text())
    assert write(name, results, tmp_path) == (RESULTS / f"{name}.md").read_text()


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


QUICK = ["--seconds", "0.05"]


@pytest.mark.parametrize("figure", ["architectures", "batch", "depth", "images", "large"])
@pytest.mark.slow
def test_a_figure_of_lee_and_kifer_is_timed_and_written(figure, tmp_path):
    results, page = ran(f"lee_kifer_{figure}", [*QUICK, "--first", "1"], tmp_path)
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


@pytest.mark.parametrize("policy", [lambda: Flat(1.0), lambda: Composed(ByLayer(), Quantiles(1.0, count_noise=3.0))])
@pytest.mark.slow
def test_reused_noise_spends_the_target(policy):
    examples = Subset(datasets.digits().train, range(64))
    setting = Setting(policy, 0.1, epochs=2, batch_size=16)
    engines = [engine_for(setting, CNN((1, 8, 8), 10), examples, seed=None) for _ in range(2)]
    assert engines[0].noise_multiplier == engines[1].noise_multiplier
    assert engines[1].target_epsilon is None
    for _ in range(setting.epochs):
        for batch in engines[1].batches():
            engines[1].step(batch, losses_of)
    assert 0.99 * setting.target_epsilon < engines[1].epsilon() <= setting.target_epsilon


@pytest.mark.parametrize(
    ("claim", "low", "high", "expected"),
    [
        ("better", 0.001, 0.02, "supported"),
        ("better", -0.01, 0.02, "not supported"),
        ("better", -0.02, -0.001, "opposite"),
        ("worse", -0.02, -0.001, "supported"),
        ("worse", -0.02, 0.001, "not supported"),
        ("worse", 0.001, 0.02, "opposite"),
        ("as good", -0.009, 0.02, "supported"),
        ("as good", -0.011, 0.02, "not supported"),
        ("as good", -0.009, -0.001, "opposite"),
    ],
)
def test_outcomes_follow_from_the_interval(claim, low, high, expected):
    assert Hypothesis("a", "b", claim, "").outcome(Interval((low + high) / 2, low, high)) == expected


def test_the_interval_is_student_s():
    assert interval([0.0, 1.0, 2.0]) == pytest.approx((1.0, 1 - 4.30265 / 3**0.5, 1 + 4.30265 / 3**0.5), rel=1e-5)
    assert interval([0.5, 0.5]) == (0.5, 0.5, 0.5)


@pytest.fixture
def peers(monkeypatch):
    """The benchmark's command with other libraries; what is installed is timed, what isn't is reported."""
    monkeypatch.setattr("ghostclip.cli.bench.keep_freed_memory", lambda: None)
    return importlib.import_module("experiments.peers.__main__")


def test_peers_are_timed_and_absent_libraries_are_reported(peers, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = ["--workloads", "mlp", "--batch-size", "4", "--seconds", "0.05", "--json", "--contenders"]
    assert peers.main([*words, "nonprivate,cached,vmap,opacus-ghost,fastdp,jax,opake"]) == 0
    results = json.loads(capsys.readouterr().out)
    rows = results["workloads"]["mlp"]["contenders"]
    assert rows["vmap"]["correct"]
    assert rows["vmap"]["over_nonprivate"]["rounds"] >= 3
    libraries = {"opacus-ghost": "opacus", "fastdp": "fastDP", "jax": "jax", "opake": "opake"}
    for name, library in libraries.items():
        assert rows[name]["missing"].startswith(f"{library} is not installed; ")


def test_every_library_that_is_there_passes_the_gate(peers):
    peers.register("experiments.peers")
    theirs = (BASELINE, "vmap", "opacus-hooks", "opacus-ghost", "fastdp", "jax", "opake")
    found = line_up(TINY, {name: CONTENDERS[name] for name in theirs})
    assert found.errors.pop(BASELINE) is None
    assert "vmap" in found.errors
    assert all(error < 1e-5 for error in found.errors.values())
    assert all(set(why) == {"missing"} for why in found.absent.values())


@pytest.mark.parametrize(("name", "outputs"), [("hf-gpt2", 128 * 10_000), ("hf-llama", 128 * 10_000), ("hf-bert", 2)])
def test_models_that_people_fine_tune_are_workloads(peers, name, outputs):
    peers.register("experiments.peers")
    work = WORKLOADS[name]
    model, inputs, targets = work.on("cpu", 2)
    found = model(inputs)
    assert found[0].numel() == outputs
    assert work.losses(found, targets).shape == (2,)
    # Padding isn't attended to.
    if name == "hf-bert":
        assert (inputs[0] != 0).all()
        shorter = inputs[1:, : int((inputs[1] != 0).sum())]
        assert torch.allclose(model(shorter), found[1:], rtol=1e-4, atol=1e-5)
