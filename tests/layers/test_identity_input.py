"""Backward through time by the identity input, as on cuDNN, forced on the CPU: exact, and used where it applies."""

import pytest
import torch
from comparing import assert_compiled_exact
from graphs import interpret
from recurrent_readers import model_of
from time_traces import GATES, incoming_for, lived_through

from ghostclip.nn.rnn import identity_input, kernels
from ghostclip.nn.rnn.identity_input import identity_gradients, possible
from ghostclip.nn.rnn.kernels import back_through_time
from ghostclip.nn.rnn.loops import LOOPS

every_mode = pytest.mark.parametrize("mode", GATES)


@pytest.fixture
def served(monkeypatch):
    """The traces that went through the identity input, which is used wherever it applies from now on."""
    traces = []
    monkeypatch.setattr(kernels, "has_compiled_loop", lambda trace: False)
    monkeypatch.setattr(kernels, "serves", lambda trace, came: possible(trace, came) and not traces.append(trace))
    return traces


@every_mode
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("parts", [("output", "h_n", "c_n"), ("h_n",), ("c_n",), ()], ids=str)
def test_gate_gradients_are_those_of_the_loop(mode, bias, parts):
    trace = lived_through(mode, bias)
    incoming = incoming_for(trace, mode, parts)
    ways = [identity_gradients(mode, trace, incoming), LOOPS[mode](trace, incoming)]
    for found, expected in zip(*([*way[:4], *way.summed()] for way in ways), strict=True):
        assert (found is None) == (expected is None)
        assert found is None or (found - expected).norm() <= 1e-13 * expected.norm()


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_it_goes_back_inside_of_an_operation_of_a_graph(name, served, monkeypatch):
    interpret(monkeypatch)
    x = torch.randn(5, 7, 3, dtype=torch.float64)
    assert_compiled_exact(model_of(name), x, lambda losses: losses, second_pass="cached")
    assert served


def precision():
    return torch._C._get_fp32_precision_getter("cuda", "rnn")


@pytest.mark.parametrize("before", ["tf32", "ieee"])
@pytest.mark.parametrize("fails", [False, True], ids=["works", "fails"])
@pytest.mark.usefixtures("served")
def test_the_kernel_runs_without_tensor_float_32_and_autocast(before, fails, monkeypatch):
    seen, kernel, trace = [], identity_input.KERNELS["LSTM"], lived_through("LSTM", dtype=torch.float32)

    def note(*_):
        seen.append((precision(), torch.is_autocast_enabled("cpu")))
        if fails:
            raise KeyboardInterrupt

    def noted(*args):
        output, *last = kernel(*args)
        output.register_hook(note)
        note()
        return output, *last

    monkeypatch.setitem(identity_input.KERNELS, "LSTM", noted)
    usual = precision()
    torch._C._set_fp32_precision_setter("cuda", "rnn", before)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            back_through_time("LSTM", trace, incoming_for(trace, "LSTM"))
    except KeyboardInterrupt:
        assert fails
    finally:
        after = precision()
        torch._C._set_fp32_precision_setter("cuda", "rnn", usual)
    assert after == before
    assert seen == [("ieee", False)] * (1 if fails else 2)
