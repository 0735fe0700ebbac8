"""What someone does who comes from a DataLoader's loop or from Opacus, and what the error tells them to do instead."""

from collections.abc import Callable
from typing import Any

import private_runs as runs
import pytest
import torch
from torch import nn

import ghostclip
from ghostclip import GradientLeakError, LossShapeError, PrivacyError, VerificationError
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


def by_hand(engine: PrivacyEngine, backward: Callable[[torch.Tensor], Any]) -> None:
    """The written-out loop over one batch, with a backward of the user's choice."""
    for examples in next(runs.nonempty(engine)).physical():
        backward(runs.losses_of(engine.model, examples))
    engine.optimizer.step()


def test_backward_of_the_losses_themselves(engine: PrivacyEngine) -> None:
    with pytest.raises(PrivacyError, match=r"a plain \.backward\(\) doesn't count"):
        by_hand(engine, lambda losses: losses.mean().backward())


def test_backward_of_both_kinds(engine: PrivacyEngine) -> None:
    def both(losses: torch.Tensor) -> None:
        losses.sum().backward(retain_graph=True)
        engine.backward(losses)

    with pytest.raises(GradientLeakError, match=r"zero_grad"):
        by_hand(engine, both)


def test_no_zero_grad(engine: PrivacyEngine) -> None:
    for _ in range(2):
        by_hand(engine, engine.backward)
    assert engine.steps_taken == 2


@pytest.mark.parametrize("call", [ghostclip.wrap, ghostclip.unwrap, ghostclip.check, ghostclip.GhostClipper])
def test_no_module(call: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module; got function"):
        call(lambda x: x)


def test_arguments_of_wrap() -> None:
    with pytest.raises(TypeError, match=r"batch_dim must be an int or \{name pattern: int\}; got 'first'"):
        ghostclip.wrap(nn.Linear(2, 2), batch_dim="first")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"replace must be a dict such as .*; got 'GroupNorm'"):
        ghostclip.wrap(nn.Linear(2, 2), replace="GroupNorm")  # type: ignore[arg-type]


def test_a_warning_names_the_line_that_builds_the_engine() -> None:
    loader = torch.utils.data.DataLoader(runs.data(), batch_size=4, shuffle=True)
    model = runs.network()
    with pytest.warns(UserWarning, match="RandomSampler is replaced") as seen:
        PrivacyEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, noise_multiplier=1.0)
    assert seen[0].filename == __file__
