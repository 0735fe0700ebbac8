"""Recurrent layers in compiled steps: one operation for all time steps, the sums of eager, whatever the length."""

import pytest
import torch
from comparing import TOLERANCE, assert_dicts_close, gradients
from graphs import interpret
from recurrent_readers import LAYERS, losses_of, model_of
from torch.library import opcheck

import ghostclip
from ghostclip.compiled import trial
from ghostclip.nn.rnn import fused, kernels
from ghostclip.nn.rnn.trace import Incoming, Trace


def assert_sums_of_eager(name, second_pass):
    model, plain = model_of(name), model_of(name)
    clipper = ghostclip.GhostClipper(model, 0.5, second_pass=second_pass, compile=True)
    reference = ghostclip.GhostClipper(plain, 0.5, second_pass=second_pass)
    for _ in range(6):
        batch = (torch.randn(5, 7, 3, dtype=torch.float64),)
        model.zero_grad()
        plain.zero_grad()
        clipper.clip(losses_of, batch)
        reference.clip(losses_of, batch)
    assert_dicts_close(gradients(model), gradients(plain), TOLERANCE[torch.float64])
    assert clipper.compiled.refusals == []
    assert clipper.compiled.graphs == 1


@pytest.mark.parametrize("second_pass", ["reweight", "cached"])
@pytest.mark.parametrize(
    "name", [*list(LAYERS)[:4], *(pytest.param(n, marks=pytest.mark.slow) for n in list(LAYERS)[4:])]
)
@pytest.mark.one_in(8)
def test_a_graph_gives_the_sums_of_eager(name, second_pass, monkeypatch):
    interpret(monkeypatch)
    assert_sums_of_eager(name, second_pass)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rnn", "lstm", "gru"])
def test_inductor_takes_the_operations_as_they_are(name, monkeypatch):
    monkeypatch.setattr(trial, "clock", lambda: 0.0)  # its graph is used, whatever is faster
    assert_sums_of_eager(name, "cached")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("mode", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN_TANH", 1), ("RNN_RELU", 1)])
def test_the_operations_keep_to_what_they_say_of_themselves(mode, gates, dtype):
    torch.manual_seed(0)
    x, h0, c0 = torch.randn(5, 3, 2, dtype=dtype), torch.randn(1, 3, 4, dtype=dtype), torch.randn(1, 3, 4, dtype=dtype)
    weights = [torch.randn(gates * 4, width, dtype=dtype) for width in (2, 4)] + [
        torch.randn(gates * 4, dtype=dtype)
    ] * 2
    initial = [h0, c0] if mode == "LSTM" else [h0]
    forwards = (mode, x, initial, weights, True, True)
    opcheck(fused._operation, forwards, test_utils=("test_schema", "test_faketensor"))
    states = torch.cat([h0, fused._operation(*forwards)[0]])
    came = torch.randn(5, 3, 4, dtype=dtype), torch.randn(3, 4, dtype=dtype), torch.randn(3, 4, dtype=dtype)
    c0, c_n = (c0[0], came[2]) if mode == "LSTM" else (None, None)
    back = (mode, x, states, c0, weights, *came[:2], c_n)
    opcheck(kernels._operation, back, test_utils=("test_schema", "test_faketensor"))
    trace = Trace(x, states, c0, *weights)
    incoming = Incoming(*came[:2], c_n)
    expected = kernels.back_through_time(mode, trace, incoming)
    found = kernels._as_one_operation(mode, trace, incoming)
    for one, other in zip((*found[:4], *found.summed()), (*expected[:4], *expected.summed()), strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
