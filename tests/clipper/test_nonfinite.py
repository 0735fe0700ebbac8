"""An example whose numbers are not finite contributes exactly zero, spares the others, and raises nothing."""

import pytest
import torch
from case_models import cnn, recurrent, transformer, two_linears
from case_types import project
from comparing import assert_dicts_close, gradients
from torch import nn

import ghostclip

every_pass = pytest.mark.parametrize("second_pass", ["reweight", "cached"])

FINITE_MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), (3,)),
    "linear 3-D": (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), (5, 3)),
    "conv": (lambda: cnn(nn), (1, 18, 18)),
    "rnn": (lambda: recurrent("RNN", "both", nn, batch_first=True, nonlinearity="relu"), (6, 4)),
    "lstm": (lambda: recurrent("LSTM", "both", nn, batch_first=True), (6, 4)),
    "gru": (lambda: recurrent("GRU", "both", nn, batch_first=True), (6, 4)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 6, 0.0, batch_first=True), (5, 8)),
}
SPOILT = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def check_spoilt(model, losses_of, second_pass, bad, norm_strategy="auto"):
    """Example ``bad`` is not finite; the sum is what the others give, and nothing is raised, first batch or not."""
    everyone = torch.arange(5)
    others = everyone[everyone != bad]
    ghostclip.GhostClipper(model, clipping=0.5, second_pass=second_pass).backward(losses_of(others))
    expected = {name: value.clone() for name, value in gradients(model).items()}
    clipper = ghostclip.GhostClipper(model, clipping=0.5, second_pass=second_pass, norm_strategy=norm_strategy)
    for _ in range(2):
        model.zero_grad()
        result = clipper.backward(losses_of(everyone))
        assert float(result.weights[bad]) == 0.0
        assert bool((result.weights[others] > 0).all())
        assert_dicts_close(gradients(model), expected, 1e-12)


@every_pass
@pytest.mark.parametrize("value", SPOILT.values(), ids=SPOILT)
@pytest.mark.parametrize("name", FINITE_MODELS)
@pytest.mark.parametrize("norm_strategy", ["direct", "gram"])
@pytest.mark.one_in(3)
def test_a_spoilt_input_contributes_zero(name, value, second_pass, norm_strategy):
    """Whether gradients are kept, or inputs and what comes back to a layer are."""
    build, shape = FINITE_MODELS[name]
    model = build().double()
    inputs = torch.randn(5, *shape, dtype=torch.float64)
    inputs[2].view(-1)[0] = value
    check_spoilt(model, lambda chosen: project(model(inputs[chosen])), second_pass, bad=2, norm_strategy=norm_strategy)


@every_pass
@pytest.mark.parametrize("value", SPOILT.values(), ids=SPOILT)
@pytest.mark.parametrize("added", [False, True])
def test_a_spoilt_loss_contributes_zero(added, value, second_pass):
    """Multiplied with the number, or with it added, which leaves the gradient finite."""
    model, tokens = transformer(nn).double(), torch.randint(11, (5, 9))
    spoilt = torch.full((5,), 0.0 if added else 1.0, dtype=torch.float64)
    spoilt[4] = value

    def losses_of(chosen):
        losses = project(model(tokens[chosen]))
        return losses + spoilt[chosen] if added else losses * spoilt[chosen]

    check_spoilt(model, losses_of, second_pass, bad=4)


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


def test_an_expanded_tensor_of_which_one_example_is_not_finite_leaves_that_one_out():
    """Nobody can write into an expanded tensor; the memory behind it holds each number once."""

    class Distances(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.points = nn.Linear(4, 6), nn.Parameter(torch.randn(3, 6))

        def forward(self, x):
            return torch.cdist(self.layer(x)[:, None].expand(-1, 5, -1), self.points, p=1.0).sum((1, 2))

    model = ghostclip.wrap(Distances())
    x = torch.randn(4, 4)
    x[1] = torch.inf
    result = ghostclip.GhostClipper(model, 1.0).backward(model(x))
    sums = gradients(model)
    model.zero_grad()
    others = ghostclip.GhostClipper(model, 1.0).backward(model(x[[0, 2, 3]]))
    assert result.weights[1] == 0
    torch.testing.assert_close(result.norms[[0, 2, 3]], others.norms)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(sums[name], grad)


class Merged(nn.Module):
    """A layer whose weights are read by giving it unit vectors, which all examples share."""

    def __init__(self, trained):
        super().__init__()
        torch.manual_seed(5)
        self.layer, self.first = nn.Linear(6, 6), nn.Linear(4, 6)
        self.units = nn.Parameter(torch.eye(6), requires_grad=trained)

    def forward(self, x):
        return torch.tanh(self.first(x) @ self.layer(self.units)).square().sum(1)


@pytest.mark.parametrize("examples", [2, 6, 8])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("value", [torch.nan, 1e30])
@pytest.mark.parametrize("second_pass", ["cached", "reweight"])
def test_beside_a_spoilt_example_what_all_share_is_still_shared(examples, trained, value, second_pass):
    """All rows of its gradient are nan then, or the spoilt example's alone by their size."""
    torch.manual_seed(1)
    x = torch.randn(examples, 4)
    whole = x.clone()
    whole[1] = value
    rest = [example for example in range(examples) if example != 1]
    found = {}
    for name, batch in (("whole", whole), ("rest", x[rest])):
        model = ghostclip.wrap(Merged(trained))
        clipper = ghostclip.GhostClipper(model, 0.5, second_pass=second_pass)
        found[name] = clipper.clip(lambda model, x: model(x), batch), gradients(model)
    torch.testing.assert_close(found["whole"][0].norms[rest], found["rest"][0].norms)
    if value != value or not found["whole"][0].weights[1]:
        for name, grad in found["rest"][1].items():
            torch.testing.assert_close(found["whole"][1][name], grad)
