"""Hardened noise in the engine: fresh keys, one draw a step, the same law, and reports that say so."""

import copy
import json
import multiprocessing
import os
import pickle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import private_runs as runs
import pytest
import torch
from scipy import stats

from ghostclip.cli import main
from ghostclip.cli.summary import run_table
from ghostclip.noise import noise_source
from ghostclip.noise.hardened import Lattice
from ghostclip.report import TrainingRun

# A false alarm once in a million runs for each p-value.
RARE = 1e-6


def test_every_release_has_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    entropy, asked = os.urandom, []
    monkeypatch.setattr("os.urandom", lambda count: asked.append(entropy(count)) or asked[-1])
    source, zeros = noise_source("hardened"), torch.zeros(100)
    asked.clear()
    drawn = [source.release([zeros], 1.0)[0].tolist() for _ in range(3)]
    assert [len(key) for key in asked] == [32, 32, 32]
    assert len(set(asked)) == 3
    assert source.draws == 3
    assert len({number for numbers in drawn for number in numbers}) > 150
    # The same key alone would repeat the noise: everything random comes from it.
    monkeypatch.setattr("os.urandom", lambda count: bytes(count))
    again = [source.release([zeros], 1.0)[0].tolist() for _ in range(2)]
    assert again[0] == again[1]


def _send(source: Any, pipe: Connection) -> None:
    pipe.send(source.release([torch.zeros(50, dtype=torch.float64)], 1.0)[0].tolist())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_no_process_and_no_copy_repeats_another_s_noise(method: str) -> None:
    source = noise_source("hardened")
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context(method).Process(target=_send, args=(source, theirs))
    child.start()
    assert ours.poll(60)
    drawn = [ours.recv()]
    child.join()
    for each in (source, copy.deepcopy(source), copy.copy(source), pickle.loads(pickle.dumps(source))):
        torch.manual_seed(0)
        np.random.seed(0)
        drawn.append(each.release([torch.zeros(50, dtype=torch.float64)], 1.0)[0].tolist())
    # Numbers are multiples of the step, so single ones may agree; two sequences never do.
    assert max(np.mean(np.equal(one, other)) for i, one in enumerate(drawn) for other in drawn[:i]) < 0.2


@pytest.mark.parametrize("noise", ["standard", "hardened"])
@pytest.mark.parametrize("physical", [1, 3, None])
def test_every_step_draws_once_whatever_the_physical_batches(noise: str, physical: int | None) -> None:
    model = runs.network()
    engine = runs.engine_for(
        model, noise=noise, noise_multiplier=1.0, clipping=1.0, batch_size=2, max_physical_batch_size=physical
    )
    sizes = []
    for batch in engine.batches():
        sizes.append(sum(batch.sizes))
        engine.step(batch, runs.losses_of)
    assert engine._steps.release._noise.draws == len(sizes) == 12
    assert engine.noise == noise


@pytest.mark.parametrize("physical", [1, None])
def test_the_noise_has_its_std_whatever_the_physical_batches(physical: int | None) -> None:
    model = torch.nn.Linear(5, 4000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen: list[torch.Tensor] = []
    engine = runs.engine_for(
        model, optimizer, noise="hardened", noise_multiplier=1.3, clipping=1e-3, max_physical_batch_size=physical
    )
    runs.on_step(optimizer, lambda: seen.append(runs.grads(model).clone()))
    engine.step(next(iter(engine.batches())), lambda model, batch: 0.0 * model(batch[0]).sum(1))
    assert stats.kstest(seen[0].numpy(), stats.norm(0, 1.3e-3 / 8).cdf).pvalue > RARE


@pytest.mark.slow
def test_compiled_steps_release_through_the_lattice_too(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    release = Lattice.release
    monkeypatch.setattr(Lattice, "release", lambda *of: given.append(release(*of)) or given[-1])
    model = runs.network()
    before = runs.weights(model)
    engine = runs.engine_for(
        model, torch.optim.SGD(model.parameters(), lr=1.0), noise="hardened", noise_multiplier=1.0, clipping=1.0
    )
    engine.compile()
    for _ in range(2):
        for batch in engine.batches():
            engine.step(batch, runs.losses_of)
    assert engine._steps.release._noise.draws == len(given) == 6
    # The parameters move by what was released, and by nothing else.
    moved = before - runs.weights(model)
    assert torch.allclose(moved, torch.from_numpy(np.sum(given, axis=0)), atol=1e-5)


@pytest.mark.parametrize(("noise", "said"), [("hardened", "1.000 hardened"), ("test", "1.000 test"), (None, "1.000")])
def test_a_table_of_runs_says_how_the_noise_was_made(noise: str | None, said: str) -> None:
    run = TrainingRun("private", "cached", 0.5, 1, 2, 1.0, 3.0, noise_multiplier=1.0, noise=noise)
    cells = run_table([run], 1e-5).splitlines()[2].split("  ")
    assert said in [cell.strip() for cell in cells]


@pytest.mark.slow
def test_the_command_line_says_how_its_noise_was_made(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["train", "--model", "mlp", "--noise-multiplier", "1", "--epochs", "1", "--no-compare"]
    assert main([*words, "--noise", "hardened", "--json", "--report", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["noise"] == found["runs"][0]["noise"] == "hardened"
    page = (tmp_path / "index.html").read_text()
    assert "<td>hardened</td>" in page
    assert "lattice of public step" in page
    assert main(words) == 0
    assert "1.000 standard" in capsys.readouterr().out
    assert main(["train", "--method", "nonprivate", "--noise", "hardened"]) == 2
    assert "--method nonprivate takes no --noise" in capsys.readouterr().err
