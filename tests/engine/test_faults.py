"""Exceptions, Ctrl-C and odd values in a step: nothing unclipped or uncharged is released, and training goes on."""

import contextlib
import functools
import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
import torch
from case_models import Wired
from checked_training import NORM, RATE, Broken, Training, broken, small_engine
from ledgers import EVENT, spent
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import ghostclip
from ghostclip import GhostClipper
from ghostclip.engine import PrivacyEngine
from ghostclip.ledger import Ledger, turns

PLACES: dict[str, Callable[[PrivacyEngine, pytest.MonkeyPatch], object]] = {
    "loss function": lambda engine, patch: patch.setattr(runs, "losses_of", broken),
    "clip": lambda engine, patch: patch.setattr(engine._steps._clipper.passes, "clip", broken),
    "charge": lambda engine, patch: patch.setattr(engine._steps.release, "charge", broken),
    "noise": lambda engine, patch: patch.setattr(engine._steps.release._noise, "release", broken),
    "zero_grad": lambda engine, patch: patch.setattr(engine.optimizer, "zero_grad", broken),
    "sums": lambda engine, patch: patch.setattr("ghostclip.norms.affine.LinearPair.weighted_sums", broken),
    # Small layers are kept, and go without it.
    "second backward": lambda engine, patch: (
        patch.setattr(engine._steps._clipper.passes, "_memory_budget", 1),
        patch.setattr("ghostclip.clipper.second_pass.Reweighting", broken),
    ),
}


@pytest.mark.parametrize("by_hand", [False, True], ids=["step", "by hand"])
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_at_any_stage_of_a_step(place: str, by_hand: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it comes again and again in one loop."""
    training = Training(small_engine(), by_hand)
    training.checked_step()
    engine = training.engine
    for failures in range(1, 4):
        before = runs.weights(engine.model)
        with monkeypatch.context() as patch:
            PLACES[place](engine, patch)
            with pytest.raises(Broken):
                training.step()
        assert engine.steps_taken == 1 + failures * (place in ("noise", "zero_grad"))
        assert torch.equal(runs.weights(engine.model), before) == (place != "zero_grad")
        if by_hand:
            engine.optimizer.zero_grad()
        if by_hand and place == "loss function":  # outside of the engine: it must leave the loop
            training.epoch = iter(())
        assert all(parameter.grad is None for parameter in engine.model.parameters())
    training.epoch = iter(())
    training.checked_step()


class Deadly(Dataset[Any]):
    """Ends the process that reads a certain row, once."""

    def __init__(self, once: Path, end: Callable[[], Any]) -> None:
        self.rows, self.once, self.end = runs.data(), once, end

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if not self.once.exists():
            self.once.touch()
            self.end()
        return self.rows[index]


@pytest.fixture
def with_workers() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        warnings.filterwarnings("ignore", "This DataLoader will create|the DataLoader's .* is replaced", UserWarning)
        yield


# torch's handler of a worker's death raises wherever the process is then, also while torch shuts that worker down.
@pytest.mark.filterwarnings("ignore:.*_MultiProcessingDataLoaderIter.__del__:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("with_workers")
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    ("end", "error", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), RuntimeError, "worker .*(killed by signal|exited unexpectedly)"),
        (broken, Broken, "Caught Broken"),
    ],
    ids=["killed", "raised"],
)
@pytest.mark.one_in(2)
def test_a_worker_s_death_costs_its_batch_and_no_more(end, error, words, persistent, tmp_path):
    loader = DataLoader(Deadly(tmp_path / "once", end), 8, num_workers=1, persistent_workers=persistent)
    training = Training(small_engine(data=loader))
    with pytest.raises(error, match=words):
        training.step()
    assert training.engine.steps_taken == 0
    for _ in range(4):
        training.checked_step()
    training.engine.detach()


def drawn(once: Path) -> list[list[Tensor]]:
    """The inputs of an epoch's batches, none of one whose worker failed."""
    torch.manual_seed(0)
    loader = DataLoader(Deadly(once, broken), 8, num_workers=1, prefetch_factor=4)
    engine = small_engine(data=loader, noise="test", seed=3)
    found: list[list[Tensor]] = []
    for batch in engine.batches():
        found.append([])
        with contextlib.suppress(Broken):
            found[-1] += [inputs for inputs, _ in batch.physical()]
        batch.discard()
    engine.detach()
    return found


@pytest.mark.usefixtures("with_workers")
def test_what_was_drawn_ahead_of_a_failure_is_drawn_again(tmp_path: Path) -> None:
    (tmp_path / "never").touch()
    (lost, *rest), (_, *expected) = drawn(tmp_path / "once"), drawn(tmp_path / "never")
    assert lost == []
    assert len(rest) == len(expected) == 2
    for found, wanted in zip(rest, expected, strict=True):
        torch.testing.assert_close(torch.cat(found), torch.cat(wanted), rtol=0, atol=0)


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


def bounded_step(training: Training, slack: float) -> None:
    """A step in which each example moves the parameters by its bound at most."""
    engine, before = training.engine, runs.weights(training.engine.model)
    charged = engine.steps_taken
    engine.optimizer.zero_grad()
    batch = training.step()
    assert engine.steps_taken == charged + 1
    moved = float((runs.weights(engine.model) - before).float().norm())
    assert moved <= RATE * NORM * sum(batch.sizes) / 8 * (1 + slack) + slack


ENGINE, SLOW = ("engine", "sampling", "noise"), pytest.mark.slow
REACHED = [
    pytest.param({}, ENGINE, 7, id="engine"),
    pytest.param({"second_pass": "reweight"}, ("",), 1, marks=SLOW, id="reweight"),
    pytest.param({"second_pass": "cached"}, ("",), 1, marks=SLOW, id="cached"),
    pytest.param({"dtype": torch.bfloat16}, ("engine",), 1, marks=SLOW, id="bfloat16"),
    pytest.param({"max_physical_batch_size": 4, "compile": True}, ("engine", "compiled"), 3, marks=SLOW, id="graphs"),
]


@pytest.mark.parametrize("by_hand", [False, True], ids=["step", "by hand"])
@pytest.mark.parametrize(("options", "folders", "stride"), REACHED)
def test_ctrl_c_at_any_line(options, folders, stride, by_hand, tmp_path):
    """One step after another is interrupted, each a few lines later."""
    graph = options.pop("compile", False)
    training = Training(small_engine(ledger=tmp_path / "run.ledger", **options), by_hand)
    engine = training.engine
    for _ in range(15 * graph):
        engine.compile()
        training.step()
    count = 0
    for _ in range(8):
        with Interruption(0, folders) as reached:
            training.step()
        count = max(count, len(reached.lines))
    assert count > 150
    for at in range(1, count + 1, stride):
        before, charged = runs.weights(engine.model), engine.steps_taken
        with contextlib.suppress(KeyboardInterrupt), Interruption(at, folders):
            training.step()
        assert torch.is_grad_enabled()
        assert not turns._open.lock.locked()
        # Never a release that wasn't charged.
        assert torch.equal(runs.weights(engine.model), before) or engine.steps_taken == charged + 1
        assert engine.steps_taken in (charged, charged + 1)
        if at % 2:
            training.epoch = iter(())
        # What a handler does that goes on with the same iterator; after engine.step only where its first line was hit.
        engine.batches().discard()
        if graph or "dtype" in options:
            bounded_step(training, 1e-4 if graph else 0.05)
        else:
            training.checked_step()


@pytest.mark.parametrize("block", [1, 1000])
def test_a_ledgers_lock_is_free_wherever_ctrl_c_comes(block: int, tmp_path: Path) -> None:
    """And what was granted is in the file, whether each charge is written or a block of them."""
    path, granted = tmp_path / "run.ledger", 1
    account = Ledger(path, block=block).account()
    with Interruption(0, ("ledger",)) as reached:
        account.charge(EVENT)
    for at in range(1, len(reached.lines) + 1):
        with contextlib.suppress(KeyboardInterrupt), Interruption(at, ("ledger",)):
            account.charge(EVENT)
        assert not turns._open.lock.locked(), at
        account.charge(EVENT)
        granted += 1
    assert granted > 10
    assert account.runs[account.run][EVENT] >= granted
    account.close()
    assert spent(path) >= granted


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


def clip(second_pass: str) -> Callable[[], None]:
    parts = {"first": nn.LSTM(4, 5, batch_first=True), "second": nn.GRU(5, 3, batch_first=True)}
    model = Wired(lambda m, x: m.norm(m.second(m.first(x)[0])[0]), **parts, norm=nn.LayerNorm(3))
    clipper, x = GhostClipper(model, second_pass=second_pass), torch.randn(3, 4, 4)

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


def test_after_ctrl_c_behind_the_update_the_next_step_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step was charged and taken; what it left in p.grad is no leak."""
    engine = runs.engine_for(runs.network(), noise_multiplier=1.0)
    runs.train(engine, 1)
    sums, calls = engine._steps.release.sums, []
    remember = sums.remember_released

    def forgets_the_second_time() -> None:
        calls.append(1)
        if len(calls) == 2:
            sums._guard._known.clear()
            raise KeyboardInterrupt
        remember()

    with monkeypatch.context() as patch:
        patch.setattr(sums, "remember_released", forgets_the_second_time)
        with pytest.raises(KeyboardInterrupt):
            runs.train(engine, 1)
    assert engine.steps_taken == 2
    runs.train(engine, 1)
    assert engine.steps_taken == 3
