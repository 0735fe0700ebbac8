"""Whose gradient is whose: examples that mix are refused; those that lie elsewhere, and bare parameters, are exact."""

import oracle
import pytest
import torch
from case_models import Wired, two_linears
from case_types import project
from cases import case
from comparing import (
    assert_close,
    assert_dicts_close,
    exact_or_refused,
    gradients,
    ready,
    truth,
)
from einops import rearrange
from torch import nn

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
@pytest.mark.parametrize("options", [{"batch_dim": {"head": 1}}, {}])
def test_a_head_on_time_first_outputs(steps, options):
    model = Wired(lambda m, x: m.head(m.rnn(x)[0]), rnn=nn.LSTM(4, 3), head=nn.Linear(3, 2)).double()
    inputs = (torch.randn(steps, 5, 4, dtype=torch.float64),)
    assert exact_or_refused(model, inputs, [1], lambda out: project(out, 1), **options) is None


# name: layout outside of the layer, layout inside, sizes
FOLDS = {
    "heads": ("b t (h d)", "(b h) t d", {"h": 2}),
    "windows, example first": ("b (w t) d", "(b w) t d", {"w": 2}),
    "windows, window first": ("b (w t) d", "(w b) t d", {"w": 2}),
    "examples in the middle": ("b (v w t) d", "(v b w) t d", {"v": 2, "w": 2}),
    "positions first": ("b t d", "t b d", {}),
}


@pytest.mark.parametrize("name", FOLDS)
def test_parts_folded_into_the_batch(name):
    whole, folded, sizes = FOLDS[name]

    def wiring(m, x):
        inside = m.layer(rearrange(x, f"{whole} -> {folded}", **sizes))
        return rearrange(inside, f"{folded} -> {whole}", b=x.shape[0], **sizes)

    width = 2 if name == "heads" else 4
    model = Wired(wiring, layer=nn.Linear(width, width)).double()
    assert exact_or_refused(model, (torch.randn(4, 8, 4, dtype=torch.float64),)) is None


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


@every_pass
def test_examples_that_meet_only_where_they_are_close(second_pass):
    """Which they aren't in the first batches, of two and three."""
    model = nn.Sequential(nn.Linear(3, 2))
    clipper = ghostclip.GhostClipper(model, second_pass=second_pass)

    def losses(inputs):
        outputs = model(inputs)
        gaps = (outputs.unsqueeze(1) - outputs.unsqueeze(0)).square().sum(2)
        return outputs.square().sum(1) + (1e-2 - gaps).clamp_min(0).sum(1)

    apart = torch.tensor([[5.0, 0.0, 0.0], [0.0, -5.0, 5.0]])
    for inputs in (apart, torch.cat([apart, apart * 2])[:3]):
        clipper.backward(losses(inputs))
    with pytest.raises(ghostclip.UnsupportedModelError, match="mix"):
        clipper.backward(losses(torch.randn(1, 3) + 1e-4 * torch.randn(8, 3)))
