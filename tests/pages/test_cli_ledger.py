"""`ghostclip ledger` and `ghostclip train --ledger`: what was spent, by whom, and whether the file is whole."""

from dataclasses import replace
from pathlib import Path

import pytest
from commands import as_json, mistake, ran
from ledgers import EVENT, charged, spent

from ghostclip import accounting
from ghostclip.ledger import Ledger

TRAIN = ["train", "--model", "mlp", "--epochs", "1", "--batch-size", "500", "--noise-multiplier", "2"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.ledger"


def test_what_each_run_spent_and_what_it_adds_up_to(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    charged(Ledger(path).account(), 40).close()
    last = charged(Ledger(path).account("hardened"), 2)
    last.close()
    found = ran(capsys, "ledger", path, "--delta", "1e-6", "--accountant", "rdp")
    assert f"{path}: 6 records, each whole and in its place; the last hash is {Ledger(path).head.hash}" in found
    assert "standard noise, from 2" in found
    assert ": 40 steps over Poisson samples at rate 0.01 with noise multiplier 1.1\n" in found
    assert ": 2 steps over Poisson samples at rate 0.01" in found
    expected = accounting.epsilon_of([replace(EVENT, count=42)], delta=1e-6, accountant="rdp")
    assert f"epsilon {expected:.4g} (RDP) at delta 1e-06, after 42 steps" in found


def test_as_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    account = charged(Ledger(path).account(), 40)
    found = as_json(capsys, "ledger", path, "--accountant", "rdp")
    account.close()
    assert found["records"] == 3
    assert found["torn_bytes"] == 0
    assert found["epsilon"] == accounting.epsilon_of([replace(EVENT, count=64)], delta=1e-5, accountant="rdp")
    (row,) = found["runs"]
    assert (row["run"], row["reserved"], row["returned"], row["steps"]) == (account.run, 64, 0, 64)
    assert (row["noise_multiplier"], row["sample_rate"], row["neighboring"]) == (1.1, 0.01, "add_or_remove_one")


def test_a_torn_line_is_reported_and_left_alone(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    charged(Ledger(path, block=4).account(), 4).close()
    whole = path.read_bytes() + b'{"record":{"n":2,'
    path.write_bytes(whole)
    assert "A crash cut the last line short after 17 bytes" in ran(capsys, "ledger", path, "--accountant", "rdp")
    assert path.read_bytes() == whole


def test_damage_and_missing_files_are_one_line(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "run.ledger can't be read: No such file or directory" in mistake(capsys, "ledger", path)
    charged(Ledger(path).account(), 1).close()
    path.write_bytes(path.read_bytes().replace(b'"count":32', b'"count":12'))
    assert "is damaged at line 2: its CRC is wrong" in mistake(capsys, "ledger", path)


@pytest.mark.slow
def test_training_is_charged_and_continued(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    epsilons = []
    for _ in range(2):
        found = as_json(capsys, *TRAIN, "--ledger", path)
        (run,) = found["runs"]
        epsilons.append(run["epsilons"]["RDP"])
    spent_by_all = accounting.epsilon_of(Ledger(path).events, delta=1e-5, accountant="rdp")
    assert 0 < epsilons[0] < epsilons[1] == pytest.approx(spent_by_all)
    assert sum(event.count for event in Ledger(path).events) == 2 * run["steps"] <= spent(path)
