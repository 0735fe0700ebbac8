"""The scripts behind published figures run, in a setting that takes seconds, and write what they say."""

import importlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

compare = importlib.import_module("ghostclip.bench.compare")  # the package has a function of this name too
ROOT = Path(__file__).resolve().parents[1]


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
    monkeypatch.setattr(compare, "GATE", 0.0)
    monkeypatch.setattr(compare, "SLACK", 0.0)
    with pytest.raises(SystemExit, match=r"mlp: nxbp, .*cached clipped wrongly"):
        module.time_network("mlp", 32, 0.1)


def test_the_readme_table_needs_its_markers():
    with pytest.raises(ValueError, match="expected one line"):
        script("readme_table").with_table("no table here")
