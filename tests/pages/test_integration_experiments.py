"""The scripts behind the tables of frameworks: kills, mistakes, TRL's trainers beside a peer's, packed batches."""

import gc
import json
import logging
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytest.importorskip("trl")

from scripts import ROOT, ran, script

from experiments.integrations import kills
from experiments.integrations.loops import GROUPED, process_group
from experiments.integrations.mistakes import MISTAKES, refused
from experiments.kills import Broken, Shared, Trap
from experiments.peers import trl_trainers
from experiments.peers.trl_page import page
from experiments.peers.trl_scripts import GHOSTCLIP, SCRIPTS, changed_lines
from ghostclip.engine.budget import Spending

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """What frameworks warn of is no concern here, and accelerate's state is none of other tests'."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(before)
    state = pytest.importorskip("accelerate").state
    state.AcceleratorState._reset_state(True)
    state.GradientState._reset_state()
    gc.collect()  # a process group that a forked process collects ends it with signal 11


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("framework", "mistake"), [(name, each) for name, some in MISTAKES.items() for each in some])
def test_every_mistake_is_refused(framework: str, mistake: str) -> None:
    with process_group(framework in GROUPED):
        assert refused(MISTAKES[framework][mistake])


def test_a_mistake_that_is_not_refused_is_noticed() -> None:
    assert refused(lambda: None) == ""
    with pytest.raises(RuntimeError):
        refused(lambda: torch.zeros(2) @ torch.zeros(3))  # an error, and none of ours


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 50])
@pytest.mark.parametrize("name", kills.FRAMEWORKS)
def test_kills_leave_no_release_of_a_framework_uncharged(name: str, count: int, tmp_path: Path) -> None:
    work, block = kills.FRAMEWORKS[name]
    work(tmp_path, Shared(), Trap("", 0), 1)
    found = kills.killed(work, block, count, seed=1)
    assert found["kills"] >= count
    assert 0 < found["released"] <= found["charged"]
    assert found["resumed"] > 10 if count > 2 else found["charged"] <= found["released"] + 3 * block


def test_a_framework_that_charges_too_late_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    charge = Spending.charge
    monkeypatch.setattr(Spending, "charge", lambda self, *of: None if self._own.total() == 1 else charge(self, *of))
    work, block = kills.FRAMEWORKS["Lightning"]
    with pytest.raises(Broken, match="releases"):
        kills.killed(work, block, 3, seed=1)


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
