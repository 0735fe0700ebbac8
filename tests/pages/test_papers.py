"""The scripts behind published claims: they run in seconds, refuse wrong methods, and write pages from figures."""

import importlib
import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from ghostclip.bench import CONTENDERS, WORKLOADS, line_up, methods, reference, register

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
FIGURES = [
    "architectures",
    "batch",
    "depth",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("images", "large")),
]


@pytest.mark.parametrize("figure", FIGURES)
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


def test_the_paper_s_settings_are_known_workloads():
    register("experiments.papers.workloads")
    for figure in ("architectures", "batch", "depth", "large", "images"):
        module = script(f"lee_kifer_{figure}")
        for setting in (*module.FIGURE.small, *module.FIGURE.paper):
            assert setting.workload in WORKLOADS
    assert {setting.batch_size for setting in script("lee_kifer_large").FIGURE.paper} == {20}
    assert [setting.batch_size for setting in script("lee_kifer_batch").SMALL[:4]] == [16, 32, 64, 128]


@pytest.mark.parametrize(("name", "parameters"), [("mnist-cnn", 26_010), ("embedding-imdb", 160_098)])
def test_networks_have_the_published_sizes(name, parameters):
    register("experiments.papers.workloads")
    assert sum(p.numel() for p in WORKLOADS[name].model().parameters()) == parameters


def test_frozen_batch_norm_is_not_trained_and_mixes_no_examples():
    model = script("workloads").frozen_resnet(18)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert len(norms) == 20
    assert not any(norm.training or norm.weight.requires_grad for norm in norms)
    images = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(model(images)[:1], model(images[:1]), atol=1e-5, rtol=1e-4)


def test_a_wrong_method_gets_no_figure(monkeypatch):
    timing = script("timing")
    monkeypatch.setattr(reference, "GATE", 0.0)
    monkeypatch.setattr(reference, "SLACK", 0.0)
    with pytest.raises(SystemExit, match=r"MLP: wrong or broken: .*reweight"):
        timing.time_all([timing.Setting("MLP", "mlp", 4)], ("nonprivate", "reweight"), 0.01)


def test_a_process_of_its_own_knows_the_papers_workloads():
    timing = script("timing")
    register("experiments.papers.workloads")
    found = timing.time_all([timing.Setting("deep", "mlp-8-28px", 2)], ("nonprivate", "cached"), 0.01)
    assert found["deep"]["contenders"]["cached"]["correct"]


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


def test_what_fails_while_memory_is_measured_is_raised(monkeypatch):
    memory = script("memory")
    monkeypatch.setattr(memory, "ask", lambda task, **_: {"failed": f"KeyError: {task.contender!r}"})
    with pytest.raises(RuntimeError, match=r"unknown on mlp, batch 4: KeyError: 'unknown'"):
        memory.peak("mlp", "unknown", "cpu", 4)


def test_largest_batches_are_compared_with_non_private_training(tmp_path, monkeypatch):
    need = {"nonprivate": 100, "reweight": 110, "cached": 200}
    for module in (script("memory"), script("lee_kifer_memory")):
        monkeypatch.setattr(module, "peak", lambda name, contender, device, size: need[contender] * size)
    words = ["--workload", "mlp", "--usual", "128", "--contenders", "reweight", "cached", "authors-multiloss"]
    results, page = ran("lee_kifer_memory", words, tmp_path)
    batches = results["batches"]
    assert results["limit"] == 1.5 * 128 * 100
    assert batches["nonprivate"] == {"batch": 192, "share": 1.0}
    assert 0.86 < batches["reweight"]["share"] < 0.96
    assert 0.47 < batches["cached"]["share"] < 0.53
    assert batches["authors-multiloss"]["missing"].startswith("fastgc is not importable")
    assert "| reweight | 36 | 75% |" in page


def test_subramani_s_tables_are_written_of_what_was_timed(tmp_path, monkeypatch):
    module = script("subramani")
    monkeypatch.setattr(module, "CONTENDERS", ("nonprivate", "reweight", "cached", "jax"))
    monkeypatch.setattr(module, "PARTS", {"neither": None, "JIT": None, "VMAP": None, "both": None})
    monkeypatch.setattr(module, "TABLE_2", {"CNN": module.TABLE_2["CNN"]})
    results, page = ran("subramani", [*TINY, "--networks", "FCNN", "--memory"], tmp_path)
    assert results["settings"]["FCNN"]["contenders"]["cached"]["correct"]
    assert "| FCNN | 128 | 0.21 | 0.77 | 0.55 | 0.38 |" in page
    assert "| published: Opacus, of PyTorch | 1,920 (17.9%) | 10 (0.1%) |" in page


def test_opacus_s_figure_is_written_of_what_was_timed(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    results, page = ran("opacus_figure", [*TINY, "--networks", "MNIST CNN", "--sizes", "4"], tmp_path)
    assert results["settings"]["MNIST CNN, 4"]["contenders"]["reweight"]["correct"]
    assert "opacus-hooks: opacus is not installed" in page
    assert "the fastest is" not in page
    assert "fastest: opacus-hooks on 0, opacus-ghost on 0, jax on 0, nxbp on 1 of 1 settings" in page


def test_gram_and_direct_norms_are_timed_beside_the_planner_s_choice(tmp_path):
    results, page = ran("gram_or_direct", [*TINY, "--only", "linear, T = 16", "--no-memory"], tmp_path)
    (row,) = results["layers"].values()
    assert all(row["contenders"][way]["gradient_error"] < 1e-4 for way in ("gram", "direct", "auto"))
    assert results["choices"]["linear, T = 16"]["strategy"] in page
    assert "| linear, T = 16 | 512 | 65,536 | gram |" in page


LINEAR = """
import torch
class Linear(torch.nn.Linear):
    def forward(self, inputs):
        self.layer_input = inputs
        self.pre_activation = super().forward(inputs)
        return self.pre_activation
    def pe_grad_sqnorm(self, grads):
        scale = FACTOR * len(grads)
        return (scale * grads).square().sum(1) * (self.layer_input.square().sum(1) + 1)
"""
NET = """
import torch
class PeGradNet(torch.nn.Module):
    def pe_grad_norm(self, loss, batch_size, device):
        grads = torch.autograd.grad(loss, [layer.pre_activation for layer in self.layers], retain_graph=True)
        return sum(layer.pe_grad_sqnorm(grad) for layer, grad in zip(self.layers, grads)).sqrt()
"""


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_the_authors_code_is_checked_where_there_is_a_checkout(factor, tmp_path, monkeypatch):
    """By a package of the same interface, once with norms that are too small."""
    files = {"layers/linear.py": LINEAR.replace("FACTOR", str(factor)), "model/penet.py": NET,
             "layers/conv.py": "class Conv2d: pass"}  # fmt: skip
    for name, text in files.items():
        path = tmp_path / "fastgc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with mock.patch.dict(sys.modules):
        register("experiments.peers")
        names = ("nonprivate", "authors")
        found = line_up(WORKLOADS["mlp"], {name: CONTENDERS[name] for name in names}, batch_size=8)
        assert (found.errors["authors"] < found.gate) == (factor == 1.0)
        refused = line_up(WORKLOADS["transformer"], {name: CONTENDERS[name] for name in names}, batch_size=2)
        assert "no MultiheadAttention" in refused.absent["authors"]["missing"]


def test_without_a_checkout_nothing_is_said_of_the_authors_norms(tmp_path, capsys):
    assert script("lee_kifer_authors").main(["--out", str(tmp_path)]) == 0
    assert "nothing written: No module named 'fastgc'" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
