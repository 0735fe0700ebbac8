"""Ctrl-C at any line of a step: nothing is released uncharged, and the next step is an ordinary one."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
import torch
from checked_training import NORM, RATE, Training, small_engine

import ghostclip
from ghostclip.engine import PrivacyEngine

PACKAGE = str(Path(ghostclip.__file__).parent)


class Interruption:
    """Raises KeyboardInterrupt at the n-th of the package's lines that are reached, each counted once."""

    def __init__(self, at: int, folders: tuple[str, ...]) -> None:
        self.lines: set[tuple[str, int]] = set()
        self._at = at
        self._places = tuple(os.path.join(PACKAGE, folder) for folder in folders)

    def __enter__(self) -> "Interruption":
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._places):
            return None
        if event == "line":
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
            if len(self.lines) == self._at:
                self._at = 0
                raise KeyboardInterrupt
        return self._trace


def lines_of_a_step(training: Training, folders: tuple[str, ...]) -> int:
    """How many lines of the package a step goes through."""
    reached = 0
    for _ in range(8):
        with Interruption(0, folders) as counted:
            training.step()
        reached = max(reached, len(counted.lines))
    return reached


def interrupt_everywhere(engine: PrivacyEngine, by_hand: bool, folders: tuple[str, ...], stride: int) -> int:
    """Interrupts one step after another, each a few lines later; returns how many were."""
    training = Training(engine, by_hand)
    count = 0
    for at in range(1, lines_of_a_step(training, folders) + 1, stride):
        before, charged = runs.weights(engine.model), engine.steps_taken
        with contextlib.suppress(KeyboardInterrupt), Interruption(at, folders):
            training.step()
        # Never a release that wasn't charged.
        assert torch.equal(runs.weights(engine.model), before) or engine.steps_taken == charged + 1
        assert engine.steps_taken in (charged, charged + 1)
        if at % 2:
            training.epoch = iter(())
        # What a handler does that goes on with the same iterator; after engine.step only where its first line was hit.
        engine.batches().discard()
        training.checked_step()
        count += 1
    return count


@pytest.mark.one_in(2)
@pytest.mark.parametrize("by_hand", [False, True], ids=["step", "by hand"])
def test_ctrl_c_anywhere_in_the_engine(by_hand: bool) -> None:
    assert interrupt_everywhere(small_engine(), by_hand, ("engine", "sampling", "noise"), stride=4) > 40


@pytest.mark.slow
@pytest.mark.parametrize("second_pass", ["reweight", "cached"])
@pytest.mark.parametrize("by_hand", [False, True], ids=["step", "by hand"])
def test_ctrl_c_at_every_line_of_the_package(by_hand: bool, second_pass: str, tmp_path: Path) -> None:
    engine = small_engine(second_pass=second_pass, ledger=tmp_path / "run.ledger")
    assert interrupt_everywhere(engine, by_hand, ("",), stride=1) > 500


@pytest.mark.slow
@pytest.mark.parametrize("by_hand", [False, True], ids=["step", "by hand"])
def test_ctrl_c_at_every_line_with_narrow_sums(by_hand: bool) -> None:
    model = runs.network(torch.bfloat16)
    engine = runs.engine_for(model, dataset=runs.data(dtype=torch.bfloat16), clipping=NORM, max_physical_batch_size=4)
    training = Training(engine, by_hand)
    for at in range(1, lines_of_a_step(training, ("engine",)) + 1):
        before, charged = runs.weights(model), engine.steps_taken
        with contextlib.suppress(KeyboardInterrupt), Interruption(at, ("engine",)):
            training.step()
        assert torch.equal(runs.weights(model), before) or engine.steps_taken == charged + 1
        engine.optimizer.zero_grad()
        engine.batches().discard()
        before = runs.weights(model)
        batch = training.step()
        moved = (runs.weights(model) - before).float().norm()
        assert float(moved) <= 0.5 * NORM * sum(batch.sizes) / 8 * 1.05 + 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 4])
def test_ctrl_c_at_every_line_of_a_compiled_step(limit: int | None) -> None:
    engine = small_engine(max_physical_batch_size=limit)
    engine.compile()
    training = Training(engine)
    for _ in range(15):
        training.step()
    for at in range(1, lines_of_a_step(training, ("engine", "compiled")) + 1, 3):
        before, charged = runs.weights(engine.model), engine.steps_taken
        with contextlib.suppress(KeyboardInterrupt), Interruption(at, ("engine", "compiled")):
            training.step()
        assert torch.equal(runs.weights(engine.model), before) or engine.steps_taken == charged + 1
        before, charged = runs.weights(engine.model), engine.steps_taken
        batch = training.step()
        assert engine.steps_taken == charged + 1
        moved = float((runs.weights(engine.model) - before).norm())
        assert moved <= RATE * NORM * sum(batch.sizes) / 8 * (1 + 1e-4) + 1e-6
