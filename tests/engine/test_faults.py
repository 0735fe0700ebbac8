"""Exceptions and odd values in a logical batch: nothing unclipped or uncharged is released, and training goes on."""

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
import torch
from checked_training import NORM, RATE, Broken, Training, broken, small_engine
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ghostclip import PrivacyError
from ghostclip.clipping import Custom, PerLayer
from ghostclip.engine import PrivacyEngine

PLACES: dict[str, Callable[[PrivacyEngine, pytest.MonkeyPatch], object]] = {
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


@pytest.mark.parametrize("place", PLACES)
def test_an_exception_at_any_stage_of_a_step(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(small_engine())
    training.checked_step()
    engine, before = training.engine, runs.weights(training.engine.model)
    with monkeypatch.context() as patch:
        PLACES[place](engine, patch)
        with pytest.raises(Broken):
            engine.step(next(runs.nonempty(engine)), runs.losses_of)
    late = place in ("noise", "zero_grad")
    assert engine.steps_taken == 1 + late
    assert torch.equal(runs.weights(engine.model), before) == (place != "zero_grad")
    assert all(parameter.grad is None for parameter in engine.model.parameters())
    training.checked_step()


def test_an_optimizer_that_fails_half_way() -> None:
    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                with torch.no_grad():
                    self.param_groups[0]["params"][0].add_(self.param_groups[0]["params"][0].grad)
                raise Broken
            return super().step(closure)

    model = runs.network()
    optimizer = Failing(model.parameters(), lr=RATE)
    training = Training(runs.engine_for(model, optimizer, clipping=NORM, max_physical_batch_size=4, self_check=False))
    with pytest.raises(Broken):
        training.step()
    assert training.engine.steps_taken == 1
    optimizer.fails = False
    training.checked_step()


def test_a_policy_s_function_that_fails() -> None:
    fails = True

    def weights(norms: Tensor) -> Tensor:
        return broken() if fails else (NORM / norms).clamp(max=1.0)

    training = Training(small_engine(clipping=Custom(weights, NORM)))
    with pytest.raises(Broken):
        training.engine.step(next(runs.nonempty(training.engine)), runs.losses_of)
    fails = False
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


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "DataLoader worker .*(killed by signal|exited unexpectedly)"),
        (lambda: os._exit(3), "DataLoader worker .*exited unexpectedly"),
        (broken, "Caught Broken"),
    ],
    ids=["killed", "exited", "raised"],
)
def test_a_worker_s_death_costs_its_batch_and_no_more(
    end: Callable[[], Any], error: str, persistent: bool, tmp_path: Path
) -> None:
    loader = DataLoader(Deadly(tmp_path / "once", end), 8, num_workers=1, persistent_workers=persistent)
    with pytest.warns(UserWarning, match="is replaced by"):
        training = Training(small_engine(data=loader))
    with pytest.raises(Broken if "Broken" in error else RuntimeError, match=error):
        training.step()
    assert training.engine.steps_taken == 0
    for _ in range(4):
        training.checked_step()
    training.engine.detach()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_what_was_drawn_ahead_of_a_failure_is_drawn_again(tmp_path: Path) -> None:
    def members(once: Path) -> list[list[Tensor]]:
        torch.manual_seed(0)
        loader = DataLoader(Deadly(once, lambda: os._exit(3)), 8, num_workers=1, prefetch_factor=4)
        with pytest.warns(UserWarning, match="is replaced by"):
            engine = small_engine(data=loader, noise="test", seed=3)
        found = []
        for batch in engine.batches():
            found.append([])
            with contextlib.suppress(RuntimeError):
                found[-1] += [inputs for inputs, _ in batch.physical()]
            batch.discard()
        engine.detach()
        return found

    (tmp_path / "never").touch()
    (lost, *rest), (_, *expected) = members(tmp_path / "once"), members(tmp_path / "never")
    assert lost == []
    assert len(rest) == len(expected) == 2
    for found, wanted in zip(rest, expected, strict=True):
        torch.testing.assert_close(torch.cat(found), torch.cat(wanted), rtol=0, atol=0)


# --- values that are no numbers, and batches of nobody


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 3e38])
@pytest.mark.parametrize("place", ["inputs", "activations", "losses"])
@pytest.mark.parametrize("changes", [{}, {"second_pass": "cached"}, {"clipping": PerLayer(NORM)}], ids=str)
@pytest.mark.one_in(4)
def test_an_example_beyond_all_numbers_moves_no_other(value: float, place: str, changes: dict[str, Any]) -> None:
    def losses_with(model: nn.Sequential, examples: list[Tensor], scale: float) -> Tensor:
        factor = torch.ones(len(examples[1]), 1)
        factor[0] = scale
        inputs = examples[0] * (factor if place == "inputs" else 1.0)
        hidden = model[1](model[0](inputs)) * (factor if place == "activations" else 1.0)
        losses = nn.functional.cross_entropy(model[2](hidden), examples[1], reduction="none")
        return losses * (factor[:, 0] if place == "losses" else 1.0)

    def release(scale: float) -> Tensor:
        model = runs.network()
        torch.manual_seed(2)
        options = {"clipping": NORM, "batch_size": 24, "self_check": False, **changes}
        engine = runs.engine_for(model, torch.optim.SGD(model.parameters(), lr=24.0), runs.data(), **options)
        before = runs.weights(model)
        for batch in engine.batches():
            engine.step(batch, lambda model, examples: losses_with(model, examples, scale))
        assert engine.steps_taken == 1
        return runs.weights(model) - before

    without = release(float("nan"))
    found = release(value)
    assert torch.isfinite(found).all()
    if abs(value) == float("inf") or value != value or place == "losses":
        torch.testing.assert_close(found, without, atol=1e-6, rtol=0)
    assert float((found - without).norm()) <= NORM * (1 + 1e-4)


@pytest.mark.parametrize("by_hand", [False, True], ids=["step", "by hand"])
def test_empty_batches_are_steps_wherever_they_come(by_hand: bool, tmp_path: Path) -> None:
    engine = small_engine(data=runs.data(3), batch_size=1, noise_multiplier=1.0)
    training = Training(engine, by_hand)
    empty = 0
    for step in range(1, 25):
        before = runs.weights(engine.model)
        batch = training.step()
        empty += not batch.sizes
        assert not torch.equal(runs.weights(engine.model), before)
        assert engine.steps_taken == step
        if not batch.sizes:
            engine.save(tmp_path / "x")
            assert engine.restore(tmp_path / "x").steps == step
            training.epoch = iter(())
    assert empty


def test_a_foreign_gradient_is_still_complained_about_after_a_failure() -> None:
    engine = small_engine()
    batch = next(runs.nonempty(engine))
    runs.losses_of(engine.model, runs.data()[:4]).mean().backward()
    with pytest.raises(PrivacyError, match="filled or changed by something other"):
        engine.step(batch, runs.losses_of)


def test_nothing_of_a_batch_is_left_in_memory_after_a_failure() -> None:
    engine = small_engine()
    with pytest.raises(Broken):
        engine.step(next(runs.nonempty(engine)), broken)
    sums = engine._steps._sums
    assert not sums._totals
    assert not sums._new.totals
    assert sums.count == 0
