"""What must never pass silently: losses of a wrong shape, changed inputs, freed graphs, foreign gradients, rounding."""

import gc

import oracle
import pytest
import torch
from case_models import two_linears
from case_types import project
from cases import case
from comparing import assert_close, assert_dicts_close, every_pass, gradients, ready, truth
from torch import nn
from torch.nn import functional as F

import ghostclip
from ghostclip import GhostClipError, GradientLeakError, LossShapeError, StaleInputError


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        (lambda out: out.sum(1, keepdim=True), r"take \[:, 0\] of them"),
        (lambda out: out, "average over all dimensions but the first"),
        (lambda out: out.mean(), "reduction=.none."),
        (lambda out: out.sum(1).unsqueeze(0), "average over all dimensions but the first"),
        (lambda out: F.mse_loss(out, torch.zeros_like(out)), "reduction=.none."),
    ],
    ids=["[B, 1]", "[B, 2]", "scalar", "[1, B]", "mean loss"],
)
def test_losses_of_another_shape_are_refused_by_every_call(wrong, remedy):
    model = ghostclip.wrap(two_linears())
    clipper = ghostclip.GhostClipper(model)
    for call in (clipper.norms, clipper.per_example_grads, clipper.backward):
        with pytest.raises(LossShapeError, match=remedy) as error:
            call(wrong(model(torch.randn(5, 3).double())))
        assert "per example" in str(error.value)
        assert isinstance(error.value, ValueError)
    assert all(p.grad is None for p in model.parameters())


def test_parameters_are_no_losses():
    """Norms of zero would say that no example moves them."""
    model = nn.Linear(3, 4)
    clipper = ghostclip.GhostClipper(model)
    for call in (clipper.norms, clipper.per_example_grads, clipper.backward):
        with pytest.raises(LossShapeError, match="compute them from the batch"):
            call(model.bias)
    assert model.bias.grad is None


@pytest.mark.parametrize("name", ["linear", "linear 3-D", "conv2d plain", "embedding repeated", "layernorm 3-D",
                                  "groupnorm 4-D", "lstm output", "gru output"])  # fmt: skip
@pytest.mark.parametrize("call", ["norms", "per_example_grads", "backward"])
def test_an_input_changed_in_place_is_noticed(name, call):
    row = case(name)
    model, clipper, _ = ready(row)
    (x,) = row.inputs()
    losses = row.losses(model(x))
    x.zero_()
    with pytest.raises(StaleInputError, match="in place"):
        getattr(clipper, call)(losses)
    assert all(p.grad is None for p in model.parameters())


def test_the_input_of_a_frozen_layer_may_change():
    row = case("frozen first")
    model, clipper, _ = ready(row)
    (x,) = row.inputs()
    losses = row.losses(model(x))
    x.zero_()
    assert_close(clipper.norms(losses), oracle.norms(truth(row)), 1e-10)


@pytest.mark.parametrize("second", ["norms", "per_example_grads", "backward"])
@pytest.mark.parametrize("first", ["norms", "per_example_grads", "backward"])
def test_a_freed_graph_is_named_with_its_remedy(first, second):
    _, clipper, losses = ready(case("mlp in place"))
    getattr(clipper, first)(losses)
    with pytest.raises(GhostClipError, match="retain_graph=True"):
        getattr(clipper, second)(losses)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_zeroed_gradient_is_no_leak(set_to_none):
    row = case("mlp in place")
    model, clipper, losses = ready(row)
    losses.sum().backward()
    model.zero_grad(set_to_none=set_to_none)
    for _ in range(2):
        clipper.backward(row.losses(model(*row.inputs())))
        assert_dicts_close(gradients(model), oracle.clipped_sum(truth(row), 1.0), 1e-10)
        model.zero_grad(set_to_none=set_to_none)


LEAKS = {
    "backward": lambda model, losses: losses.sum().backward(),
    "assignment": lambda model, losses: setattr(model[0].bias, "grad", torch.ones_like(model[0].bias)),
    "one parameter": lambda model, losses: model[0].bias.backward(torch.ones_like(model[0].bias)),
}


@every_pass
@pytest.mark.parametrize("leak", LEAKS.values(), ids=LEAKS)
@pytest.mark.parametrize("first", [True, False])
def test_a_gradient_from_elsewhere_is_refused_and_left_there(second_pass, leak, first):
    row = case("mlp in place")
    model, clipper, losses = ready(row, second_pass=second_pass)
    if not first:
        clipper.backward(losses)
    leak(model, row.losses(model(*row.inputs())))
    before = {name: value.clone() for name, value in gradients(model).items()}
    with pytest.raises(GradientLeakError, match="zero_grad"):
        clipper.backward(row.losses(model(*row.inputs())))
    assert all(torch.equal(value, before[name]) for name, value in gradients(model).items())


@pytest.mark.parametrize("norm_strategy", ["auto", "gram", "direct"])
def test_near_constant_inputs_do_not_cancel(norm_strategy):
    model = nn.Linear(8, 6, bias=False)
    x = 1.0 + 4e-4 * torch.randn(3, 256, 8)
    coefficients = torch.randn(3, 256, 6)
    coefficients -= coefficients.mean(dim=1, keepdim=True)
    exact = torch.einsum("btp,btd->bpd", coefficients.double(), x.double()).flatten(1).norm(dim=1)
    gram = ((x @ x.mT) * (coefficients @ coefficients.mT)).sum((1, 2)).abs().sqrt()
    assert float(((gram - exact) / exact).abs().max()) > 0.05, "the plain Gram form should fail here"
    clipper = ghostclip.GhostClipper(model, norm_strategy=norm_strategy)
    norms = clipper.norms((model(x) * coefficients).sum((1, 2)))
    assert_close(norms, exact, 1e-3)


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("name", ["cnn", "transformer", "lstm decoder"])
def test_abandoned_forwards_leak_nothing(name):
    row = case(name)
    model, clipper, losses = ready(row)
    clipper.norms(losses)
    for _ in range(8):  # so many calls are noted
        model(*row.inputs(batch=3))
    before = live_tensors()
    for _ in range(3):
        model(*row.inputs(batch=3))
    assert live_tensors() <= before
    assert_close(clipper.norms(row.losses(model(*row.inputs()))), oracle.norms(truth(row)), 1e-10)


def test_unused_parameters_answer_zero_every_time():
    model, clipper, losses = ready(case("branches of the loss"))
    clipper.norms(losses)
    x = torch.randn(4, 5, dtype=torch.float64)
    per = clipper.norms(project(model.second(x)), per="parameter")
    assert list(per) == ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert not per["first.weight"].any()
    assert per["second.weight"].all()
    grads = clipper.per_example_grads(project(model.second(x)))
    assert grads["first.weight"].shape == (4, 5, 5)
    assert not grads["first.weight"].any()
