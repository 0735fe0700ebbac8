"""Recurrent layers by themselves, without a clipper: forward, the ordinary backward, and what the first pass gets."""

import pytest
import torch
from comparing import assert_exact
from recurrent_layers import (
    KINDS,
    OPTIONS,
    B,
    H,
    I,
    T,
    assert_all_close,
    calls_behind,
    first_pass,
    initial,
    losses,
    pair,
    run,
    sequences,
)
from torch import Tensor
from torch import nn as torch_nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ghostclip.nn import rnn
from ghostclip.nn.rnn import recurrence

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
@pytest.mark.one_in(3)
def test_gradcheck(kind):
    _, layer = pair(kind)
    x, states, names = (
        sequences(layer, steps=3).requires_grad_(),
        initial(layer),
        [name for name, _ in layer.named_parameters()],
    )

    def function(x, *rest):
        given = rest[len(names) :]
        hx = tuple(given) if len(given) > 1 else given[0]
        output, last = functional_call(layer, dict(zip(names, rest, strict=False)), (x, hx))
        return (output, *last) if isinstance(last, tuple) else (output, last)

    assert torch.autograd.gradcheck(function, (x, *layer.parameters(), *states))


@every_kind
def test_the_first_pass_forms_no_weight_gradient(kind, monkeypatch):
    _, layer = pair(kind)
    formed = []
    product = recurrence._product
    monkeypatch.setattr(recurrence, "_product", lambda *sides: formed.append(sides) or product(*sides))
    results = run(layer, sequences(layer))
    total = losses(layer, results).sum()
    first_pass(total, results)
    assert formed == []
    assert all(parameter.grad is None for parameter in layer.parameters())
    total.backward()
    assert len(formed) == (3 if layer.proj_size else 2)


@every_kind
def test_torch_does_it_all_where_nothing_is_trained_or_recorded(kind):
    plain, layer = pair(kind)
    x = sequences(layer)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(layer(x)[0], plain(x)[0])
            assert not layer(x)[0].requires_grad
    layer.requires_grad_(False)
    below = x.clone().requires_grad_()
    assert calls_behind(layer(below)[0]) == []
    assert_all_close(
        torch.autograd.grad(layer(below)[0].sum(), below), torch.autograd.grad(plain(below)[0].sum(), below)
    )


@every_kind
def test_checkpointing(kind):
    plain, layer = pair(kind)
    x = sequences(layer)
    output, _ = checkpoint(layer, x, use_reentrant=False)
    found = torch.autograd.grad(output.square().sum(), list(layer.parameters()))
    assert_all_close(found, torch.autograd.grad(plain(x)[0].square().sum(), list(plain.parameters())))


@every_kind
def test_half_precision_is_worked_off_in_float32(kind):
    _, exact = pair(kind, dtype=torch.float32)
    _, layer = pair(kind, dtype=torch.bfloat16)
    layer.load_state_dict(exact.state_dict())
    exact.load_state_dict(layer.state_dict())
    x = sequences(layer)
    results = run(layer, x)
    ((inputs, grad),) = first_pass(losses(layer, results).sum(), results).values()
    assert {tensor.dtype for tensor in (*inputs, grad)} == {torch.float32}
    losses(layer, results).sum().backward()
    losses(exact, run(exact, x.float())).sum().backward()
    assert_all_close([p.grad.float() for p in layer.parameters()], [p.grad for p in exact.parameters()], 0.05)


def test_torch_says_what_is_wrong_with_sizes():
    plain, layer = pair("lstm", dtype=torch.float32)
    for x, hx in ((torch.randn(T, B, I + 1), None), (torch.randn(T, B, I), (torch.zeros(1, B, 2),) * 2)):
        with pytest.raises(RuntimeError) as expected:
            plain(x, hx)
        with pytest.raises(RuntimeError) as found:
            layer(x, hx)
        assert str(found.value) == str(expected.value)


@every_kind
@pytest.mark.parametrize("name", ["weight_hh_l0", "weight_ih_l0"])
def test_weights_that_are_computed_are_clipped_exactly(kind, name):
    """No rule has business with such a layer: what made the weight is in the graph, and dealt with there."""
    torch.manual_seed(0)
    wrapper, own = KINDS[kind]
    layer = wrapper.wrapped(I, H, batch_first=True, dtype=torch.float64, **own)
    model = torch_nn.utils.parametrizations.weight_norm(layer, name)
    assert_exact(model, sequences(layer), losses=lambda results: results[0].square().sum((1, 2)))


@every_kind
def test_second_derivatives_are_those_of_torchs_layer(kind):
    plain, layer = pair(kind)
    x, found = sequences(layer), []
    for each in (plain, layer):
        loss = each(x)[0].square().sum()
        (grad,) = torch.autograd.grad(loss, [each.weight_hh_l0], create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), list(each.parameters())))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
