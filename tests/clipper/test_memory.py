"""What the passes form and what they hold, counted at torch's dispatcher: no clock, no operating system."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from case_fallback import with_parameters
from comparing import every_pass, gradients
from dispatched import Live, Ops
from torch import Tensor, nn

import ghostclip


def chain(depth: int, width: int) -> nn.Sequential:
    """Linear layers of one width, with activations."""
    return nn.Sequential(*[part for _ in range(depth) for part in (nn.Linear(width, width), nn.Tanh())])


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).sum(1)


FIRST_PASS = {
    "linear 3-D": (lambda: nn.Sequential(nn.Linear(13, 11), nn.ReLU(), nn.Linear(11, 7)), (5, 13)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 7, 3)), (3, 8, 8)),
    "attention": (lambda: nn.TransformerEncoderLayer(22, 2, 13, 0.0, batch_first=True), (5, 22)),
}


@pytest.mark.parametrize("name", FIRST_PASS)
def test_the_first_pass_forms_no_weight_gradient(name):
    build, shape = FIRST_PASS[name]
    model, x = build(), torch.randn(4, *shape)
    clipper = ghostclip.GhostClipper(model, norm_strategy="gram")
    clipper.norms(losses(model, x))  # strategies are chosen and the mixing test has passed
    second = losses(model, x)
    shapes = {tuple(p.shape) for p in model.parameters()} | {tuple(p.shape)[::-1] for p in model.parameters()}
    with Ops() as ops:
        clipper.norms(second)
    assert ops.seen
    for op, made, args in ops.seen:
        if op == "convolution_backward":
            assert args[-1][1:] == [False, False], "convolution_backward was asked for the weight's gradient"
        elif op in ("mm", "addmm"):
            assert not shapes & set(made), f"{op} formed a gradient of shape {made}"


@pytest.mark.parametrize("norm_strategy", ["gram", "direct"])
def test_no_big_tensor_outlives_its_layer_in_reweight(norm_strategy):
    examples, positions, width, depth = 3, 19, 23, 6
    model = chain(depth, width)
    clipper = ghostclip.GhostClipper(model, norm_strategy=norm_strategy, second_pass="reweight")
    x = torch.randn(examples, positions, width)
    clipper.norms(losses(model, x))
    second = losses(model, x)
    square, gradient = 4 * examples * positions**2, 4 * examples * width**2
    with Live({square, gradient}) as live:
        clipper.backward(second, retain_graph=True)
    assert live.peak <= 3 * max(square, gradient), "tensors of one layer's size pile up over layers"
    assert live.bytes() <= max(square, gradient), "more than one reused workspace is left"


PRODUCTS = {
    "einsum": lambda x, p: torch.einsum("bd,dp->bp", x, p),
    "einsum of a transpose": lambda x, p: torch.einsum("bd,pd->bp", x, p),
    "matrix first": lambda x, p: torch.einsum("dp,bd->bp", p, x),
    "from the left": lambda x, p: (p @ x.T).T,
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_products_with_a_bare_parameter_form_no_gradient_of_an_example(product):
    examples, width = 5, 23
    model = with_parameters(lambda m, x: product(x, m.p), {"p": (width, width)})
    clipper = ghostclip.GhostClipper(model)
    for _ in range(2):  # the second time measures: plans are made
        x = torch.randn(examples, width)
        with Live({4 * examples * width**2}) as live:
            clipper.clip(losses, x)
    assert live.peak == 0


def peak(model: nn.Module, step: Callable[[], Any], with_gradients: bool = False) -> int:
    """Most bytes of the second of two steps, when plans are made and workspaces are there."""
    for _ in range(2):
        model.zero_grad(set_to_none=with_gradients)
        with Live() as live:
            step()
    return live.peak


@pytest.mark.parametrize(("second_pass", "allowed"), [("reweight", 1.25), ("cached", 2.0)])
def test_peak_memory_beside_ordinary_training(second_pass, allowed):
    model, x = chain(8, 24), torch.randn(8, 32, 24)
    ordinary = peak(model, lambda: losses(model, x).sum().backward())
    clipper = ghostclip.GhostClipper(model, second_pass=second_pass)
    assert peak(model, lambda: clipper.backward(losses(model, x))) <= allowed * ordinary


@every_pass
def test_a_finished_step_leaves_gradients_only(second_pass):
    model = chain(4, 24)
    clipper = ghostclip.GhostClipper(model, second_pass=second_pass)
    parameters = sum(4 * p.numel() for p in model.parameters())
    x = torch.randn(8, 32, 24)
    clipper.backward(losses(model, x))
    with Live() as live:
        clipper.backward(losses(model, x))
        gc.collect()
        left = live.bytes()
    assert left <= parameters + 4 * 8 * 24 * 24, "activations, inputs or gradients outlive the step"
    assert not any(value.requires_grad for value in gradients(model).values())


def test_clip_layer_by_layer_holds_the_graph_and_one_layer():
    """The graph stays for an example that may turn out not to be finite; no layer's gradients outlive it."""
    model, x = chain(6, 256), torch.randn(512, 256)
    clipper = ghostclip.GhostClipper(model, ghostclip.clipping.PerLayer(1.0))

    def means(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean(1)

    ordinary = peak(model, lambda: means(model, x).mean().backward(), True)
    for step in (lambda: clipper.clip(means, x), lambda: clipper.backward(means(model, x))):
        assert peak(model, step, True) <= 1.4 * ordinary
