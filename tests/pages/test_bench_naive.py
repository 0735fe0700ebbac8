"""The two naive methods: what they add to p.grad is the clipped sum of the definition."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ghostclip.bench import naive

METHODS = [naive.nxbp, naive.multiloss]
MAX_NORM = 2.0


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def small_model() -> nn.Sequential:
    """Two layers, and one parameter that takes no part."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model.unused = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    return model


def small_batch(count: int = 6):
    return [torch.randn(count, 4, dtype=torch.float64) * 3, torch.arange(count) % 3]


def summed(model) -> torch.Tensor:
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize("method", METHODS)
def test_calls_add_up_and_an_empty_batch_adds_nothing(method):
    model, batch = small_model(), small_batch()
    method(model, loss_fn, batch, MAX_NORM)
    whole = summed(model).clone()
    model.zero_grad()
    assert method(model, loss_fn, [part[:0] for part in batch], MAX_NORM).shape == (0,)
    for half in (slice(0, 2), slice(2, None)):
        method(model, loss_fn, [part[half] for part in batch], MAX_NORM)
    torch.testing.assert_close(summed(model), whole)


@pytest.mark.parametrize("method", METHODS)
def test_an_example_that_is_not_finite_contributes_zero(method):
    model, batch = small_model(), small_batch()
    method(model, loss_fn, [part[1:] for part in batch], MAX_NORM)
    others = summed(model).clone()
    model.zero_grad()
    batch[0][0, 0] = float("nan")
    norms = method(model, loss_fn, batch, MAX_NORM)
    assert torch.isfinite(norms).tolist() == [False] + [True] * 5
    torch.testing.assert_close(summed(model), others)
