"""Parameters that a layer multiplies with and something outside of it uses too, or that are used outside twice."""

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from case_models import Wired
from case_types import project
from comparing import assert_close, assert_dicts_close, gradients
from torch import Tensor, nn
from torch.nn import functional as F

import ghostclip

Wiring = Callable[[Any, Tensor], Tensor]

# name: (wiring of a Linear from 5 to 5 called ``layer``, shape of the bare Parameter ``p``)
SHARED: dict[str, tuple[Wiring, tuple[int, ...]]] = {
    "layer_norm twice": (
        lambda m, x: F.layer_norm(m.layer(F.layer_norm(x, (5,), m.p, m.p)), (5,), m.p, m.p).sin(), (5,)),
    "conv1d twice": (lambda m, x: F.conv1d(torch.tanh(F.conv1d(m.layer(x), m.p, padding=1)), m.p), (6, 6, 3)),
    "einsum twice": (
        lambda m, x: torch.einsum("btd,dp->btp", torch.einsum("btd,dp->btp", m.layer(x), m.p).sin(), m.p), (5, 5)),
    "scale of what leads to no parameter": (lambda m, x: m.layer(x) * (m.p * x.detach().requires_grad_()), (5,)),
    "scale twice": (lambda m, x: m.layer(x * m.p) * m.p, (5,)),
    "weight in F.linear": (lambda m, x: F.linear(torch.tanh(m.layer(x)), m.layer.weight), (1,)),
    "weight in F.linear on both sides": (
        lambda m, x: F.linear(torch.tanh(m.layer(F.linear(x, m.layer.weight))), m.layer.weight), (1,)),
    "weight from the left": (lambda m, x: m.layer.weight @ torch.tanh(m.layer(x))[:, :5], (1,)),
    "weight over its norm": (
        lambda m, x: F.linear(torch.tanh(m.layer(x)), m.layer.weight / m.layer.weight.norm()), (1,)),
    "weight read by its layer": (lambda m, x: m.layer(x) + m.layer(m.layer.weight).sum(0), (1,)),
    "weight read by its layer, twice": (lambda m, x: m.layer(x) @ m.layer(torch.tanh(m.layer(m.layer.weight))), (1,)),
    "weight read by its layer, cloned": (lambda m, x: m.layer(x) + m.layer(m.layer.weight.clone()).sum(0), (1,)),
    "table of positions, of which there may be as many as examples": (
        lambda m, x: m.layer(x) + torch.tanh(m.table(torch.arange(6))) * m.p, (1,)),
    "table of a layer that sees positions, a factor too": (
        lambda m, x: torch.tanh(m.layer(x) + m.table(torch.arange(6)[None])) @ m.table.weight.T, (1,)),
    "table of a layer that sees positions, over its norm": (
        lambda m, x: (m.layer(x) + m.table(torch.arange(6)[None])) @ (m.table.weight / m.table.weight.norm()).T, (1,)),
    "read by a layer": (lambda m, x: m.layer(x) + m.layer(m.p) * m.layer.bias, (1, 5)),
    "read by a layer twice": (lambda m, x: m.layer(x) + m.layer(torch.tanh(m.layer(m.p))) * m.p, (1, 5)),
}  # fmt: skip


def model_of(wiring: Wiring, shape: tuple[int, ...]) -> nn.Module:
    model = Wired(wiring, layer=nn.Linear(5, 5), table=nn.Embedding(6, 5))
    model.p = nn.Parameter(torch.randn(shape))
    return model.double()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("batch", [1, 3, 6])
@pytest.mark.parametrize("second_pass", ["reweight", "cached"])
def test_every_use_counts_once(name, batch, second_pass):
    model, x = model_of(*SHARED[name]), torch.randn(batch, 6, 5, dtype=torch.float64)
    expected = oracle.per_example_grads(model, project, (x,))
    clipper = ghostclip.GhostClipper(model, 0.5, second_pass=second_pass)
    assert_close(clipper.norms(project(model(x))), oracle.norms(expected), 1e-10)
    assert_dicts_close(clipper.per_example_grads(project(model(x))), expected, 1e-10)
    clipper.backward(project(model(x)))
    assert_dicts_close(gradients(model), oracle.clipped_sum(expected, 0.5), 1e-10)


@pytest.mark.parametrize("whole_first", [True, False])
def test_attention_whose_weight_is_used_as_a_whole_and_by_parts(whole_first):
    def wiring(m, x, other):
        h = m.layer(x, x, x)[0] if whole_first else m.layer(x, other, other)[0]
        return m.layer(h, other, other)[0] if whole_first else m.layer(h, h, h)[0]

    model = Wired(wiring, layer=nn.MultiheadAttention(4, 2, batch_first=True)).double()
    inputs = torch.randn(3, 5, 4, dtype=torch.float64), torch.randn(3, 6, 4, dtype=torch.float64)
    expected = oracle.norms(oracle.per_example_grads(model, project, inputs))
    assert_close(ghostclip.GhostClipper(model).norms(project(model(*inputs))), expected, 1e-10)
