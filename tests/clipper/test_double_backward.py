"""Losses that contain gradients: a double backward through every wrapper, against plain torch layers in the loop."""

from copy import deepcopy

import oracle
import pytest
import torch
from case_models import Wired
from cases import CASES
from comparing import TOLERANCE, assert_close, assert_dicts_close, every_pass, exact_or_refused, gradients, typical_norm
from penalties import LOSSES, MODELS, Once, OnInputs, on_slope
from torch import nn

import ghostclip
from ghostclip import GhostClipper, PrivacyEngine, UnsupportedModelError, VerificationError
from ghostclip.graph import layouts
from ghostclip.nn.rnn import recurrence

READING_NUMBERS = [row for row in CASES if any(not spec.below and spec.batch_dim is not None for spec in row.specs)]


@pytest.mark.parametrize("linear", [True, False], ids=["of the sum", "of other losses"])
@pytest.mark.parametrize("case", READING_NUMBERS, ids=str)
@pytest.mark.one_in(96)
def test_a_penalty_on_the_slope_is_exact_behind_every_layer(case, linear):
    """Where torch has second derivatives of the layer; where not, it is refused."""
    model = OnInputs(case.model(), case.batch_dims, case.output_dim, linear)
    try:
        oracle.per_example_grads(model, lambda losses: losses, case.inputs(1), case.batch_dims)
    except RuntimeError as error:
        if "not implemented" not in str(error):
            raise
        clipper = GhostClipper(ghostclip.wrap(model, **case.wrap))
        with pytest.raises(UnsupportedModelError):
            clipper.norms(model(*case.inputs()))
        return
    for batch in (3, 1, 5):  # an odd number of gradients of one number, clipped, does not cancel
        refusal = exact_or_refused(
            deepcopy(model), case.inputs(batch), case.batch_dims, lambda losses: losses, **case.wrap
        )
        assert refusal is None


def both(name, dtype=torch.float64):
    """The model in float64, plain, and a copy in that type; and what makes batches of a size."""
    build, shape = MODELS[name]
    torch.manual_seed(3)
    plain = build().double()
    for parameter in plain.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, dtype=torch.float64) * (parameter.dim() == 1)
    return plain, deepcopy(plain).to(dtype), lambda size: torch.randn(size, *shape, dtype=torch.float64)


def in_the_loop(plain, loss, x):
    """Each example's gradients, {parameter name: [B, *shape]}."""
    whole = Wired(lambda m, x: loss(m.model, x), model=plain)
    found = oracle.per_example_grads(whole, lambda losses: losses, [x])
    return {name.removeprefix("model."): each for name, each in found.items()}


@every_pass
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(12)
def test_losses_of_gradients_are_clipped_exactly_in_batches_of_several_sizes(name, loss, second_pass):
    plain, model, inputs = both(name)
    clipper = GhostClipper(model, 0.3, second_pass=second_pass)
    for size in (4, 6, 4):
        x = inputs(size)
        expected = in_the_loop(plain, LOSSES[loss], x)
        model.zero_grad()
        result = clipper.backward(LOSSES[loss](model, x))
        assert_close(result.norms, oracle.norms(expected), 1e-9, 1e-3 * oracle.norms(expected).max())
        assert_dicts_close(gradients(model), oracle.clipped_sum(expected, 0.3), 1e-9)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(6)
def test_weights_of_small_losses_are_the_same_in_batches_that_marks_watch(name, monkeypatch):
    """The rounding margin of a layer's two uses has no part that is the same whatever the losses are."""
    monkeypatch.setattr(layouts, "WATCHED", 1)
    _, model, inputs = both(name, torch.float32)
    clipper, loss = GhostClipper(model, 1e-5), next(iter(LOSSES.values()))
    x = inputs(8).float()
    for _ in range(8):
        result = clipper.backward(1e-4 * loss(model, x))
        assert_close(result.weights, (1e-5 / result.norms).clamp(max=1), 1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_in_float32(name):
    plain, model, inputs = both(name, torch.float32)
    x = inputs(5)
    expected = in_the_loop(plain, on_slope, x)
    GhostClipper(model, typical_norm(expected)).backward(on_slope(model, x.float()))
    assert_dicts_close(gradients(model), oracle.clipped_sum(expected, typical_norm(expected)), TOLERANCE[torch.float32])


@pytest.mark.parametrize("how", ["norms", "backward", "per_example_grads"])
@pytest.mark.parametrize(
    ("operation", "match"),
    [
        (Once.apply, "marked with @once_differentiable"),
        (lambda h: torch.cdist(h, torch.ones(3, h.shape[-1])), "torch can't differentiate twice.*_cdist_backward"),
        (lambda h: nn.functional.scaled_dot_product_attention(h, h, h), "torch can't differentiate twice.*attention"),
    ],
    ids=["once differentiable", "distances", "attention"],
)
def test_gradients_without_second_derivatives_are_refused(operation, match, how):
    model = Wired(lambda m, x: operation(m.first(x)).sin(), first=nn.Linear(6, 6))
    clipper = GhostClipper(model)
    with pytest.raises(UnsupportedModelError, match=match):
        getattr(clipper, how)(on_slope(model, torch.randn(4, 2, 3, 6)))


@pytest.mark.parametrize("name", ["lstm", "group norm", "weight norm"])
@pytest.mark.one_in(3)
def test_the_engine_takes_steps_on_such_losses(name):
    """Whatever its self-check does to the first batches."""
    plain, model, inputs = both(name)
    data, optimizer = torch.utils.data.TensorDataset(inputs(12)), torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"batch_size": 12, "max_physical_batch_size": 7, "noise_multiplier": 0.0, "clipping": 0.3}
    engine = PrivacyEngine(model, optimizer, data, **options)
    for _ in range(2):
        before = {key: value.detach().clone() for key, value in model.named_parameters()}
        plain.load_state_dict(model.state_dict())
        engine.step(next(iter(engine.batches())), lambda model, batch: on_slope(model, batch[0]))
        expected = oracle.clipped_sum(in_the_loop(plain, on_slope, data.tensors[0]), 0.3)
        update = {key: 12 * (before[key] - value) for key, value in model.named_parameters()}
        assert_dicts_close(update, expected, 1e-9)


def test_verify_finds_a_second_derivative_that_a_layer_leaves_out(monkeypatch):
    """It runs torch's layers: a loop over the wrappers would leave out the same."""
    _, model, inputs = both("gru")
    clipper = GhostClipper(model)
    assert clipper.verify(on_slope, inputs(4)) < 1e-9
    whole = recurrence.recorded_gradients
    cut = lambda *arguments: tuple(None if grad is None else grad.detach() for grad in whole(*arguments))  # noqa: E731
    monkeypatch.setattr(recurrence, "recorded_gradients", cut)
    with pytest.raises(VerificationError, match=r"rnn\.weight"):
        clipper.verify(on_slope, inputs(4))


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
def test_second_derivatives_by_the_weights_of_a_layer_that_is_used_twice(kind):
    plain = getattr(nn, kind)(4, 4, dtype=torch.float64)
    wrapped, x, found = ghostclip.wrap(deepcopy(plain)), torch.randn(3, 2, 4, dtype=torch.float64), []
    for layer in (plain, wrapped):
        parameters, total = list(layer.parameters()), layer(layer(x)[0])[0].square().sum()
        firsts = torch.autograd.grad(total, parameters, create_graph=True)
        found.append(torch.autograd.grad(sum(first.square().sum() for first in firsts), parameters))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
