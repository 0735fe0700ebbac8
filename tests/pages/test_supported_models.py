"""The script of the table of models: what it writes, and what it keeps of earlier calls."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "experiments"))

from zoo.page import page, verdict

ROOT = Path(__file__).resolve().parents[2]

ERRORS = {"worst": 1e-14, "floor": 1e-15, "neighbours": 0.999999, "steps": 3, "parameters": 10, "measured": False}


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


def test_the_page_is_that_of_the_results():
    results = json.loads((ROOT / "experiments" / "results" / "supported_models.json").read_text())
    assert page(results) == (ROOT / "docs" / "supported_models.md").read_text()
