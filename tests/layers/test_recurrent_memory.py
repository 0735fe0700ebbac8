"""Recurrent layers whose graph is gone through again, and whose outputs are changed in place."""

import pytest
import torch
from case_models import Wired
from torch import nn

import ghostclip

KINDS = {"RNN": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}
every_kind = pytest.mark.parametrize("kind", KINDS)


def network(kind, change=lambda y: y, **options):
    """A trained layer below the recurrent one, and a change above; its outputs are losses."""

    def wiring(m, x):
        return change(m.layer(torch.tanh(m.below(x)))[0]).square().sum((1, 2))

    torch.manual_seed(0)
    layers = {"below": nn.Linear(3, 4), "layer": KINDS[kind](4, 5, batch_first=True, **options)}
    return Wired(wiring, **layers).double(), 3 * torch.randn(6, 7, 3, dtype=torch.float64)


def sums(model, clipper, x, batches=2):
    """The clipped sums of the last of some batches."""
    for _ in range(batches):
        model.zero_grad()
        clipper.backward(model(x))
    return [parameter.grad for parameter in model.parameters()]


@every_kind
def test_passes_over_a_kept_graph_stand_for_themselves(kind):
    model, x = network(kind)
    clipper = ghostclip.GhostClipper(model, 0.5)
    expected = sums(model, clipper, x)
    ordinary = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    losses = model(x)
    for _ in range(2):
        model.zero_grad()
        clipper.backward(losses, retain_graph=True)
        torch.testing.assert_close([p.grad for p in model.parameters()], expected, rtol=1e-10, atol=1e-12)
    found = torch.autograd.grad(losses.sum(), list(model.parameters()))
    torch.testing.assert_close(found, ordinary, rtol=1e-10, atol=1e-12)


@every_kind
@pytest.mark.parametrize("second_pass", ["reweight", "cached"])
@pytest.mark.parametrize("narrow", [False, True], ids=["float64", "autocast"])
def test_an_output_changed_in_place_changes_no_sum(kind, second_pass, narrow):
    found = []
    for change in (lambda y: y.mul_(2.0).relu_(), lambda y: (2.0 * y).relu()):
        model, x = network(kind, change, num_layers=2)
        clipper = ghostclip.GhostClipper(
            model.to(torch.float32 if narrow else torch.float64), 0.5, second_pass=second_pass
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            losses = model(x.float() if narrow else x)
        clipper.backward(losses.float() if narrow else losses)
        found.append([parameter.grad for parameter in model.parameters()])
    off = {"rtol": 1e-4, "atol": 1e-6} if narrow else {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(*found, **off)
