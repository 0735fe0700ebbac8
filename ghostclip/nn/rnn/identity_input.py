"""The way back through time by torch's fused kernel itself, fed the gates' pre-activations through an identity matrix.

Every time step's x W_ih^T + b is one matrix product for all of them. A fused recurrence that takes this as its input,
with an identity for W_ih, computes the layer's own states, and the gradient at its input is the gradient at the
pre-activation of every gate and step: Lee & Kifer's dL/dz_t (2020, sections 5.3 and 5.4) from one fused backward, in
which no weight gradient is formed. Biases add up beforehand; a GRU's b_hh stands inside of r * (W_hn h + b_hn) and
stays with the kernel, and the hidden side of its n has r times the gradient, for which r is computed once more.

It is the way on cuDNN, where a recurrence is one call for all time steps and loops.py starts several kernels for
each. What it costs beside the layer's forward and backward: a second fused forward; the identity's products, gates * H
multiplications for each pre-activation, forwards and back (gates times as much as W_hh's); and the identity's memory,
which `possible` has a bound for. The second forward could only be saved if the model ran on this one: its output would
no longer be torch's to the last bit, and what it leaves would stay from each layer's forward to its backward.

States are run through anew in float32 or wider: where the model's own were rounded (half precision, TensorFloat-32),
the gate gradients are those of states without that rounding, for norms and sums alike. The identity's products are
exact then, and would be rounded to ten bits by TensorFloat-32, which cuDNN may use by default; here it may not. An
infinite pre-activation becomes NaN in the identity's sums: the example, that one alone, counts as not finite.

Nothing here has run on CUDA yet: the tests force this way on the CPU, where torch's kernels take the same calls, and
tests/gpu holds what is to be proved on a GPU (memory in one chunk, TensorFloat-32, CUDA graphs). No speed is claimed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .fused import KERNELS, in_one_chunk, on_cudnn
from .trace import GateGradients, Incoming, Trace

__all__ = ["identity_gradients", "possible", "serves"]

# An identity of more numbers than this is made only for pre-activations that are as many; 16 MiB in float32.
SMALL_IDENTITY = 1 << 22

# The setting is one for the process, and each GPU's backward has a thread.
_SETTING = threading.RLock()


def possible(trace: Trace, incoming: Incoming) -> bool:
    """Whether this way can be gone, were it on cuDNN: there is something, unprojected, and the identity isn't huge."""
    width, positions = trace.weight_hh.shape[0], trace.x.shape[0] * trace.x.shape[1]
    fits = width * width <= max(SMALL_IDENTITY, width * positions)
    # A projection's own gradient needs what was projected, which the kernel doesn't tell; and of sequences of different
    # lengths it has no last cell states for gradients to come to.
    known = trace.weight_hr is None and (trace.padding is None or incoming.c_n is None)
    return known and positions > 0 and fits


def serves(trace: Trace, incoming: Incoming) -> bool:
    """Whether this is the way for a trace: its numbers are where torch takes cuDNN."""
    return on_cudnn(trace.x) and possible(trace, incoming)


@contextmanager
def _exact() -> Iterator[None]:
    """Without the ten bits of cuDNN's TensorFloat-32; autograd records nothing."""
    read: Any = torch._C._get_cudnn_allow_tf32
    write: Any = torch._C._set_cudnn_allow_tf32
    off: Any = False
    if hasattr(torch._C, "_get_fp32_precision_getter"):  # since torch 2.9 recurrences have a setting of their own
        read = partial(torch._C._get_fp32_precision_getter, "cuda", "rnn")
        write, off = partial(torch._C._set_fp32_precision_setter, "cuda", "rnn"), "ieee"
    with _SETTING, torch.no_grad():
        before = read()
        write(off)
        try:
            yield
        finally:
            write(before)


@contextmanager
def _recorded() -> Iterator[None]:
    """With autograd recording, in a backward, where grad mode is off, and in an operation, where all of it is."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    back = excluded - torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    with torch._C._ForceDispatchKeyGuard(included, back), torch.enable_grad():
        yield


def identity_gradients(mode: str, trace: Trace, incoming: Incoming) -> GateGradients:
    """Gate gradients, in torch's order of gates, by the recurrence once more from its pre-activations."""
    inside = trace.bias_hh if mode == "GRU" else None
    with _exact():
        at_gates = F.linear(trace.x, trace.weight_ih, trace.bias_ih if mode == "GRU" else trace.bias)
        identity = torch.eye(at_gates.shape[2], dtype=at_gates.dtype, device=at_gates.device)
        biases = [] if inside is None else [torch.zeros_like(inside), inside]
        weights = in_one_chunk(mode, [identity, trace.weight_hh, *biases], bool(biases))
        starts = [at_gates, trace.states[:1]] + ([] if trace.c0 is None else [trace.c0.unsqueeze(0)])
        given = tuple(start.detach().requires_grad_() for start in starts)
        last = (None if grad is None else grad.unsqueeze(0) for grad in (incoming.h_n, incoming.c_n))
        with _recorded():
            hidden = given[1] if trace.c0 is None else given[1:]
            # cuDNN goes back through training forwards only.
            results = KERNELS[mode](given[0], hidden, weights, bool(biases), 1, 0.0, True, False, False)
            pairs = zip(results, (incoming.output, *last), strict=False)
            came = [(result, grad) for result, grad in pairs if grad is not None]
            if came:
                outputs, grads = zip(*came, strict=True)
                found = torch.autograd.grad(outputs, given, grads)
            else:
                found = tuple(torch.zeros_like(start) for start in given)
        into_input, h0, *c0 = found
        into_hidden = _into_hidden_of_gru(at_gates, trace, into_input) if mode == "GRU" else into_input
    return GateGradients(into_input, into_hidden, h0[0], c0[0][0] if c0 else None)


def _into_hidden_of_gru(at_gates: Tensor, trace: Trace, into_input: Tensor) -> Tensor:
    """The gradient as W_hh and b_hh see it: with n = tanh(a + r b), that at b is r times that at a."""
    hidden, bias = trace.hidden, trace.bias_hh
    r = F.linear(trace.states[:-1], trace.weight_hh[:hidden], None if bias is None else bias[:hidden])
    r += at_gates[..., :hidden]
    found = into_input.clone()
    found[..., 2 * hidden :] *= r.sigmoid_()
    return found
