"""The script of the table of models: what it writes, and what it keeps of earlier calls."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "experiments"))

import supported_models
from zoo.page import page, verdict

ERRORS = {"worst": 1e-14, "floor": 1e-15, "neighbours": 0.999999, "steps": 3, "parameters": 10, "measured": False}
TIMES = {"parameters": 1000, "examples": 16, "milliseconds": 5.0, "over": {"auto": 1.5, "cached": 1.25}}


def row(**changes):
    return {"library": "timm", "about": "a net", "kind": "vision", "errors": ERRORS | changes, "times": TIMES}


def results(**rows):
    machine = {"cpu": "a processor", "load_average": 0.0}
    return {"versions": {"torch": "2"}, "machine": machine, "commit": "abc", "missing": ["diffusers"], "models": rows}


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        (ERRORS, "exact"),
        (ERRORS | {"worst": 1e-7}, "WRONG"),
        (ERRORS | {"neighbours": 1.0001}, "WRONG"),
        (ERRORS | {"neighbours": float("nan")}, "WRONG"),
        (ERRORS | {"steps": 2}, "WRONG"),
        ({"refused": "mixes"}, "refused"),
        ({"failed": "KeyError"}, "fails"),
        ({}, "fails"),
    ],
)
def test_the_verdict_is_by_all_figures(errors, said):
    assert verdict({"errors": errors}) == said


def test_the_page_has_figures_the_slowest_refusals_and_what_is_left_out():
    slow = row(measured=True) | {"times": TIMES | {"over": {"auto": 4.0, "cached": 3.5}}}
    refused = row() | {"errors": {"refused": "examples | mix"}, "times": {}}
    text = page(results(fast=row(), slow=slow, refused=refused))
    assert "**2 of 3 models are exact.** 1 are measured in every batch." in text
    assert "2.75 ordinary steps in the median of 2 models" in text
    assert "1 of them take more than 3 by default" in text
    assert "| fast | timm | a net | 1e-14 | 1e-15 | 0.999999 |  | 1k, 16 | 5.0 | 1.50 | 1.25 |" in text
    assert "| slow | timm | a net | 1e-14 | 1e-15 | 0.999999 | always | 1k, 16 |" in text
    assert "| slow | 4.00 | **not known** |" in text
    assert "examples \\| mix" in text
    assert "Left out, not installed: the models of diffusers." in text


@pytest.mark.slow
def test_a_call_writes_both_files_and_names_what_is_left_out(tmp_path, capsys, monkeypatch):
    """With the libraries that are installed, or none."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "timm" else find(name))
    arguments = ["--results", str(tmp_path / "r.json"), "--page", str(tmp_path / "p.md")]
    assert supported_models.main(["--only", "OPT", "--parts", "errors", *arguments]) == 0
    assert "timm" in capsys.readouterr().out
    found = json.loads((tmp_path / "r.json").read_text())
    assert "timm" in found["missing"]
    assert all(verdict(row) == "exact" for row in found["models"].values())
    assert "timm" in (tmp_path / "p.md").read_text()
