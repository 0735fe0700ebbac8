"""What must never pass silently: wrong losses, changed inputs, foreign gradients, mixed examples, NaN and infinity."""

import gc

import oracle
import pytest
import torch
from case_models import Wired, cnn, recurrent, transformer
from case_types import project
from cases import case
from comparing import assert_close, assert_dicts_close, gradients, ready, truth
from torch import nn
from torch.nn import functional as F

import ghostclip
from ghostclip import GhostClipError, GradientLeakError, LossShapeError, StaleInputError, VerificationError
from ghostclip.nn import GhostLayer

every_pass = pytest.mark.parametrize("second_pass", ["reweight", "cached"])


def two_linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def exact_or_refused(model, inputs, batch_dims=None, loss_fn=project, **wrap):
    """The model is either clipped as the loop clips it, or refused by one of our errors, which is returned."""
    expected = oracle.per_example_grads(model, loss_fn, inputs, batch_dims)
    try:
        clipper = ghostclip.GhostClipper(ghostclip.wrap(model, **wrap), clipping=0.1)
        clipper.backward(loss_fn(model(*inputs)))
    except GhostClipError as refusal:
        return refusal
    assert_dicts_close(gradients(model), oracle.clipped_sum(expected, 0.1), 1e-10)
    return None


# --- losses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        lambda out: out.sum(1, keepdim=True),
        lambda out: out,
        lambda out: out.mean(),
        lambda out: out.sum(1).unsqueeze(0),
        lambda out: F.mse_loss(out, torch.zeros_like(out)),
    ],
    ids=["[B, 1]", "[B, 2]", "scalar", "[1, B]", "mean loss"],
)
def test_losses_of_another_shape_are_refused_by_every_call(wrong):
    model = ghostclip.wrap(two_linears())
    clipper = ghostclip.GhostClipper(model)
    for call in (clipper.norms, clipper.per_example_grads, clipper.backward):
        with pytest.raises(LossShapeError, match=r"reduction=.none.") as error:
            call(wrong(model(torch.randn(5, 3).double())))
        assert "per example" in str(error.value)
        assert isinstance(error.value, ValueError)
    assert all(p.grad is None for p in model.parameters())


def test_flattened_token_losses_are_refused():
    model = ghostclip.wrap(nn.Linear(3, 2).double())
    tokens = model(torch.randn(4, 6, 3).double()).flatten(0, 1).sum(1)
    with pytest.raises(GhostClipError):
        ghostclip.GhostClipper(model).backward(tokens)
    assert model.weight.grad is None


def test_losses_without_a_graph_are_refused():
    model = ghostclip.wrap(two_linears())
    with pytest.raises(GhostClipError, match="no_grad"):
        ghostclip.GhostClipper(model).norms(model(torch.randn(5, 3).double()).sum(1).detach())


# --- unused and frozen ----------------------------------------------------------------------------------------------


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


def test_frozen_parameters_are_absent_and_get_no_gradient():
    model, clipper, losses = ready(case("frozen first"))
    assert list(clipper.norms(losses, per="parameter", retain_graph=True)) == ["second.weight", "second.bias"]
    assert list(clipper.norms(losses, per="layer", retain_graph=True)) == ["second"]
    clipper.backward(losses)
    assert model.first.weight.grad is None


# --- numbers that are not numbers -----------------------------------------------------------------------------------

FINITE_MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), (3,)),
    "linear 3-D": (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), (5, 3)),
    "conv": (lambda: cnn(nn), (1, 18, 18)),
    "lstm": (lambda: recurrent("LSTM", "both", nn, batch_first=True), (6, 4)),
    "gru": (lambda: recurrent("GRU", "both", nn, batch_first=True), (6, 4)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 6, 0.0, batch_first=True), (5, 8)),
}
SPOILT = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def check_spoilt(model, losses_of, second_pass, bad):
    """Example ``bad`` is not finite; the sum is what the others give, and nothing is raised, first batch or not."""
    everyone = torch.arange(5)
    others = everyone[everyone != bad]
    ghostclip.GhostClipper(model, clipping=0.5, second_pass=second_pass).backward(losses_of(others))
    expected = {name: value.clone() for name, value in gradients(model).items()}
    clipper = ghostclip.GhostClipper(model, clipping=0.5, second_pass=second_pass)
    for _ in range(2):
        model.zero_grad()
        result = clipper.backward(losses_of(everyone))
        assert float(result.weights[bad]) == 0.0
        assert bool((result.weights[others] > 0).all())
        assert_dicts_close(gradients(model), expected, 1e-12)


@every_pass
@pytest.mark.parametrize("value", SPOILT.values(), ids=SPOILT)
@pytest.mark.parametrize("name", FINITE_MODELS)
def test_a_spoilt_input_contributes_zero(name, value, second_pass):
    build, shape = FINITE_MODELS[name]
    model = build().double()
    inputs = torch.randn(5, *shape, dtype=torch.float64)
    inputs[2].view(-1)[0] = value
    check_spoilt(model, lambda chosen: project(model(inputs[chosen])), second_pass, bad=2)


@every_pass
@pytest.mark.parametrize("value", SPOILT.values(), ids=SPOILT)
def test_a_spoilt_loss_contributes_zero(value, second_pass):
    model = transformer(nn).double()
    tokens = torch.randint(11, (5, 9))
    factors = torch.ones(5, dtype=torch.float64)
    factors[4] = value
    check_spoilt(model, lambda chosen: project(model(tokens[chosen])) * factors[chosen], second_pass, bad=4)


@every_pass
@pytest.mark.parametrize("value", SPOILT.values(), ids=SPOILT)
def test_a_spoilt_constant_added_to_a_loss_contributes_zero(value, second_pass):
    model = two_linears()
    x, added = torch.randn(5, 3, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    added[0] = value
    check_spoilt(model, lambda chosen: project(model(x[chosen])) + added[chosen], second_pass, bad=0)


@every_pass
def test_a_finite_loss_with_an_infinite_gradient_contributes_zero(second_pass):
    model = two_linears()
    x, scale = torch.randn(5, 3, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    scale[1] = 0.0  # the derivative of sqrt at 0 is infinite
    losses_of = lambda chosen: (scale[chosen] * (model(x[chosen]) ** 2).sum(1)).sqrt()  # noqa: E731
    check_spoilt(model, losses_of, second_pass, bad=1)


@every_pass
@pytest.mark.parametrize("size", [1e20, 1e30, 1e38])
def test_a_huge_example_is_bounded_and_spares_the_others(size, second_pass):
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    clipper = ghostclip.GhostClipper(model, clipping=1.0, second_pass=second_pass)
    clipper.backward(model(x[1:]).sum(1))
    expected = {name: value.clone() for name, value in gradients(model).items()}
    model.zero_grad()
    x[0] = size
    result = clipper.backward(model(x).sum(1))
    moved = torch.cat([(value - expected[name]).flatten() for name, value in gradients(model).items()])
    assert float(moved.norm()) <= result.sensitivity * (1 + 1e-5)


def test_every_example_spoilt_adds_nothing():
    model = two_linears()
    result = ghostclip.GhostClipper(model).backward(model(torch.full((3, 3), float("nan")).double()).sum(1))
    assert torch.equal(result.weights, torch.zeros(3))
    assert not any(value.any() for value in gradients(model).values())


# --- changed inputs and freed graphs --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["linear", "linear 3-D", "conv2d plain", "embedding repeated", "layernorm 3-D",
                                  "groupnorm 4-D", "lstm output", "gru output", "attention self"])  # fmt: skip
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


def test_a_hidden_activation_changed_in_place_is_noticed():
    model = ghostclip.wrap(two_linears())
    hidden = model[0](torch.randn(4, 3).double()).clone()
    losses = model[2](hidden).sum(1)
    hidden *= 2
    with pytest.raises(StaleInputError):
        ghostclip.GhostClipper(model).backward(losses)


def test_the_input_of_a_frozen_layer_may_change():
    row = case("frozen first")
    model, clipper, _ = ready(row)
    (x,) = row.inputs()
    losses = row.losses(model(x))
    x.zero_()
    assert_close(clipper.norms(losses), oracle.norms(truth(row)), 1e-10)


@pytest.mark.parametrize("second", ["norms", "per_example_grads", "backward"])
@pytest.mark.parametrize("first", ["norms", "per_example_grads", "backward"])
def test_a_freed_graph_is_told_in_our_words(first, second):
    _, clipper, losses = ready(case("mlp in place"))
    getattr(clipper, first)(losses)
    with pytest.raises(GhostClipError, match="retain_graph=True"):
        getattr(clipper, second)(losses)


# --- foreign gradients ----------------------------------------------------------------------------------------------


@every_pass
def test_a_gradient_from_a_plain_backward_is_refused(second_pass):
    row = case("mlp in place")
    model, clipper, losses = ready(row, second_pass=second_pass)
    losses.sum().backward()
    before = {name: value.clone() for name, value in gradients(model).items()}
    with pytest.raises(GradientLeakError, match="zero_grad"):
        clipper.backward(row.losses(model(*row.inputs())))
    assert all(torch.equal(value, before[name]) for name, value in gradients(model).items())


@every_pass
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_zeroed_gradient_is_no_leak(second_pass, set_to_none):
    row = case("mlp in place")
    model, clipper, losses = ready(row, second_pass=second_pass)
    losses.sum().backward()
    model.zero_grad(set_to_none=set_to_none)
    for _ in range(2):
        clipper.backward(row.losses(model(*row.inputs())))
        assert_dicts_close(gradients(model), oracle.clipped_sum(truth(row), 1.0), 1e-10)
        model.zero_grad(set_to_none=set_to_none)


@every_pass
@pytest.mark.parametrize("leak", ["backward", "assignment", "one parameter"])
def test_a_gradient_added_between_two_calls_is_refused(second_pass, leak):
    row = case("mlp in place")
    model, clipper, losses = ready(row, second_pass=second_pass)
    clipper.backward(losses)
    if leak == "backward":
        row.losses(model(*row.inputs())).sum().backward()
    elif leak == "assignment":
        model[0].bias.grad = torch.ones_like(model[0].bias)
    else:
        model[0].bias.grad.add_(1.0)
    with pytest.raises(GradientLeakError):
        clipper.backward(row.losses(model(*row.inputs())))


# --- precision ------------------------------------------------------------------------------------------------------


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


# --- examples that mix, or are elsewhere ----------------------------------------------------------------------------


def centred(m, x):
    return m.body(x - x.mean(0))


def centred_late(m, x):
    hidden = m.body(x)
    return hidden - hidden.mean(0)


def contrasted(m, x):
    hidden = m.body(x)
    return hidden @ hidden.T


MIXING = {"centred input": centred, "centred output": centred_late, "contrastive": contrasted}


@pytest.mark.parametrize("wiring", MIXING.values(), ids=MIXING)
def test_verify_refuses_models_whose_examples_mix(wiring):
    model = Wired(wiring, body=two_linears())
    clipper = ghostclip.GhostClipper(model)
    x = torch.randn(5, 3, dtype=torch.float64)
    with pytest.raises((VerificationError, ghostclip.UnsupportedModelError)):
        clipper.verify(lambda m, batch: m(batch).square().mean(1), x)


@pytest.mark.parametrize("name", ["lstm time first", "gru time first", "attention self time first", "lstm root"])
def test_time_first_with_as_many_steps_as_examples(name):
    row = case(name)
    batch = row.specs[0].shape[0]
    model, clipper, losses = ready(row, batch=batch)
    assert_close(clipper.norms(losses, retain_graph=True), oracle.norms(truth(row, batch)), 1e-10)
    clipper.backward(losses)
    assert_dicts_close(gradients(model), oracle.clipped_sum(truth(row, batch), 1.0), 1e-10)


@pytest.mark.parametrize("steps", [1, 2, 5, 10])
@pytest.mark.parametrize("told", [True, False])
def test_a_head_on_time_first_outputs(steps, told):
    model = Wired(lambda m, x: m.head(m.rnn(x)[0]), rnn=nn.LSTM(4, 3), head=nn.Linear(3, 2)).double()
    inputs = (torch.randn(steps, 5, 4, dtype=torch.float64),)
    options = {"batch_dim": {"head": 1}} if told else {}
    refusal = exact_or_refused(model, inputs, [1], lambda out: project(out, 1), **options)
    assert not (told and refusal)


@pytest.mark.parametrize("order", ["example", "position"])
def test_positions_folded_into_the_batch(order):
    def fold(m, x):
        if order == "example":
            return m.body(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return m.body(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (x.shape[1], x.shape[0])).transpose(0, 1)

    model = Wired(fold, body=two_linears())
    exact_or_refused(model, (torch.randn(4, 6, 3, dtype=torch.float64),))


def test_an_input_shared_by_the_batch():
    model = Wired(
        lambda m, x: m.head(m.token(x) + m.place(torch.arange(x.shape[1])[None])),
        token=nn.Embedding(5, 4),
        place=nn.Embedding(6, 4),
        head=nn.Linear(4, 2),
    ).double()
    refusal = exact_or_refused(model, (torch.randint(5, (3, 6)),))
    assert refusal is None or "place" in str(refusal)


# --- parameters that no layer answers for ---------------------------------------------------------------------------


def test_a_weight_used_outside_its_layer():
    model = Wired(
        lambda m, x: F.linear(torch.tanh(m.body(m.embedding(x))), m.embedding.weight),
        embedding=nn.Embedding(6, 4),
        body=nn.Linear(4, 4),
    ).double()
    refusal = exact_or_refused(model, (torch.randint(6, (3, 5)),))
    assert refusal is None or "embedding.weight" in str(refusal)


@pytest.mark.parametrize("used", [True, False])
def test_a_bare_parameter(used):
    model = Wired(lambda m, x: m.body(x) * (m.scale if used else 1.0), body=two_linears())
    model.register_parameter("scale", nn.Parameter(torch.tensor([0.5, 2.0]).double()))
    refusal = exact_or_refused(model, (torch.randn(3, 3, dtype=torch.float64),))
    assert refusal is None or "scale" in str(refusal)


LATER = {
    "Bilinear": (lambda: nn.Bilinear(3, 3, 2), ((3,), (3,))),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 2, 3), ((3, 4, 4),)),
    "PReLU": (lambda: nn.PReLU(), ((3,),)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(3, affine=True), ((3, 5),)),
    "two-layer LSTM": (lambda: Wired(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(3, 2, 2, batch_first=True)), ((4, 3),)),
    "both directions": (
        lambda: Wired(lambda m, x: m.rnn(x)[0], rnn=nn.GRU(3, 2, batch_first=True, bidirectional=True)),
        ((4, 3),),
    ),
    "proj_size": (lambda: Wired(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(3, 4, proj_size=2, batch_first=True)), ((4, 3),)),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), ((3,),)),
}


@pytest.mark.parametrize("name", LATER)
def test_other_layers_are_exact_or_refused(name):
    build, shapes = LATER[name]
    refusal = exact_or_refused(build().double(), tuple(torch.randn(4, *shape).double() for shape in shapes))
    assert refusal is None or len(str(refusal)) > 20


class Scale(nn.Module):
    """A layer of the tests' own: one factor per feature."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class WrongScale(GhostLayer, Scale, wraps=Scale):
    """Its rule forgets the input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.capture(super().forward(x), x, parameters=("weight",))

    def per_example(self, name, call, inputs, grad):
        return grad


@every_pass
def test_verify_names_the_layer_whose_rule_is_wrong(second_pass):
    model = nn.Sequential(nn.Linear(3, 4), Scale(4), nn.Linear(4, 2)).double()
    clipper = ghostclip.GhostClipper(model, second_pass=second_pass)
    x = torch.randn(5, 3, dtype=torch.float64)
    with pytest.raises(VerificationError, match=r"1\.weight"):
        clipper.verify(lambda m, batch: project(m(batch)), x)


# --- forwards without losses ----------------------------------------------------------------------------------------


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("name", ["cnn", "transformer", "lstm decoder"])
def test_abandoned_forwards_leak_nothing(name):
    row = case(name)
    model, clipper, losses = ready(row)
    clipper.norms(losses)
    before = live_tensors()
    for _ in range(3):
        model(*row.inputs(batch=3))
    assert live_tensors() <= before
    assert_close(clipper.norms(row.losses(model(*row.inputs()))), oracle.norms(truth(row)), 1e-10)


@every_pass
def test_abandoned_losses_corrupt_nothing(second_pass):
    row = case("transformer")
    model, clipper, _ = ready(row, second_pass=second_pass)
    kept = [row.losses(model(*row.inputs(batch=size))) for size in (3, 4, 7)]
    clipper.backward(row.losses(model(*row.inputs())))
    assert_dicts_close(gradients(model), oracle.clipped_sum(truth(row), 1.0), 1e-10)
    assert all(losses.requires_grad for losses in kept)
