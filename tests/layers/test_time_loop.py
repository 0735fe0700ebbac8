"""The compiled backward through time equals tensor operations, step by step."""

import pytest
import torch
from time_traces import GATES, incoming_for, trace_of

from ghostclip import GhostClipper
from ghostclip.native import build, calls, library, rows, time_loop
from ghostclip.nn.rnn.kernels import COMPILED
from ghostclip.nn.rnn.loops import LOOPS

every_mode = pytest.mark.parametrize("mode", GATES)


@pytest.fixture(autouse=True)
def compiled():
    if library("time_loop") is None:
        pytest.skip("no C compiler here")


def gradients(ways, mode, trace, incoming):
    """[into_input, into_hidden, h0, (c0), both sums over time]."""
    found = ways[mode](trace, incoming)
    c0 = [] if found.c0 is None else [found.c0]
    return [found.into_input, found.into_hidden, found.h0, *c0, *found.summed()]


def assert_both_ways_agree(mode, trace, incoming, tolerance):
    pairs = zip(*(gradients(ways, mode, trace, incoming) for ways in (COMPILED, LOOPS)), strict=True)
    for found, expected in pairs:
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        assert (found - expected).norm() <= tolerance * expected.norm()


every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
OFF = {torch.float32: 1e-5, torch.float64: 1e-12}
SIZES = [
    (1, 1, 1, 1), (5, 3, 4, 6), (3, 8, 2, 16), (2, 11, 3, 17), (4, 13, 20, 50), (6, 2, 1, 49), (2, 17, 5, 112),
    (3, 0, 2, 5),
]  # fmt: skip


@every_mode
@every_dtype
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.one_in(2)
def test_the_same_as_tensor_operations(mode, dtype, bias, sizes):
    trace = trace_of(mode, *sizes, dtype, bias)
    assert_both_ways_agree(mode, trace, incoming_for(trace, mode), OFF[dtype])


@every_mode
@pytest.mark.parametrize("parts", [("output",), ("h_n",), ("c_n",), ()], ids=str)
def test_where_nothing_comes_in_from_somewhere(mode, parts):
    trace = trace_of(mode, 4, 9, 3, 18)
    assert_both_ways_agree(mode, trace, incoming_for(trace, mode, parts), 1e-12)


@every_mode
@every_dtype
@pytest.mark.parametrize("scale", [1e-5, 30.0, 1e6], ids=["linear", "saturated", "far out"])
def test_gates_keep_their_digits_at_every_scale(mode, scale, dtype):
    trace = trace_of(mode, 3, 5, 4, 20, dtype, scale=scale)
    assert_both_ways_agree(mode, trace, incoming_for(trace, mode), 10 * OFF[dtype])


@every_mode
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["x", "incoming"])
def test_a_bad_example_stays_by_itself(mode, bad, place):
    trace = trace_of(mode, 4, 10, 3, 18)
    incoming = incoming_for(trace, mode)
    clean = gradients(COMPILED, mode, trace, incoming)
    spoilt, others = (trace.x if place == "x" else incoming.output), torch.arange(10) != 6
    spoilt[2, 6, 1] = bad
    if place == "x":
        trace.states[3, 6] = float("nan")
    for found, expected in zip(gradients(COMPILED, mode, trace, incoming), clean, strict=True):
        axis = found.dim() - 2
        assert torch.equal(found.movedim(axis, 0)[others], expected.movedim(axis, 0)[others])
        # Where a state is NaN, a relu's factor is 0: the loss and the weight gradients are NaN by the state itself.
        assert (mode == "RNN_RELU" and place == "x") or not found.movedim(axis, 0)[6].isfinite().all()


@every_mode
def test_threads_change_no_bit(mode, monkeypatch):
    trace = trace_of(mode, 5, 43, 6, 20, torch.float32)
    incoming = incoming_for(trace, mode)
    alone = gradients(COMPILED, mode, trace, incoming)
    monkeypatch.setattr(calls, "SHARE", 1)
    for count in (2, 3, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        together = gradients(COMPILED, mode, trace, incoming)
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_processor_settings_are_left_as_they_were():
    before = torch.tensor([1e-40]) / 2
    trace = trace_of("LSTM", 2, 3, 2, 5, torch.float32)
    gradients(COMPILED, "LSTM", trace, incoming_for(trace, "LSTM"))
    assert torch.equal(torch.tensor([1e-40]) / 2, before)
    assert before.item() > 0


@pytest.mark.parametrize("missing", ["compiler", "permission"])
def test_without_a_compiler_tensor_operations_do_it(missing, monkeypatch, tmp_path, caplog):
    for module in (time_loop, rows):
        # Without its memory, which would keep what is missing here from all tests to come.
        monkeypatch.setattr(module, "library", build.library.__wrapped__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if missing == "compiler":
        monkeypatch.setattr(build, "FOLDER", "nowhere")  # nor with the wheel's kernels
        monkeypatch.setenv("PATH", "/nowhere")
        monkeypatch.delenv("CC", raising=False)
    else:
        monkeypatch.setenv("GHOSTCLIP_COMPILE", "0")
    model, x = torch.nn.LSTM(3, 5).double(), torch.randn(4, 2, 3, dtype=torch.float64)
    expected = torch.autograd.grad(model(x)[0][:, 0].square().sum(), model.weight_hh_l0)[0]
    clipper = GhostClipper(model, 1e6)
    losses = model(x)[0].square().sum((0, 2)) * torch.tensor([1.0, 0.0], dtype=torch.float64)
    clipper.backward(losses)
    assert torch.allclose(model.weight_hh_l0.grad, expected, rtol=1e-10)
    assert ("no C compiler found (tried $CC, cc, gcc, clang)" in caplog.text) == (missing == "compiler")
    assert list(tmp_path.rglob("*.so")) == []
