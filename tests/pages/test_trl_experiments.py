"""The scripts behind figures of fine-tuning: TRL's trainers beside a peer's, and packed beside padded batches."""

import json
import logging
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from scripts import ROOT, ran, script

from experiments.peers import trl_trainers
from experiments.peers.trl_page import page
from experiments.peers.trl_scripts import GHOSTCLIP, SCRIPTS, changed_lines

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """What transformers and TRL say is no concern here, and accelerate's state is none of other tests'."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(before)
    state = pytest.importorskip("accelerate").state
    state.AcceleratorState._reset_state(True)
    state.GradientState._reset_state()


def test_the_page_of_trainers_is_that_of_its_figures_and_documented() -> None:
    path = trl_trainers.RESULTS / trl_trainers.FILE
    text = path.with_suffix(".md").read_text()
    assert text == page(json.loads(path.with_suffix(".json").read_text()))
    table = re.search(r"(?:^\| .*\n)+", text, re.MULTILINE)
    assert table is not None
    assert f"\n\n{table[0]}\n" in (ROOT / "docs" / "finetuning.md").read_text()


@pytest.mark.parametrize("task", SCRIPTS)
def test_the_private_script_differs_in_three_statements(task: str) -> None:
    assert changed_lines(task, GHOSTCLIP) == 3


@pytest.mark.slow
@pytest.mark.parametrize("task", SCRIPTS)
def test_facts_of_a_first_step_are_measured_against_the_loop(task: str, tmp_path: Path) -> None:
    what = trl_trainers.given(task, tmp_path / "ours", noise=0.0)
    first, expected = trl_trainers.released(SCRIPTS[task][GHOSTCLIP], what), trl_trainers.loop(task, tmp_path / "loop")
    assert float((first - expected).norm() / expected.norm()) < 1e-4
    assert 1 < float(expected.norm()) / trl_trainers.CLIP < trl_trainers.ROWS


@pytest.mark.slow
def test_facts_of_budget_noise_dropout_and_mixing(tmp_path: Path) -> None:
    spent = trl_trainers.spending(GHOSTCLIP, tmp_path)
    assert spent["epsilon"] == pytest.approx(trl_trainers.charged(10), rel=2e-3)
    assert spent["at_the_target"]["epsilon"] <= 4.0
    assert spent["said_again"].startswith("BudgetExceededError: ")
    parameters = sum(each.numel() for each in trl_trainers.given("SFT", tmp_path).model.parameters())
    assert trl_trainers.repeated_noise(GHOSTCLIP, tmp_path, 7) == pytest.approx(math.sqrt(2 * parameters), rel=0.05)
    assert trl_trainers.shared_dropout(GHOSTCLIP, tmp_path) < 0.99
    assert trl_trainers.said(lambda: math.sqrt(-1)) == "ValueError: math domain error"


@pytest.mark.slow
def test_packed_and_padded_steps_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("packing")
    for name, value in {"WORDS": 20, "WIDTH": 16, "LAYERS": 1, "ROWS": 16, "SHORTEST": 2, "LONGEST": 16}.items():
        monkeypatch.setattr(module, name, value)
    results, text = ran(module, tmp_path, "--seconds", "0")
    for found in results["lengths"].values():
        assert {name: row["padding"] == 0 for name, row in found["trainings"].items()} == {
            name: packed for name, (_, packed) in module.KINDS.items()
        }
        assert all(row["rounds"] >= 3 and row["median"] > 0 for row in found["ratios"].values())
    assert "| private, packed over private, padded |" in text
