"""Packed sequences through recurrent layers: values and gradients, in the user's order."""

import pytest
import torch
from recurrent_layers import KINDS, OPTIONS, I, assert_all_close, initial, pair
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

import ghostclip

every_kind = pytest.mark.parametrize("kind", KINDS)
LENGTHS = {"sorted": (6, 6, 4, 2, 1), "not sorted": (4, 6, 1, 6, 2)}


pytestmark = pytest.mark.usefixtures("every_backward")


def sequences(lengths, dtype=torch.float64):
    return [torch.randn(length, I, dtype=dtype) for length in lengths]


def run(layer, given, states=(), in_order=False):
    """[output padded with zeros [B, T, ...], h_n, (c_n)] of packed sequences, dropout the same every time."""
    torch.random.default_generator.manual_seed(3)
    hx = (tuple(states) if len(states) > 1 else states[0]) if states else None
    output, last = layer(pack_sequence(given, enforce_sorted=in_order), hx)
    assert isinstance(output, PackedSequence)
    padded = pad_packed_sequence(output, batch_first=True)[0]
    return [padded, *(part.transpose(0, 1) for part in (last if isinstance(last, tuple) else [last]))]


def losses(results):
    """[B] losses that depend on every entry of the results."""
    return sum(
        (torch.arange(1.0, 1.0 + r[0].numel()).sin().view_as(r[0]) * r + r**2).flatten(1).sum(1) for r in results
    )


@every_kind
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["sorted", "not sorted"])
@pytest.mark.one_in(4)
def test_values_and_ordinary_gradients_are_torchs(kind, option, name):
    for dtype in (torch.float32, torch.float64):
        layers, given, found = pair(kind, option, dtype), sequences(LENGTHS[name], dtype), []
        given[1].requires_grad_()
        states = initial(layers[0], len(given))
        outputs = [run(layer, given, states, name == "sorted") for layer in layers]
        for ours, theirs in zip(*reversed(outputs), strict=True):
            assert torch.equal(ours, theirs)
        for layer, results in zip(layers, outputs, strict=True):
            found.append(torch.autograd.grad(losses(results).sum(), [given[1], *layer.parameters(), *states]))
        assert_all_close(found[1], found[0], 1e-10 if dtype == torch.float64 else 1e-3)


@every_kind
def test_a_bad_example_does_not_touch_the_others(kind):
    _, layer = pair(kind, "both ways")
    given, found = sequences(LENGTHS["not sorted"]), []
    for value in (0.0, float("nan")):
        given[3][5] = value
        found.append(ghostclip.GhostClipper(layer).per_example_grads(losses(run(layer, given))))
    others = torch.tensor([0, 1, 2, 4])
    assert not all(gradients[3].isfinite().all() for gradients in found[1].values())
    assert_all_close([g[others] for g in found[1].values()], [g[others] for g in found[0].values()], 0.0)
