"""Backward through time by the identity input, as on cuDNN, forced on the CPU: exact, and used where it applies."""

import math

import oracle
import pytest
import torch
from cases import case
from comparing import assert_close, assert_compiled_exact, assert_dicts_close, gradients, ready, truth, typical_norm
from graphs import interpret
from recurrent_readers import model_of
from time_traces import GATES, incoming_for, lived_through, trace_of
from torch import nn

import ghostclip
from ghostclip.clipping import PerLayer
from ghostclip.nn.rnn import fused, identity_input, kernels
from ghostclip.nn.rnn.identity_input import identity_gradients, possible
from ghostclip.nn.rnn.kernels import back_through_time
from ghostclip.nn.rnn.loops import LOOPS
from ghostclip.nn.rnn.trace import Incoming, Trace

every_mode = pytest.mark.parametrize("mode", GATES)
KINDS = ("rnn tanh", "rnn relu", "lstm", "gru")
ROWS = [f"{kind} {option}" for kind in KINDS for option in (
    "time first no bias", "output", "both ways", "two layers both ways states", "packed",
    "packed in order two layers both ways states",
)]  # fmt: skip
# The loop's: gradients come to the last cell states of sequences of different lengths.
LEFT = ("lstm packed", "lstm packed in order two layers both ways states")
every_row = pytest.mark.parametrize("name", ROWS)


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


@every_row
@pytest.mark.parametrize("second_pass", ["reweight", "cached", "layer by layer"])
@pytest.mark.one_in(3)
def test_clipped_sums_equal_the_loop_over_single_examples(name, second_pass, served):
    row = case(name)
    expected, each = truth(row), second_pass == "layer by layer"
    bound = typical_norm(expected)
    options = {"clipping": PerLayer(bound)} if each else {"clipping": bound, "second_pass": second_pass}
    model, clipper, losses = ready(row, **options)
    result = clipper.backward(losses)
    owners = {name.rpartition(".")[0] if each else "" for name in expected}
    for owner in owners:
        own = {name: grad for name, grad in expected.items() if not each or name.rpartition(".")[0] == owner}
        sums = {name: grad for name, grad in gradients(model).items() if name in own}
        assert_close(result.norms[owner] if each else result.norms, oracle.norms(own), 1e-10)
        assert_dicts_close(sums, oracle.clipped_sum(own, bound / math.sqrt(len(owners))), 1e-10)
    assert served or name in LEFT


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_it_goes_back_inside_of_an_operation_of_a_graph(name, served, monkeypatch):
    interpret(monkeypatch)
    x = torch.randn(5, 7, 3, dtype=torch.float64)
    assert_compiled_exact(model_of(name), x, lambda losses: losses, second_pass="cached")
    assert served


@every_mode
def test_two_backwards_over_a_kept_graph_agree(mode, served):
    torch.manual_seed(0)
    kind, options = {"RNN_TANH": (nn.RNN, {}), "RNN_RELU": (nn.RNN, {"nonlinearity": "relu"})}.get(
        mode, (getattr(nn, mode, None), {})
    )
    layer = ghostclip.wrap(kind(3, 4, dtype=torch.float64, **options))
    total = layer(torch.randn(5, 2, 3, dtype=torch.float64))[0].square().sum()
    first, second = (
        torch.autograd.grad(total, list(layer.parameters()), retain_graph=again) for again in (True, False)
    )
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert len(served) == 2


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


def test_what_it_cannot_serve_is_left_to_the_loop():
    trace, nothing = trace_of("LSTM", 7, 5, 3, 6), Incoming(None, None, None)
    assert possible(trace, nothing)
    assert not identity_input.serves(trace, nothing)
    projected = Trace(trace.x, trace.states, trace.c0, trace.weight_ih, trace.weight_hh, None, None, torch.ones(2, 6))
    assert not possible(projected, nothing)
    assert not possible(trace_of("GRU", 7, 0, 3, 6), nothing)
    wide = torch.empty(4 * 520, 520)  # an identity of 17 MB
    few, many = (torch.empty(steps, 5, 3) for steps in (400, 420))
    assert [possible(Trace(x, x, x[0], wide, wide, None, None), nothing) for x in (few, many)] == [False, True]


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"proj_size": 2}, {"proj_size": 2, "bias": False}], ids=str)
def test_weights_are_a_chunk_where_nothing_else_is_in_their_memory(options):
    layer = nn.LSTM(3, 4, **options)
    weights = [parameter.data for parameter in layer.parameters()]
    bias, sizes = "bias" not in options, [weight.numel() for weight in weights]
    for more in (0, 32, 40):  # the zeros for two biases of 16; more is another layer's
        memory = torch.zeros(sum(sizes) + more)
        parts = [part.view_as(weight) for part, weight in zip(memory.split([*sizes, more]), weights, strict=False)]
        assert fused._are_a_chunk(parts, bias, len(parts)) == (more == (0 if bias else 32))
        assert not fused._are_a_chunk([*parts[:-1], weights[-1]], bias, len(parts))
    assert not fused._are_a_chunk(weights, bias, len(weights))


def test_weights_in_pieces_are_brought_together_for_cudnn(monkeypatch):
    told = []
    monkeypatch.setattr(fused, "on_cudnn", lambda tensor: True)
    monkeypatch.setattr(torch.backends.cudnn.rnn, "get_cudnn_mode", lambda mode: mode)
    monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", lambda copies, *rest: told.append((len(copies), *rest)))
    layer = ghostclip.wrap(nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2))
    x, before = torch.randn(5, 2, 3), [parameter.data_ptr() for parameter in layer.parameters()]
    layer(x)
    layer(nn.utils.rnn.pack_sequence([x[:, 0], x[:3, 1]]))
    one = [(5, 5, width, "LSTM", 4, 2, 1, False, False) for width in (3, 3, 4, 4)]
    assert told == one + [(10, 5, width, "LSTM", 4, 2, 1, False, True) for width in (3, 4)]
    assert [parameter.data_ptr() for parameter in layer.parameters()] == before
