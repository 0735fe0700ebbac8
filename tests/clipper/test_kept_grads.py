"""Small per-example gradients that "reweight" keeps in its first pass: its second backward leaves them out."""

import pytest
import torch
from comparing import gradients
from dispatched import Ops
from torch import nn
from torch.nn import functional as F

import ghostclip
from ghostclip.planner import Planner

CLASSES, EXAMPLES = 3, 4
LOWEST = (4, 1, 3, 3)  # the weight that is small beside what its layer produces


def network():
    """A convolution whose per-example gradients are far smaller than what it produces, and two larger layers."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 32, 3), nn.Tanh(), nn.Flatten(), nn.Linear(2048, CLASSES))
    return nn.Sequential(*layers).double()


def losses(model):
    torch.manual_seed(1)
    images = torch.randn(EXAMPLES, 1, 12, 12, dtype=torch.float64)
    return F.cross_entropy(model(images), torch.randint(CLASSES, (EXAMPLES,)), reduction="none")


def clipper(budget=None, **options):
    """One whose planner finds keeping fastest wherever the memory budget allows it."""
    found = ghostclip.GhostClipper(network(), 0.5, memory_budget=budget, **options)
    found.passes._planner = Planner("direct", measure=lambda run, device, best: 1.0)
    return found


def weight_gradients(of):
    """Shapes of the weight gradients that a second backward of convolutions forms, once strategies are chosen."""
    of.backward(losses(of.model))
    of.model.zero_grad()
    with Ops() as ops:
        of.backward(losses(of.model))
    batches = [args for name, _, args in ops.seen if name == "convolution_backward" and args[0].shape[0] == EXAMPLES]
    return [tuple(args[2].shape) for args in batches if args[10][1] and not args[2].storage_offset()]


def test_a_small_layer_is_left_out_of_the_second_backward():
    assert LOWEST not in weight_gradients(clipper())
    assert LOWEST in weight_gradients(clipper(budget=1))


@pytest.mark.parametrize("options", [{}, {"second_pass": "cached"}], ids=["reweight", "cached"])
@pytest.mark.parametrize("budget", [None, 1])
def test_hooks_of_a_parameter_run_once_on_the_finished_sum(options, budget):
    plain, each = clipper(budget, **options), clipper(budget, **options)
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


def test_processes_that_wait_for_each_other_get_each_sum_from_autograd(monkeypatch):
    expected = clipper()
    expected.backward(losses(expected.model))
    monkeypatch.setattr("ghostclip.clipper.gradients.is_distributed", lambda: True)
    each, delivered = clipper(), []
    # What DistributedDataParallel counts on: the node that accumulates a gradient runs, once.
    nodes = [p.view_as(p).grad_fn.next_functions[0][0] for p in each.model.parameters()]
    for node in nodes:
        node.register_hook(lambda *_: delivered.append(1))
    each.backward(losses(each.model))
    assert len(delivered) == len(nodes)
    torch.testing.assert_close(gradients(each.model), gradients(expected.model), rtol=1e-12, atol=1e-14)


def perceptron(**options):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    return ghostclip.GhostClipper(layers, 0.1, **options)


def few(model):
    torch.manual_seed(1)
    inputs = torch.randn(EXAMPLES, 6, dtype=torch.float64)
    return F.cross_entropy(model(inputs), torch.randint(CLASSES, (EXAMPLES,)), reduction="none")


def products(each):
    """How many matrix products a batch takes."""
    with Ops() as ops:
        each.backward(few(each.model))
    return sum(name in ("mm", "addmm") for name, _, _ in ops.seen)


def test_small_linear_layers_need_no_second_backward():
    each, cached = perceptron(), perceptron(second_pass="cached")
    last, of_cached, of_second = (
        [products(one) for _ in range(3)][-1] for one in (each, cached, perceptron(memory_budget=1))
    )
    assert last == of_cached < of_second
    cached.backward(few(cached.model))
    each.backward(few(each.model))
    for name, gradient in gradients(each.model).items():
        torch.testing.assert_close(gradient, gradients(cached.model)[name], rtol=1e-12, atol=1e-14)
