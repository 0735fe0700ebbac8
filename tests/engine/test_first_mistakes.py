"""What someone does who comes from a DataLoader's loop or from Opacus, and what the error tells them to do instead."""

from collections.abc import Callable
from typing import Any

import private_runs as runs
import pytest
import torch
from torch import nn

import ghostclip
from ghostclip import LossShapeError, PrivacyError, VerificationError
from ghostclip.engine import PrivacyEngine


@pytest.fixture
def engine() -> PrivacyEngine:
    return runs.engine_for(runs.network(), noise_multiplier=1.0, max_physical_batch_size=2)


def refused(engine: PrivacyEngine, loss_fn: Any, error: type[Exception], message: str) -> None:
    """A step raises with that message; nothing moves, nothing is charged, and training goes on."""
    before = runs.weights(engine.model)
    with pytest.raises(error, match=message):
        engine.step(next(runs.nonempty(engine)), loss_fn)
    assert torch.equal(runs.weights(engine.model), before)
    assert engine.steps_taken == 0
    engine.step(next(runs.nonempty(engine)), runs.losses_of)
    assert engine.steps_taken == 1


def test_a_logical_batch_unpacked_as_a_loader_s(engine: PrivacyEngine) -> None:
    with pytest.raises(TypeError, match=r"can't be unpacked.*engine\.step\(batch, loss_fn\).*batch\.physical\(\)"):
        _inputs, _targets = next(runs.nonempty(engine))


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_criterion_in_the_loss_function_s_place(engine: PrivacyEngine, reduction: str) -> None:
    refused(engine, nn.CrossEntropyLoss(reduction=reduction), TypeError, r"CrossEntropyLoss.*criterion\(model")


def test_losses_in_the_loss_function_s_place(engine: PrivacyEngine) -> None:
    refused(engine, torch.zeros(2, requires_grad=True), TypeError, r"got Tensor.*engine\.backward\(losses\)")


def test_a_mean_loss(engine: PrivacyEngine) -> None:
    refused(engine, lambda model, batch: runs.losses_of(model, batch).mean(), LossShapeError, r'reduction="none"')


def test_a_mean_loss_blown_up_to_the_batch(engine: PrivacyEngine) -> None:
    def blown_up(model: nn.Module, batch: Any) -> torch.Tensor:
        losses = runs.losses_of(model, batch)
        return losses.mean().expand(len(losses))

    refused(engine, blown_up, VerificationError, r'own example only \(reduction="none"\)')


def test_tensors_that_are_no_dataset() -> None:
    model = runs.network()
    with pytest.raises(TypeError, match=r"tuple of 2 tensors \(\[24, 5\], \[24\]\).*TensorDataset\(inputs, targets\)"):
        runs.engine_for(model, dataset=(torch.zeros(24, 5), torch.zeros(24)), noise_multiplier=1.0)


def test_a_loop_over_a_loader_of_one_s_own(engine: PrivacyEngine) -> None:
    with pytest.raises(PrivacyError, match=r"not one of a DataLoader of yours.*for batch in engine\.batches\(\)"):
        engine.step(runs.data()[:4], runs.losses_of)


@pytest.mark.parametrize("call", [ghostclip.wrap, ghostclip.unwrap, ghostclip.check, ghostclip.GhostClipper])
def test_no_module(call: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module; got function"):
        call(lambda x: x)
