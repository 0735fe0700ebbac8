"""A short version of experiments/ownership.py; the page has the table of the results there."""

import json
from pathlib import Path

from scripts import script

ROOT = Path(__file__).resolve().parents[2]


def test_mixing_is_seen_and_the_alarm_is_quiet(tmp_path, monkeypatch):
    module = script("ownership")
    name = "minus the mean over the batch"
    monkeypatch.setattr(module, "KINDS", {name: module.KINDS[name]})
    monkeypatch.setattr(module, "STARTS", (1, 3))
    monkeypatch.setattr(module, "NORMS", dict(list(module.NORMS.items())[:1]))
    assert module.main(["--seeds", "2", "--draws", "2000", "--sizes", "64", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "ownership.json").read_text())
    assert all(row["refused_in"] == [0, 0] for row in found["mixing"])
    assert [row["either"] for row in found["alarms"]] == [0]
    assert f"| {name} | 1 | 1 | 1 | 1 |" in (tmp_path / "ownership.md").read_text()


def test_the_page_has_the_tables_of_the_results():
    module = script("ownership")
    results = json.loads((module.RESULTS / "ownership.json").read_text())
    assert (module.RESULTS / "ownership.md").read_text() == module.markdown(results)
    for table in (module.mixing_table(results), module.alarm_table(results)):
        assert table in (ROOT / "docs" / "ownership.md").read_text()
