"""A short version of experiments/kills.py, and that it notices what it is there to notice."""

import json
import random

import pytest
from test_experiments import script

from ghostclip.engine.spending import Spending


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
    monkeypatch.setattr(Spending, "charge", lambda self: None if self._own.total() == 3 else charge(self))
    with pytest.raises(kills.Broken, match="releases"):
        kills.one_run(tmp_path, ["between two steps"] * 3, {"between two steps": []}, random.Random(1))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_run_that_forgets_is_noticed(tmp_path, monkeypatch):
    kills = script("kills")
    monkeypatch.setattr(kills, "spent_in", lambda place: 10**6)
    with pytest.raises(kills.Broken, match="1000000 charged"):
        kills.one_run(tmp_path, [kills.RANDOM], {kills.RANDOM: []}, random.Random(1))
