"""`ghostclip train --checkpoint` and `--resume`: a run that was interrupted or killed ends as it should have."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import as_json

from ghostclip import accounting, checkpoint
from ghostclip.cli import main, methods, train
from ghostclip.ledger import Ledger

# Two epochs of three steps.
RUN = ["train", "--model", "mlp", "--noise-multiplier", "1", "--batch-size", "500", "--epochs", "2"]
STEPS = 6


@pytest.fixture(autouse=True)
def epsilon_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end only, since it takes longer than the steps."""
    monkeypatch.setattr(train, "MARKS", 1)


def steps_at(folder: Path) -> int:
    return checkpoint.load(folder).public["progress"]["steps"]


def trained(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    found = as_json(capsys, *RUN, *arguments)
    (run,), (losses,) = found["runs"], found["not_private"]["losses"].values()
    return run | {"losses": losses}


def test_an_interrupted_run_goes_on_and_forgets_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, losses_of, calls = tmp_path / "run", methods.cross_entropy, itertools.count(1)

    def interrupted(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        # The self-check calls the loss function three times more in each of these steps, and once more in the first.
        if next(calls) == 20:
            raise KeyboardInterrupt
        return losses_of(model, batch)

    with monkeypatch.context() as patch:
        patch.setattr(methods, "cross_entropy", interrupted)
        assert main([*RUN, "--checkpoint", str(folder)]) == 130
    assert f"the run is kept at {folder}; add --resume" in capsys.readouterr().err
    done = steps_at(folder)
    assert 3 <= done < STEPS
    run = trained(capsys, "--checkpoint", folder, "--resume")
    assert run["steps"] == len(run["losses"]) == STEPS
    setting = {"noise_multiplier": 1.0, "sample_rate": 500 / 1437, "steps": STEPS, "delta": 1e-5}
    assert run["epsilons"]["PLD"] == accounting.epsilon(**setting)
    assert "nothing was trained" not in capsys.readouterr().err
    assert main([*RUN, "--checkpoint", str(folder), "--resume"]) == 0
    assert f"the run at {folder} had ended: nothing was trained" in capsys.readouterr().err
    assert steps_at(folder) == STEPS
    assert sum(event.count for event in Ledger(f"{folder}.ledger").events) == STEPS


def test_every_so_many_steps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trained(capsys, "--checkpoint", tmp_path / "run", "--every", 4, "--ledger", tmp_path / "other.ledger")
    assert steps_at(tmp_path / "run") == STEPS
    assert steps_at(checkpoint.previous_of(tmp_path / "run")) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.ledger", "run", "run.previous"]


def test_other_settings_are_refused_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    where = ["--checkpoint", str(tmp_path / "run")]
    assert main([*RUN, *where, "--epochs", "1"]) == 0
    assert main([*RUN, *where, "--resume", "--noise-multiplier", "2"]) == 2
    assert "noise_multiplier is 1.0 in it and 2.0 here" in capsys.readouterr().err
    done = steps_at(tmp_path / "run")
    for option, begun, other in (("--learning-rate", " 2.5", "5"), ("--seed", " 0; got 3", "3")):
        assert main([*RUN, *where, "--resume", option, other]) == 2
        assert f"as it was begun, with {option}{begun}" in capsys.readouterr().err
    assert steps_at(tmp_path / "run") == done
