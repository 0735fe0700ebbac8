"""CUDA exactness in the narrower settings of everyday training: bfloat16 autocast, bfloat16 weights, TensorFloat-32.

Narrow arithmetic rounds a gradient differently for one example alone than in a batch, so the loop is no exact reference
here. What must hold whatever the rounding: norms and clipped sums near the loop's, no example's share above the bound.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import oracle
import pytest
import torch
from torch import Tensor, nn

import ghostclip
from ghostclip.bench.workloads import WORKLOADS

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")

NETWORKS = ("mlp", "cnn", "cifar-cnn", "embedding", "gpt-128")
MAX_NORM = 0.5
BF16, TF32 = 0.05, 0.01  # eight and ten bits, through a few layers

every_network = pytest.mark.parametrize("name", NETWORKS)
every_pass = pytest.mark.parametrize("second_pass", ["reweight", "cached"])
every_strategy = pytest.mark.parametrize("norm_strategy", ["auto", "gram", "direct"])


@contextmanager
def tensor_float(allowed: bool) -> Iterator[None]:
    """Matrix products and convolutions with TensorFloat-32, or without."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def subject(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A network and four examples on the GPU."""
    torch.manual_seed(0)
    inputs, targets = WORKLOADS[name].batch(4)
    return WORKLOADS[name].model().to(DEVICE), inputs.to(DEVICE), targets.to(DEVICE)


def truth(name: str) -> tuple[Tensor, Tensor]:
    """(norms [B], the clipped sum in one vector) by a float32 loop without TensorFloat-32."""
    model, inputs, targets = subject(name)
    with tensor_float(False):
        losses = [
            WORKLOADS[name].losses(model(inputs[one : one + 1]), targets[one : one + 1]).sum()
            for one in range(len(targets))
        ]
        grads = oracle.grads_of_single_losses(model, torch.stack(losses))
    return oracle.norms(grads), torch.cat([each.flatten() for each in oracle.clipped_sum(grads, MAX_NORM).values()])


def assert_near(name: str, result, model: nn.Module, tolerance: float) -> None:
    """Norms and the clipped sum within a share of the loop's; the sum of four within four times the bound."""
    norms, expected = truth(name)
    found = torch.cat([parameter.grad.float().flatten() for parameter in model.parameters()])
    torch.testing.assert_close(result.norms.float(), norms, rtol=tolerance, atol=0)
    assert (found - expected).norm() < 2 * tolerance * expected.norm()
    assert (result.weights * result.norms <= MAX_NORM).all()
    assert found.norm() <= len(norms) * result.sensitivity * (1 + tolerance)


@every_network
@every_pass
@every_strategy
@pytest.mark.parametrize("narrow", [False, True], ids=["TensorFloat-32", "bfloat16 autocast"])
def test_narrow_products(name, second_pass, norm_strategy, narrow):
    model, inputs, targets = subject(name)
    clipper = ghostclip.GhostClipper(model, MAX_NORM, second_pass=second_pass, norm_strategy=norm_strategy)
    with tensor_float(not narrow), torch.autocast(DEVICE, torch.bfloat16, enabled=narrow):
        outputs = model(inputs)
    with tensor_float(not narrow):
        result = clipper.backward(WORKLOADS[name].losses(outputs.float(), targets))
    assert result.norms.dtype == torch.float32
    assert_near(name, result, model, BF16 if narrow else TF32)


@pytest.mark.parametrize("name", ["mlp", "cnn", "embedding"])
@every_pass
def test_bfloat16_weights(name, second_pass):
    model, inputs, targets = subject(name)
    model = model.bfloat16()
    clipper = ghostclip.GhostClipper(model, MAX_NORM, second_pass=second_pass)
    outputs = model(inputs.bfloat16() if inputs.is_floating_point() else inputs)
    result = clipper.backward(WORKLOADS[name].losses(outputs.float(), targets))
    assert result.sensitivity > MAX_NORM
    assert_near(name, result, model, 2 * BF16)
