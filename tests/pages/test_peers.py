"""Other libraries as contenders: what is installed passes the gate, what isn't is reported."""

import json
from pathlib import Path

import pytest
import torch
from tiny_bench import TINY

from ghostclip.bench import BASELINE, CONTENDERS, WORKLOADS, line_up, methods

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = {"opacus-ghost": "opacus", "fastdp": "fastDP", "jax": "jax", "opake": "opake"}


@pytest.fixture
def main(monkeypatch):
    """The command, with what it registers forgotten afterwards."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr("os.getloadavg", lambda: (0.1, 0.0, 0.0))
    monkeypatch.setattr(methods, "MODULES", [])
    monkeypatch.setattr("ghostclip.cli.bench.keep_freed_memory", lambda: None)
    before = {**CONTENDERS, **WORKLOADS}
    from experiments.peers.__main__ import main

    yield main
    for known in (CONTENDERS, WORKLOADS):
        for name in set(known) - set(before):
            del known[name]


def test_peers_are_timed_and_absent_libraries_are_reported(main, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = ["--workloads", "mlp", "--batch-size", "4", "--seconds", "0.05", "--json", "--contenders"]
    assert main([*words, "nonprivate,cached,vmap,opacus-ghost,fastdp,jax,opake"]) == 0
    results = json.loads(capsys.readouterr().out)
    rows = results["workloads"]["mlp"]["contenders"]
    assert rows["vmap"]["correct"]
    assert rows["vmap"]["over_nonprivate"]["rounds"] >= 3
    for name, library in LIBRARIES.items():
        assert rows[name]["missing"].startswith(f"{library} is not installed; ")


def test_every_library_that_is_there_passes_the_gate(main):
    main.__globals__["register"]("experiments.peers")
    theirs = {
        name: CONTENDERS[name] for name in (BASELINE, "vmap", "opacus-hooks", "opacus-ghost", "fastdp", "jax", "opake")
    }
    found = line_up(TINY, theirs)
    assert found.errors.pop(BASELINE) is None
    assert "vmap" in found.errors
    assert all(error < 1e-5 for error in found.errors.values())
    assert all(set(why) == {"missing"} for why in found.absent.values())


@pytest.mark.parametrize(("name", "outputs"), [("hf-gpt2", 128 * 10_000), ("hf-llama", 128 * 10_000), ("hf-bert", 2)])
def test_models_that_people_fine_tune_are_workloads(main, name, outputs):
    main.__globals__["register"]("experiments.peers")
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
