"""Precisions and modes of everyday training: narrow types, autocast, checkpointing, moving a model.

Narrow arithmetic rounds a gradient differently for one example alone than in a batch, so where it is used no loop is
an exact reference. What must hold then: our errors stay within a small multiple of the loop's own, and no example's
share exceeds the bound.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import oracle
import pytest
import torch
from case_models import Wired, cnn, transformer
from case_types import project
from cases import case
from comparing import assert_close, assert_dicts_close, every_pass, gradients, truth
from dispatched import Live
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ghostclip

MAX_NORM = 0.5


def small(name: str) -> tuple[nn.Module, Tensor]:
    """A network in float32, and four examples."""
    torch.manual_seed(3)
    if name == "mlp":
        return nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 3)), torch.randn(4, 12)
    if name == "cnn":
        return cnn(nn), torch.randn(4, 1, 18, 18)
    return transformer(nn), torch.randint(11, (4, 9))


def losses_of(outputs: Tensor) -> Tensor:
    """Losses of the kind that doesn't overflow in float16, computed in float32."""
    return (outputs.float() - 1).square().sum(1)


def loop(model: nn.Module, inputs: Tensor, precision: Any) -> Tensor:
    """Gradients of single examples by plain autograd, [B, parameters] in float64."""
    with precision:
        grads = oracle.per_example_grads(model, losses_of, (inputs,))
    return torch.cat([each.flatten(1) for each in grads.values()], 1).double()


def assert_as_near_as_the_loop(found: Tensor, narrow: Tensor, exact: Tensor, eps: float) -> None:
    """``found`` errs by at most four times what the loop errs in the same precision, and a rounding."""
    assert (found.double() - exact).norm() <= 4 * (narrow - exact).norm() + 4 * eps * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
@every_pass
@pytest.mark.one_in(2)
def test_autocast_is_as_exact_as_the_loop_under_autocast(name, dtype, second_pass):
    model, inputs = small(name)
    autocast = torch.autocast("cpu", dtype)
    exact, narrow = loop(model, inputs, nullcontext()), loop(model, inputs, autocast)
    clipper = ghostclip.GhostClipper(model, MAX_NORM, second_pass=second_pass)
    with autocast:
        outputs = model(inputs)
    result = clipper.backward(losses_of(outputs))
    assert result.norms.dtype == torch.float32
    eps = torch.finfo(dtype).eps
    assert_as_near_as_the_loop(result.norms, narrow.norm(dim=1), exact.norm(dim=1), eps)
    weights = (MAX_NORM / exact.norm(dim=1)).clamp(max=1.0)
    total = torch.cat([g.flatten() for g in gradients(model).values()])
    loops = (MAX_NORM / narrow.norm(dim=1)).clamp(max=1.0) @ narrow
    assert_as_near_as_the_loop(total, loops, weights @ exact, eps)
    assert (result.weights * result.norms <= MAX_NORM).all()


def recomputed(block: nn.Module) -> nn.Module:
    return Wired(lambda m, x: checkpoint(m.block, x, use_reentrant=False), block=block)


def bytes_per_block(again: bool, prepare: Callable[[nn.Module], Callable[[Tensor], Any]]) -> float:
    """By how much the peak of a step grows with a block; of its second step, when plans are made."""
    peaks = []
    for depth in (6, 16):
        layers = [
            nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.LayerNorm(24), nn.Linear(24, 24)) for _ in range(depth)
        ]
        model, x = nn.Sequential(*(recomputed(each) if again else each for each in layers)), torch.randn(16, 64, 24)
        backward = prepare(model)
        for _ in range(2):
            model.zero_grad(set_to_none=False)
            with Live() as live:
                backward(model(x).square().sum((1, 2)))
        peaks.append(live.peak)
    return (peaks[1] - peaks[0]) / 10


@every_pass
@pytest.mark.slow
def test_checkpointing_keeps_its_saving(second_pass):
    def plain(model: nn.Module) -> Callable[[Tensor], Any]:
        return lambda losses: losses.sum().backward()

    def clipped(model: nn.Module) -> Callable[[Tensor], Any]:
        return ghostclip.GhostClipper(model, norm_strategy="gram", second_pass=second_pass).backward

    assert bytes_per_block(True, clipped) <= 1.1 * bytes_per_block(True, plain)
    assert bytes_per_block(True, plain) < 0.5 * bytes_per_block(False, plain)


def test_a_model_moved_to_another_device_and_back():
    row = case("transformer")
    model = row.model()
    clipper = ghostclip.GhostClipper(model, 0.1)
    clipper.backward(row.losses(model(*row.inputs())))
    state, old = copy.deepcopy(model.state_dict()), list(model.parameters())
    model.to("meta").to_empty(device="cpu")  # parameters become other objects here
    assert all(new is not previous for new, previous in zip(model.parameters(), old, strict=True))
    model.load_state_dict(state)
    model.zero_grad()
    clipper.backward(row.losses(model(*row.inputs())))
    assert_dicts_close(gradients(model), oracle.clipped_sum(truth(row), 0.1), 1e-10)


def test_a_clipper_follows_a_change_of_type():
    row = case("cnn")
    model = row.model()
    clipper = ghostclip.GhostClipper(model.float(), 0.1)
    assert clipper.norms(row.losses(model(*row.inputs(dtype=torch.float32)))).dtype == torch.float32
    model.double()
    found = clipper.norms(row.losses(model(*row.inputs())))
    assert found.dtype == torch.float64
    assert_close(found, oracle.norms(truth(row)), 1e-6)  # the parameters were rounded to float32 on the way


@pytest.mark.parametrize(("dims", "affine"), [(1, True), (2, False), (3, True)])
def test_batchnorm_in_eval_mode_beside_trained_layers(dims, affine):
    kinds = getattr(nn, f"Conv{dims}d"), getattr(nn, f"BatchNorm{dims}d")
    model = nn.Sequential(kinds[0](2, 4, 3), kinds[1](4, affine=affine), nn.Tanh()).double()
    model(torch.randn(8, 2, *[5] * dims, dtype=torch.float64))  # statistics of some public data
    model[1].eval()
    x = torch.randn(4, 2, *[5] * dims, dtype=torch.float64)
    expected = oracle.per_example_grads(model, project, (x,))
    clipper = ghostclip.GhostClipper(model, 0.1)
    before = model[1].running_mean.clone()
    clipper.backward(project(model(x)))
    assert_dicts_close(gradients(model), oracle.clipped_sum(expected, 0.1), 1e-10)
    assert torch.equal(model[1].running_mean, before)
