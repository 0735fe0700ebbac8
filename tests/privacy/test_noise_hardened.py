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
import pytest
import torch

from ghostclip.cli import main
from ghostclip.cli.summary import run_table
from ghostclip.noise import noise_source
from ghostclip.report import TrainingRun


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
