"""Recurrent layers keep one copy of what they need, and two passes go back through time once; results stay the same."""

import pytest
import torch
from torch import nn

import ghostclip
from ghostclip.clipper import second_pass as two_passes
from ghostclip.nn.rnn import recurrence

KINDS = {"RNN": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_option = pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"num_layers": 2, "bidirectional": True}], ids=["plain", "no bias", "four nodes"]
)


class Network(nn.Module):
    """A trained layer below the recurrent one, initial states that are trained too, and a change in place above."""

    def __init__(self, kind, options):
        super().__init__()
        self.below, self.layer = nn.Linear(3, 4), KINDS[kind](4, 5, batch_first=True, **options)
        self.change = None

    def forward(self, x):
        output, _ = self.layer(torch.tanh(self.below(x)))
        return (output if self.change is None else self.change(output)).square().sum((1, 2))


def network(kind, options=None):
    torch.manual_seed(0)
    return Network(kind, options or {}).double(), 3 * torch.randn(6, 7, 3, dtype=torch.float64)


def sums(model, clipper, x, batches=2):
    """The clipped sums of the last of some batches."""
    for _ in range(batches):
        model.zero_grad()
        clipper.backward(model(x))
    return [parameter.grad for parameter in model.parameters()]


@pytest.fixture
def backwards(monkeypatch):
    """A list that grows with each backward pass through time."""
    found, back = [], recurrence._back
    monkeypatch.setattr(recurrence, "_back", lambda *args: found.append(1) or back(*args))
    return found


@every_kind
@every_option
@pytest.mark.usefixtures("every_backward")
def test_two_passes_go_back_through_time_once(kind, options, backwards):
    model, x = network(kind, options)
    clipper = ghostclip.GhostClipper(model, 0.5)
    sums(model, clipper, x)
    backwards.clear()
    found = sums(model, clipper, x, batches=1)
    # An operation that reverses time may reverse the batch, so each such graph has its own mixing test.
    assert options.get("bidirectional") or len(backwards) == 1
    other = ghostclip.GhostClipper(network(kind, options)[0], 0.5, second_pass="cached")
    torch.testing.assert_close(found, sums(other.model, other, x), rtol=1e-10, atol=1e-12)


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
def test_what_a_failed_second_pass_left_is_used_by_no_other(kind, monkeypatch):
    torch.manual_seed(0)
    layer, x = KINDS[kind](3, 96, dtype=torch.float64), torch.randn(5, 6, 3, dtype=torch.float64)
    clipper = ghostclip.GhostClipper(layer, 0.5, second_pass="reweight")
    losses = layer(x)[0].sum((0, 2))
    expected = torch.autograd.grad(losses.sum(), list(layer.parameters()), retain_graph=True)

    def fails(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(two_passes, "Reweighting", fails)
    with pytest.raises(KeyboardInterrupt):
        clipper.backward(losses)
    found = torch.autograd.grad(losses.sum(), list(layer.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@every_kind
@pytest.mark.parametrize("second_pass", ["reweight", "cached"])
@pytest.mark.parametrize("narrow", [False, True], ids=["float64", "autocast"])
def test_an_output_changed_in_place_changes_no_sum(kind, second_pass, narrow):
    found = []
    for change in (lambda y: y.mul_(2.0).relu_(), lambda y: (2.0 * y).relu()):
        model, x = network(kind, {"num_layers": 2, "dropout": 0.0})
        model.change = change
        clipper = ghostclip.GhostClipper(
            model.to(torch.float32 if narrow else torch.float64), 0.5, second_pass=second_pass
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            losses = model(x.float() if narrow else x)
        clipper.backward(losses.float() if narrow else losses)
        found.append([parameter.grad for parameter in model.parameters()])
    off = {"rtol": 1e-4, "atol": 1e-6} if narrow else {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(*found, **off)


@every_kind
def test_the_output_is_no_second_copy_of_the_states(kind):
    model, x = network(kind)
    output, _ = ghostclip.wrap(model).layer(model.below(x))
    saved = [tensor for tensor in output._base.grad_fn.saved_tensors if tensor is not None]
    assert output.untyped_storage().data_ptr() in [tensor.untyped_storage().data_ptr() for tensor in saved]


@pytest.mark.parametrize("clipping", [0.5, ghostclip.clipping.PerLayer(max_norm=0.5)], ids=["cached", "layer by layer"])
def test_nothing_is_kept_beside_what_stays_anyway(clipping, monkeypatch):
    """Kept, the narrow W_ih's gradients would free no gate gradient: W_hh needs them."""
    monkeypatch.setattr("ghostclip.planner.worth_measuring", lambda ordered, candidates: ["direct"])
    model = nn.RNN(3, 40, batch_first=True)
    clipper = ghostclip.GhostClipper(model, clipping, second_pass="cached")
    clipper.backward(model(torch.randn(16, 4, 3))[0].square().sum((1, 2)))
    kept = {row.parameter: row.kept for row in clipper.explain()}
    assert (kept["weight_ih_l0"], kept["weight_hh_l0"]) == (False, False)
