"""Recurrent layers on cuDNN: the fused kernel's backward beside the loop, its memory, TensorFloat-32, CUDA graphs."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from recurrent_layers import KINDS, OPTIONS, initial, losses, pair, run, sequences
from time_traces import GATES, incoming_for, lived_through
from torch import Tensor

from ghostclip.nn.rnn.identity_input import identity_gradients, serves
from ghostclip.nn.rnn.loops import LOOPS
from ghostclip.nn.rnn.trace import GateGradients, Incoming, Trace, Way

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")

# What tests/support/pretended leaves out.
on_a_gpu = pytest.mark.skipif(torch.version.cuda is None, reason="this torch was built without CUDA")
every_mode = pytest.mark.parametrize("mode", GATES)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@pytest.fixture(params=[False, True], ids=["full precision", "TensorFloat-32"])
def tensor_float(request: pytest.FixtureRequest) -> Iterator[bool]:
    """cuDNN with TensorFloat-32, torch's default, or without."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = request.param
    yield request.param
    torch.backends.cudnn.allow_tf32 = before


def on_gpu(mode: str, dtype: torch.dtype, bias: bool = True) -> tuple[Trace, Incoming]:
    """What one direction saw, its states from the processor, and what comes in from outside."""
    trace = lived_through(mode, bias, dtype)
    there = {name: value if value is None else value.to(DEVICE) for name, value in vars(trace).items()}
    incoming = (None if grad is None else grad.to(DEVICE) for grad in incoming_for(trace, mode))
    return Trace(**there), Incoming(*incoming)


def gone_back(way: Way, trace: Trace, incoming: Incoming) -> list[Tensor]:
    """All gradients of one backward."""
    found: GateGradients = way(trace, incoming)
    return [part for part in (*found[:4], *found.summed()) if part is not None]


@on_a_gpu
@every_mode
def test_the_backward_is_the_fused_kernel_s(mode):
    assert serves(*on_gpu(mode, torch.float32))


@every_mode
@every_dtype
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_gate_gradients_are_those_of_the_loop(mode, dtype, bias, tensor_float):
    trace, incoming = on_gpu(mode, dtype, bias)
    ways = [gone_back(way, trace, incoming) for way in (partial(identity_gradients, mode), LOOPS[mode])]
    for found, expected in zip(*ways, strict=True):
        assert (found - expected).norm() <= (1e-12 if dtype == torch.float64 else 1e-5) * expected.norm()
    assert torch.backends.cudnn.allow_tf32 is tensor_float


@on_a_gpu
@every_mode
def test_it_can_be_captured_in_a_cuda_graph(mode):
    trace, incoming = on_gpu(mode, torch.float32)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            gone_back(partial(identity_gradients, mode), trace, incoming)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        found = gone_back(partial(identity_gradients, mode), trace, incoming)
    other, _ = on_gpu(mode, torch.float32)
    for name, value in vars(trace).items():
        if value is not None:
            value.copy_(getattr(other, name))
    graph.replay()
    torch.testing.assert_close(
        found, gone_back(partial(identity_gradients, mode), trace, incoming), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_outputs_and_ordinary_gradients_are_torchs(kind, option):
    """Each layer and direction has its weights in one chunk of memory: torch's warning would be an error here."""
    plain, wrapped = (layer.to(DEVICE) for layer in pair(kind, option))
    plain.dropout = wrapped.dropout = 0.0  # torch draws elsewhere on the GPU
    x = sequences(plain).to(DEVICE).requires_grad_()
    states = [state.detach().to(DEVICE).requires_grad_() for state in initial(plain)]
    found = []
    for layer in (wrapped, plain):
        results = run(layer, x, states)
        grads = torch.autograd.grad(losses(layer, results).sum(), [x, *layer.parameters(), *states])
        found.append([*results, *grads])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)
