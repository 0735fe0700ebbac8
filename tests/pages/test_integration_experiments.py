"""The scripts behind the tables of frameworks: kills, mistakes and epsilon at every step."""

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytest.importorskip("trl")


from experiments.integrations import kills
from experiments.integrations.loops import GROUPED, process_group
from experiments.integrations.mistakes import MISTAKES, refused
from experiments.kills import Broken, Shared, Trap
from ghostclip.engine.budget import Spending

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """What frameworks warn of is no concern here, and accelerate's state is none of other tests'."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    state = pytest.importorskip("accelerate").state
    state.AcceleratorState._reset_state(True)
    state.GradientState._reset_state()
    gc.collect()  # a process group that a forked process collects ends it with signal 11


@pytest.mark.one_in(3)
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
