"""`ghostclip audit`: figures, files, exit status, and mistakes in one line."""

import json

import pytest
from data_files import digits

from ghostclip import datasets
from ghostclip.cli import main
from ghostclip.noise import noise_source

QUICK = ["--model", "mlp", "--epochs", "1", "--noise-multiplier", "1", "--batch-size", "400"]


@pytest.fixture(autouse=True)
def _forty_digits(monkeypatch):
    """A data set of 400 digits instead of all of them."""
    fewer = digits(400)
    monkeypatch.setattr(datasets, "load", lambda *given: fewer)


def audited(capsys, *words) -> tuple[int, dict]:
    """Exit status and the JSON that an audit prints; so sure that a sound engine does not fail by chance."""
    status = main(["audit", *QUICK, "--draws", "300", "--confidence", "0.9999999", "--json", *map(str, words)])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_sound_training_is_consistent(capsys, tmp_path):
    out, plot = tmp_path / "audit.json", tmp_path / "audit.png"
    status, found = audited(capsys, "--canaries", "20", "--out", out, "--plot", plot)
    assert status == 0
    assert found["violated"] is False
    assert found["settings"]["model"] == "mlp"
    assert found["settings"]["data"] == "digits"
    assert found["one_run"]["canaries"] == 20
    assert found["audited_epsilon"] < found["claimed_epsilon"]
    assert json.loads(out.read_text()) == found
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_violation_is_exit_status_1_and_is_said(capsys, monkeypatch):
    standard = type(noise_source("standard"))
    release = standard.release
    monkeypatch.setattr(standard, "release", lambda self, sums, std, divisor=1.0: release(self, sums, 0.0, divisor))
    assert main(["audit", *QUICK, "--draws", "300", "--canaries", "0"]) == 1
    printed = capsys.readouterr()
    last = printed.out.splitlines()[-1]
    assert last.startswith("VIOLATED: the audit found epsilon >= ")
    assert "at confidence 0.95, above the claimed" in last
    assert "white box: 100%" in printed.err


@pytest.mark.slow
def test_either_attack_alone(capsys):
    _, found = audited(capsys, "--canaries", "0", "--steps-per-trial", "2", "--method", "reweight")
    assert found["one_run"] is None
    assert found["white_box"]["trials"] == 150
    assert main(["audit", *QUICK, "--draws", "0", "--canaries", "10"]) in (0, 1)
    assert "white box" not in capsys.readouterr().out
