"""Recurrent layers whose graph is gone through again, and whose outputs are changed in place."""

import pytest
import torch
from case_models import Wired
from torch import nn

import ghostclip

every_kind = pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])


def network(kind, change=lambda y: y, **options):
    """A trained layer below the recurrent one, and a change above; its outputs are losses."""
    torch.manual_seed(0)
    layer = getattr(nn, kind)(4, 5, batch_first=True, **options)
    wiring = lambda m, x: change(m.layer(torch.tanh(m.below(x)))[0]).square().sum((1, 2))  # noqa: E731
    return Wired(wiring, below=nn.Linear(3, 4), layer=layer).double(), 3 * torch.randn(6, 7, 3, dtype=torch.float64)


def sums(model):
    return [parameter.grad for parameter in model.parameters()]


@every_kind
def test_passes_over_a_kept_graph_stand_for_themselves(kind):
    model, x = network(kind)
    clipper = ghostclip.GhostClipper(model, 0.5)
    clipper.backward(model(x))
    expected = sums(model)
    ordinary = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    losses = model(x)
    for _ in range(2):
        model.zero_grad()
        clipper.backward(losses, retain_graph=True)
        torch.testing.assert_close(sums(model), expected, rtol=1e-10, atol=1e-12)
    found = torch.autograd.grad(losses.sum(), list(model.parameters()))
    torch.testing.assert_close(found, ordinary, rtol=1e-10, atol=1e-12)


@every_kind
@pytest.mark.parametrize("second_pass", ["reweight", "cached"])
@pytest.mark.parametrize("narrow", [False, True], ids=["float64", "autocast"])
def test_an_output_changed_in_place_changes_no_sum(kind, second_pass, narrow):
    found = []
    for change in (lambda y: y.mul_(2.0).relu_(), lambda y: (2.0 * y).relu()):
        model, x = network(kind, change, num_layers=2)
        dtype = torch.float32 if narrow else torch.float64
        clipper = ghostclip.GhostClipper(model.to(dtype), 0.5, second_pass=second_pass)
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            losses = model(x.to(dtype))
        clipper.backward(losses.to(dtype))
        found.append(sums(model))
    off = {"rtol": 1e-4, "atol": 1e-6} if narrow else {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(*found, **off)
