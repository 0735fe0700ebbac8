"""Ctrl-C in the middle of a change of grad mode or of a ledger's turn: both are as they were, and training goes on."""

import contextlib
import functools
import gc
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
import torch
from case_models import Wired
from ledgers import EVENT, spent
from torch import nn

import ghostclip
from ghostclip import GhostClipper, PrivacyEngine
from ghostclip.ledger import Ledger, turns


class CtrlC:
    """Raises KeyboardInterrupt at one of the moments in which a context manager of torch's has half changed a mode."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self.seen = -1, 0
        for kind in (torch.no_grad, torch.enable_grad, torch.set_grad_enabled):
            changes = "__init__" if kind is torch.set_grad_enabled else "__enter__"
            monkeypatch.setattr(kind, changes, self._ticking(getattr(kind, changes), before=False))
            monkeypatch.setattr(kind, "__exit__", self._ticking(kind.__exit__, before=True))

    def _tick(self) -> None:
        self.seen += 1
        self.left -= 1
        if self.left == -1:
            raise KeyboardInterrupt

    def _ticking(self, method: Callable[..., Any], before: bool) -> Callable[..., Any]:
        @functools.wraps(method)
        def changed(*args: Any) -> Any:
            if before:
                self._tick()
                return method(*args)
            found = method(*args)
            self._tick()
            return found

        return changed


@pytest.fixture(autouse=True)
def no_callbacks_of_the_collector() -> Iterator[None]:
    """A signal that comes in one of them (hypothesis has one) is swallowed there, and never reaches the code."""
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks.extend(callbacks)


def squares(model: nn.Module, x: Any) -> Any:
    return model(x).square().flatten(1).sum(1)


def recurrent(m: Any, x: Any) -> Any:
    return m.norm(m.second(m.first(x)[0])[0])


def clip(second_pass: str) -> Callable[[], None]:
    parts = {"first": nn.LSTM(4, 5, batch_first=True), "second": nn.GRU(5, 3, batch_first=True)}
    model, x = Wired(recurrent, **parts, norm=nn.LayerNorm(3)), torch.randn(3, 4, 4)
    clipper = GhostClipper(model, second_pass=second_pass)

    def work() -> None:
        model.zero_grad()
        clipper.backward(squares(model, x))
        clipper.norms(squares(model, x), per="layer")
        clipper.clip(squares, x)
        clipper.verify(squares, x)

    return work


def train(loop: Callable[[PrivacyEngine], Any], compiled: bool = False) -> Callable[[], None]:
    engine = runs.engine_for(runs.network(), noise_multiplier=1.0, clipping=1.0)
    engine.compile() if compiled else None

    def work() -> None:
        engine.optimizer.zero_grad()
        loop(engine)

    return work


WORK: dict[str, Callable[[], Callable[[], None]]] = {
    "reweight": lambda: clip("reweight"),
    "cached": lambda: clip("cached"),
    "engine.step": lambda: train(runs.train),
    "a loop of one's own": lambda: train(runs.train_by_hand),
    "compiled": lambda: train(runs.train, compiled=True),
}


@pytest.mark.parametrize("name", WORK)
@pytest.mark.one_in(6)
def test_grad_mode_is_on_wherever_ctrl_c_comes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ctrl_c = CtrlC(monkeypatch)
    work = WORK[name]()
    work()
    ctrl_c.seen = 0
    work()
    moments = ctrl_c.seen
    assert moments > 4
    for moment in range(0, moments, max(1, moments // 60)):
        ctrl_c.left = moment
        with contextlib.suppress(KeyboardInterrupt):
            work()
        assert torch.is_grad_enabled(), moment
    ctrl_c.left = -1
    work()


@pytest.mark.parametrize("enabled", [False, True])
def test_a_failure_leaves_grad_mode_too(enabled: bool) -> None:
    clipper = GhostClipper(runs.network())
    with torch.set_grad_enabled(enabled):
        with pytest.raises(ghostclip.GhostClipError):
            clipper.backward(torch.zeros(3))
        assert torch.is_grad_enabled() == enabled


@pytest.fixture
def alarm() -> Iterator[None]:
    """A timer that interrupts as Ctrl-C does."""
    gc.collect()  # what other tests left has callbacks, in which an interruption would be lost
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def interrupted(work: Callable[[], object], seconds: float) -> KeyboardInterrupt | None:
    """Runs work, interrupted by a signal after so many seconds; the error, with the frames that it went through."""
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        for _ in range(1000):
            work()
    except KeyboardInterrupt as error:
        return error
    return None


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize(
    ("block", "trials", "seconds", "least"),
    [
        pytest.param(1_000_000, 4000, (1e-6, 4e-5), 1000, id="in memory"),
        pytest.param(1, 300, (1e-5, 2e-3), 0, id="in writing"),
    ],
)
def test_a_ledgers_lock_is_free_after_any_signal(
    block: int, trials: int, seconds: tuple[float, float], least: int, tmp_path: Path
) -> None:
    path, rng, granted = tmp_path / "run.ledger", random.Random(0), 0
    account = Ledger(path, block=block).account()

    def charge() -> None:
        nonlocal granted
        account.charge(EVENT)
        granted += 1

    charge()
    for trial in range(trials):
        error = interrupted(charge, rng.uniform(*seconds))
        assert not turns._open.lock.locked(), trial
        del error
    charge()
    assert granted > least
    assert account.runs[account.run][EVENT] >= granted
    account.close()
    assert spent(path) >= granted


def test_after_ctrl_c_behind_the_update_the_next_step_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step was charged and taken; what it left in p.grad is no leak."""
    engine = runs.engine_for(runs.network(), noise_multiplier=1.0)
    runs.train(engine, 1)
    with monkeypatch.context() as patch:
        patch.setattr(engine._steps.release.sums, "remember_released", interrupted_in_remembering(engine))
        with pytest.raises(KeyboardInterrupt):
            runs.train(engine, 1)
    assert engine.steps_taken == 2
    runs.train(engine, 1)
    assert engine.steps_taken == 3


def interrupted_in_remembering(engine: PrivacyEngine) -> Callable[[], None]:
    """Remembers the released gradients the first time, forgets them and is interrupted the second."""
    sums, calls = engine._steps.release.sums, [0]
    remember = sums.remember_released

    def remembering() -> None:
        calls[0] += 1
        if calls[0] == 2:
            sums._guard._known.clear()
            raise KeyboardInterrupt
        remember()

    return remembering
