"""Short versions of experiments/kills.py and privacy_overhead.py; the kills notice what they are there to notice."""

import json
import random

import pytest
from scripts import script

from ghostclip.engine.budget import Spending


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_kills_leave_no_release_uncharged(tmp_path, capsys):
    assert script("kills").main(["--kills", "20", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "kills.json").read_text())
    assert results["kills"] >= 20
    assert results["resumed_from_a_checkpoint"] > 0
    assert all(0 <= row["least_added"] <= row["most_added"] <= results["block"] for row in results["points"].values())
    assert "| at a random moment |" in (tmp_path / "kills.md").read_text()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_step_that_is_not_charged_is_noticed(tmp_path, monkeypatch):
    kills = script("kills")
    charge = Spending.charge
    monkeypatch.setattr(Spending, "charge", lambda self, *of: None if self._own.total() == 3 else charge(self, *of))
    with pytest.raises(kills.Broken, match="releases"):
        kills.one_run(tmp_path, ["between two steps"] * 3, {"between two steps": []}, random.Random(1))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_run_that_forgets_is_noticed(tmp_path, monkeypatch):
    kills = script("kills")
    monkeypatch.setattr(kills, "spent_in", lambda place: 10**6)
    with pytest.raises(kills.Broken, match="1000000 charged"):
        kills.one_run(tmp_path, [kills.RANDOM], {kills.RANDOM: []}, random.Random(1))


def test_overhead_is_a_share_of_the_step_of_the_same_round(tmp_path):
    module = script("privacy_overhead")
    words = ["--workloads", "mlp", "--batch-size", "4", "--seconds", "0.2", "--out", str(tmp_path)]
    assert module.main(words) == 0
    found = json.loads((tmp_path / "privacy_overhead.json").read_text())["workloads"]["mlp"]
    assert {*module.STEPS, "noise", "ledger", "ledger, every step", "together"} <= set(found["ms"])
    ms = {part: spread["median"] for part, spread in found["ms"].items()}
    assert ms["noise"] < ms["together"]
    assert "standard noise and ledger in blocks" in (tmp_path / "privacy_overhead.md").read_text()
