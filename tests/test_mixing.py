"""Whose gradient is whose: examples that mix or lie elsewhere, or a parameter no layer owns: exact or refused."""

import oracle
import pytest
import torch
from case_models import Wired, two_linears
from case_types import project
from cases import case
from comparing import assert_close, assert_dicts_close, exact_or_refused, gradients, ready, truth
from torch import nn
from torch.nn import functional as F

import ghostclip
from ghostclip import VerificationError
from ghostclip.nn import GhostLayer

every_pass = pytest.mark.parametrize("second_pass", ["reweight", "cached"])


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
