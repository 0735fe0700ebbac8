"""Small per-example gradients that "reweight" keeps in its first pass: its second backward leaves them out."""

import pytest
import torch
from comparing import every_pass, gradients
from dispatched import Ops
from torch import nn
from torch.nn import functional as F

import ghostclip


def clipper(**options):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return ghostclip.GhostClipper(layers, 0.1, **options)


def losses(model):
    torch.manual_seed(1)
    inputs = torch.randn(4, 6, dtype=torch.float64)
    return F.cross_entropy(model(inputs), torch.randint(3, (4,)), reduction="none")


@every_pass
@pytest.mark.parametrize("budget", [None, 1])
def test_hooks_of_a_parameter_run_once_on_the_finished_sum(second_pass, budget):
    plain, each = (clipper(second_pass=second_pass, memory_budget=budget) for _ in range(2))
    plain.backward(losses(plain.model))
    seen, after = [], []
    each.model[0].weight.register_hook(lambda sums: seen.append(sums.clone()) or 2 * sums)
    each.model[0].weight.register_post_accumulate_grad_hook(lambda parameter: after.append(parameter.grad.clone()))
    each.backward(losses(each.model))
    expected = gradients(plain.model)
    assert len(seen) == len(after) == 1
    torch.testing.assert_close(seen[0], expected["0.weight"], rtol=1e-12, atol=1e-14)
    expected["0.weight"] = 2 * expected["0.weight"]
    torch.testing.assert_close(gradients(each.model), expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(after[0], expected["0.weight"], rtol=1e-12, atol=1e-14)


def products(each):
    """How many matrix products the third batch takes."""
    for _ in range(3):
        with Ops() as ops:
            each.backward(losses(each.model))
    return sum(name in ("mm", "addmm") for name, _, _ in ops.seen)


def test_small_linear_layers_need_no_second_backward():
    kept, cached, formed_again = clipper(), clipper(second_pass="cached"), clipper(memory_budget=1)
    assert products(kept) == products(cached) < products(formed_again)
    torch.testing.assert_close(gradients(kept.model), gradients(cached.model), rtol=1e-12, atol=1e-14)
