"""Recurrent layers by themselves: forward and ordinary backward, of packed sequences too, and the first pass."""

import pytest
import torch
from recurrent_layers import KINDS, OPTIONS, B, H, I, T, assert_all_close, initial, losses, pair, run, sequences
from torch import Tensor
from torch import nn as torch_nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import ghostclip
from ghostclip.nn import rnn

every_kind = pytest.mark.parametrize("kind", KINDS)
every_option = pytest.mark.parametrize("option", OPTIONS)
pytestmark = pytest.mark.usefixtures("every_backward")


@every_kind
@every_option
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.one_in(9)
def test_training_outputs_equal_torch_bit_for_bit(kind, option, dtype):
    smallest = 3 if "projected" in kind else 1
    for sizes, steps, batch in (((I, H), T, B), ((7, 64), 40, 20), ((3, smallest), 1, 1)):
        plain, wrapped = pair(kind, option, dtype, sizes)
        x, states = sequences(plain, steps, batch), initial(plain, batch)
        for given in ((), states):
            for found, expected in zip(run(wrapped, x, given), run(plain, x, given), strict=True):
                if dtype == torch.float32 or rows_round_alike(x, plain.weight_ih_l0):
                    assert torch.equal(found, expected)
                torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-15)
                assert found.stride() == expected.stride()


def rows_round_alike(x: Tensor, weight: Tensor) -> bool:
    """Whether this processor's products of float64 give a row the same digits wherever it stands (some don't).

    Of a reversed direction torch multiplies all rows in the order of time, and a wrapper in the reverse order.
    """
    rows = x.detach().flatten(0, -2)
    return torch.equal((rows.flip(0) @ weight.detach().T).flip(0), rows @ weight.detach().T)


@pytest.mark.parametrize("second_dim", ["time", "batch"])
def test_the_lstm_kernel_for_training_is_the_one_used(second_dim):
    # At this size oneDNN's kernels for training and for inference differ in the last bit.
    plain, wrapped = torch_nn.LSTM(100, 100, batch_first=second_dim == "time"), rnn.LSTM(100, 100)
    wrapped.batch_first = plain.batch_first
    wrapped.load_state_dict(plain.state_dict())
    x = torch.randn(32, 256, 100) if plain.batch_first else torch.randn(256, 32, 100)
    assert torch.equal(wrapped(x)[0], plain(x)[0])
    with torch.no_grad():
        assert torch.equal(wrapped(x)[0], plain(x)[0])


@every_kind
@every_option
def test_ordinary_gradients_equal_torch(kind, option):
    layers = pair(kind, option)
    x, states = sequences(layers[0]).requires_grad_(), initial(layers[0])
    for given in ((), states):
        found = []
        for layer in layers:
            wanted = [x, *layer.parameters(), *given]
            found.append(torch.autograd.grad(losses(layer, run(layer, x, given)).sum(), wanted))
        assert_all_close(found[1], found[0])


@every_kind
def test_checkpointing(kind):
    plain, layer = pair(kind)
    x = sequences(layer)
    output, _ = checkpoint(layer, x, use_reentrant=False)
    found = torch.autograd.grad(output.square().sum(), list(layer.parameters()))
    assert_all_close(found, torch.autograd.grad(plain(x)[0].square().sum(), list(plain.parameters())))


LENGTHS = {"sorted": (6, 6, 4, 2, 1), "not sorted": (4, 6, 1, 6, 2)}


def packed(layer, given, states=(), in_order=False):
    """[output padded with zeros [B, T, ...], h_n, (c_n)] of packed sequences, dropout the same every time."""
    torch.random.default_generator.manual_seed(3)
    hx = (tuple(states) if len(states) > 1 else states[0]) if states else None
    output, last = layer(pack_sequence(given, enforce_sorted=in_order), hx)
    assert isinstance(output, PackedSequence)
    padded = pad_packed_sequence(output, batch_first=True)[0]
    return [padded, *(part.transpose(0, 1) for part in (last if isinstance(last, tuple) else [last]))]


def all_entries(results):
    """[B] losses that depend on every entry of the results."""
    weights = [torch.arange(1.0, 1.0 + r[0].numel()).sin().view_as(r[0]) for r in results]
    return sum((weight * r + r**2).flatten(1).sum(1) for weight, r in zip(weights, results, strict=True))


@every_kind
@every_option
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.one_in(8)
def test_packed_sequences_have_torchs_values_and_ordinary_gradients(kind, option, name):
    for dtype in (torch.float32, torch.float64):
        layers, found = pair(kind, option, dtype), []
        given = [torch.randn(length, I, dtype=dtype) for length in LENGTHS[name]]
        given[1].requires_grad_()
        states = initial(layers[0], len(given))
        outputs = [packed(layer, given, states, name == "sorted") for layer in layers]
        torch.testing.assert_close(*outputs, rtol=0, atol=0)
        for layer, results in zip(layers, outputs, strict=True):
            found.append(torch.autograd.grad(all_entries(results).sum(), [given[1], *layer.parameters(), *states]))
        assert_all_close(found[1], found[0], 1e-10 if dtype == torch.float64 else 1e-3)


@every_kind
def test_a_bad_packed_example_does_not_touch_the_others(kind):
    _, layer = pair(kind, "both ways")
    given = [torch.randn(length, I, dtype=torch.float64) for length in LENGTHS["not sorted"]]
    clipper, found, others = ghostclip.GhostClipper(layer), [], [0, 1, 2, 4]
    for value in (0.0, float("nan")):
        given[3][5] = value
        found.append(clipper.per_example_grads(all_entries(packed(layer, given))).values())
    assert not all(gradients[3].isfinite().all() for gradients in found[1])
    assert_all_close(*([gradients[others] for gradients in each] for each in found), 0.0)
