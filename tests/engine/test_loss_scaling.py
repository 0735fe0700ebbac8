"""Loss scaling: what it changes in float16, that it changes nothing else, and GradScalers around private steps."""

import copy
from collections.abc import Callable
from typing import Any

import private_runs as runs
import pytest
import torch
from cases import case
from comparing import assert_close, assert_dicts_close, gradients
from torch import Tensor, nn
from torch.amp import GradScaler

import ghostclip
from ghostclip import LossShapeError, PrivacyError

SCALE = 2.0**12
every_pass = pytest.mark.parametrize("second_pass", ["reweight", "cached"])
POLICIES = {"flat": 0.7, "layers": ghostclip.clipping.PerLayer(0.7), "automatic": ghostclip.clipping.Automatic(0.7)}


@every_pass
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["transformer", "bare added", "tied by F.linear", "bare repeated"])
@pytest.mark.one_in(4)
def test_a_scale_changes_no_result(name: str, policy: str, second_pass: str) -> None:
    row = case(name)
    found: list[Any] = []
    for scale in (1.0, SCALE):
        model = row.model()
        clipper = ghostclip.GhostClipper(
            model, POLICIES[policy], second_pass=second_pass, loss_scale=scale,
            memory_budget=1 if second_pass == "reweight" else None,  # keeps nothing
        )  # fmt: skip
        losses = row.losses(model(*row.inputs(4)))
        by_parameter = clipper.norms(losses, per="parameter", retain_graph=True)
        each = clipper.per_example_grads(losses, retain_graph=True)
        result = clipper.backward(losses, retain_graph=True)
        clipper.backward(losses)
        norms = result.norms if isinstance(result.norms, dict) else {"": result.norms}
        found.append((by_parameter, each, norms, gradients(model)))
    for plain, scaled in zip(*found, strict=True):
        assert_dicts_close(scaled, plain, 1e-12)


@every_pass
def test_small_gradients_under_autocast_need_it(second_pass: str) -> None:
    """Losses so small that float16 gradients of theirs vanish."""
    model, inputs = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 3)), torch.randn(4, 12)

    def result_of(scale: float, narrow: bool) -> tuple[Tensor, Tensor]:
        clipper = ghostclip.GhostClipper(copy.deepcopy(model), 1e-7, second_pass=second_pass, loss_scale=scale)
        with torch.autocast("cpu", torch.float16, enabled=narrow):
            outputs = clipper.model(inputs)
        norms = clipper.backward(1e-8 * (outputs.float() - 1).square().sum(1)).norms
        return norms, torch.cat([grad.flatten() for grad in gradients(clipper.model).values()])

    (norms, total), (lost, _), (found, kept) = result_of(1.0, False), result_of(1.0, True), result_of(2.0**20, True)
    assert float((lost / norms - 1).abs().max()) > 0.2
    assert float((found / norms - 1).abs().max()) < 0.01
    assert float((kept - total).norm() / total.norm()) < 0.01


def test_losses_too_faint_for_float16_itself_are_refused_and_may_be_scaled() -> None:
    """What float16 can't scale up without overflow shows nothing of whose rows are whose."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).half()
    inputs = torch.randn(6, 3).half()
    with pytest.raises(
        ghostclip.UnsupportedModelError, match=r"float16 gradients are too small .* Use bfloat16 or float32"
    ):
        ghostclip.GhostClipper(model).norms(model(inputs).sum(1) * 2.0**-24)
    norms = [
        ghostclip.GhostClipper(model, loss_scale=scale).norms(model(inputs).sum(1) * 2.0**power)
        for scale, power in ((1024.0, -14), (1.0, -8))
    ]
    assert float((norms[0] * 2.0**6 / norms[1] - 1).abs().max()) < 0.05


@every_pass
@pytest.mark.parametrize("layers", [1, 2])
def test_sums_that_float16_cannot_hold_are_exact_nevertheless(second_pass: str, layers: int) -> None:
    model = nn.Sequential(*[nn.Linear(3, 3, bias=False) for _ in range(layers)])
    inputs = torch.ones(40, 3)
    clipper = ghostclip.GhostClipper(model, 1e4, second_pass=second_pass, loss_scale=4096.0)
    for times in (1, 2):  # several backwards add up, in this case as well
        with torch.autocast("cpu", torch.float16):
            outputs = model(inputs)
        clipper.backward(outputs.float().sum(1) * 4)
        assert_close(model[-1].weight.grad, times * 40 * 4 * model[:-1](inputs)[0].detach().expand(3, 3), 1e-2)


@every_pass
def test_an_example_that_overflows_for_the_scale_is_left_out(second_pass: str) -> None:
    model = nn.Linear(3, 2)
    inputs = torch.randn(4, 3)
    factors = torch.tensor([1.0, 1.0, 1000.0, 1.0])

    def losses(keep: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            outputs = model(inputs[keep])
        return outputs.float().sum(1) * factors[keep]

    clipper = ghostclip.GhostClipper(model, 1.0, second_pass=second_pass, loss_scale=4096.0)
    result = clipper.backward(losses(torch.arange(4)))
    assert result.weights[2] == 0
    assert not result.norms[2].isfinite()
    found = {name: grad.clone() for name, grad in gradients(model).items()}
    model.zero_grad()
    clipper.backward(losses(torch.tensor([0, 1, 3])))
    assert_dicts_close(found, gradients(model), 1e-3)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


def trained(optimizer: str, scale: Any, by_hand: bool = True) -> tuple[ghostclip.PrivacyEngine, list[Tensor]]:
    """The engine after an epoch of the usual loop or of its own, and each step's released gradient and new weights."""
    model, seen = runs.network(), list[Tensor]()
    torch.manual_seed(5)
    engine = runs.engine_for(
        model, OPTIMIZERS[optimizer](model.parameters()), batch_size=2, noise_multiplier=1.3, clipping=0.5,
        max_physical_batch_size=2, noise="test", seed=3, loss_scale=scale,
    )  # fmt: skip
    scaler = scale if isinstance(scale, GradScaler) else GradScaler("cpu", enabled=False)
    runs.on_step(engine.optimizer, lambda: seen.append(runs.grads(model).clone()))
    for batch in engine.batches():
        if not by_hand:
            engine.step(batch, runs.losses_of)
        else:
            for examples in batch.physical():
                engine.backward(scaler.scale(runs.losses_of(model, examples)))
            scaler.step(engine.optimizer)
            scaler.update()
            engine.optimizer.zero_grad()
        seen.append(runs.weights(model))
    return engine, seen


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("growth", [1, 2000])
def test_the_loop_with_a_grad_scaler_is_the_loop_without(optimizer: str, growth: int) -> None:
    """Same noise, same sums, same updates, empty batches among them; whatever the scale grows to."""
    scaler = GradScaler("cpu", growth_interval=growth)
    engine, found = trained(optimizer, scaler)
    for one, other in zip(found, trained(optimizer, 1.0)[1], strict=True):
        assert_close(one, other, 1e-5)
    assert engine.steps_taken == 12
    assert scaler.get_scale() == 65536.0 * (2.0**12 if growth == 1 else 1.0)
    engine.detach()


@pytest.mark.parametrize("scale", [1024.0, GradScaler("cpu"), GradScaler("cpu", enabled=False)])
def test_the_engines_own_step_scales_by_itself(scale: Any) -> None:
    for one, other in zip(trained("sgd", scale, False)[1], trained("sgd", 1.0)[1], strict=True):
        assert_close(one, other, 1e-5)


LAST = r"engine\.backward\(scaler\.scale\(losses\)\)"
# From a scaler and losses to those that are handed over.
REFUSED: dict[str, tuple[Callable[[GradScaler, Tensor], Tensor], str]] = {
    "not scaled": (lambda scaler, losses: losses, LAST),
    "divided": (lambda scaler, losses: scaler.scale(losses) / 2, LAST),
    "another factor": (lambda scaler, losses: 3 * losses, LAST),
    "float16": (lambda scaler, losses: scaler.scale(losses.half()), r"output\.float\(\)"),
    "in engine.step": (
        lambda scaler, losses: scaler.scale(losses), r"return them as they are, engine\.step\(\) scales by itself",
    ),
    "another scaler": (lambda scaler, losses: scaler.scale(losses), r"PrivacyEngine\(\.\.\., loss_scale=scaler\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_losses_scaled_otherwise_are_refused(name: str) -> None:
    scaled, message = REFUSED[name]
    scaler, other = (GradScaler("cpu", init_scale=8.0) for _ in range(2))
    engine = runs.engine_for(runs.network(), loss_scale=scaler, noise_multiplier=1.0, batch_size=24)
    batch, before = next(iter(engine.batches())), runs.weights(engine.model)

    def step() -> None:
        if name == "in engine.step":
            engine.step(batch, lambda model, examples: scaled(scaler, runs.losses_of(model, examples)))
        for examples in batch.physical():
            engine.backward(scaled(scaler, runs.losses_of(engine.model, examples)))
        other.scale(torch.ones(()))
        other.step(engine.optimizer)

    with pytest.raises(PrivacyError, match=message):
        step()
    assert torch.equal(runs.weights(engine.model), before)
    assert engine.steps_taken == 0


def test_sums_are_unscaled_already() -> None:
    scaler, model = GradScaler("cpu"), runs.network()
    engine = runs.engine_for(model, loss_scale=scaler, max_physical_batch_size=None)
    batch = next(iter(engine.batches()))
    for examples in batch.physical():
        engine.backward(scaler.scale(runs.losses_of(model, examples)))
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.unscale_(engine.optimizer)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_scales_that_make_no_sense_are_refused() -> None:
    for wrong in (0.0, 3.0, -2.0, float("inf"), 2.0**30):
        with pytest.raises(ValueError, match=r"loss_scale must be a power of two .*got"):
            ghostclip.GhostClipper(nn.Linear(2, 2), loss_scale=wrong)
    with pytest.raises(ValueError, match="compile and loss_scale"):
        ghostclip.GhostClipper(nn.Linear(2, 2), loss_scale=2.0, compile=True)
    clipper = ghostclip.GhostClipper(nn.Linear(2, 2), loss_scale=2.0**17)
    with pytest.raises(LossShapeError, match=r"torch\.float16 can't be multiplied with loss_scale=131072"):
        clipper.backward(clipper.model(torch.ones(3, 2)).sum(1).half())
