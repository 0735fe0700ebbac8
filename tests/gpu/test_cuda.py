"""CUDA exactness: layers and the paper's networks on the GPU against the slow loop in float64 on the processor."""

import oracle
import pytest
import torch
from cases import case
from comparing import TOLERANCE, assert_close, assert_dicts_close, gradients, typical_norm
from declared_layers import MyLinear, declared
from torch import Tensor
from torch.utils._pytree import tree_leaves

import ghostclip
from ghostclip.bench.workloads import SETS, WORKLOADS

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")

# One row of the table for each family of layers and each way a graph can be shaped; the processor's tests run them all.
ROWS = (
    "linear 3-D", "linear 3-D in place", "conv1d dilation", "conv2d stride", "conv2d groups", "conv2d reflect",
    "conv2d channels_last", "conv3d plain", "embedding padding_idx", "layernorm 3-D", "groupnorm 4-D",
    "rnn tanh output", "lstm output and state", "gru time first", "rnn relu two layers both ways states",
    "lstm both ways", "lstm two layers both ways states", "gru two layers both ways states", "lstm packed",
    "gru packed in order two layers both ways states", "lstm projected both ways",
    "attention key_padding_mask", "attention causal", "encoder layer", "residual in place", "same conv twice",
    "tied head", "unused layer", "frozen first",
)  # fmt: skip

every_row = pytest.mark.parametrize("name", ROWS)
every_pass = pytest.mark.parametrize("second_pass", ["reweight", "cached"])
every_network = pytest.mark.parametrize("name", SETS["usual"])


@pytest.fixture(autouse=True)
def full_precision():
    """Float32 convolutions and recurrences without TensorFloat-32, whose ten bits are not what is tested."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def losses_of(outputs: object, batch_dim: int = 0) -> Tensor:
    """One loss per example, [B], that no output is without: sum_j cos(j) z_j + z_j^2 / 2, on the outputs' device."""
    total: object = 0.0
    for leaf in (leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)):
        rows = leaf.movedim(batch_dim, 0).flatten(1)
        total = total + (torch.arange(rows.shape[1]).cos().to(rows) * rows + 0.5 * rows**2).sum(dim=1)
    return total


def truth(name: str) -> dict[str, Tensor]:
    """Per-example gradients by the loop on the processor, in float64."""
    row = case(name)
    return oracle.per_example_grads(
        row.model(), lambda outputs: losses_of(outputs, row.output_dim), row.inputs(), row.batch_dims
    )


def on_gpu(name: str, dtype: torch.dtype, **options):
    """The row's model on the GPU, its clipper, and the losses of a batch."""
    row = case(name)
    model = ghostclip.wrap(row.model(dtype=dtype).to(DEVICE), **row.wrap)
    clipper = ghostclip.GhostClipper(model, **options)
    outputs = model(*(value.detach().to(DEVICE) for value in row.inputs(dtype=dtype)))
    return model, clipper, losses_of(outputs, row.output_dim)


@every_row
@every_pass
def test_clipped_sums_equal_the_loop(name, second_pass):
    expected, tolerance = truth(name), TOLERANCE[torch.float64]
    max_norm = typical_norm(expected)
    model, clipper, losses = on_gpu(name, torch.float64, clipping=max_norm, second_pass=second_pass)
    result = clipper.backward(losses)
    assert result.norms.device.type == DEVICE
    assert_close(result.norms.cpu(), oracle.norms(expected), tolerance)
    found = {name: grad.cpu() for name, grad in gradients(model).items()}
    assert_dicts_close(found, oracle.clipped_sum(expected, max_norm), tolerance)


@every_row
def test_norms_in_float32_equal_the_loop(name):
    _, clipper, losses = on_gpu(name, torch.float32)
    assert_close(clipper.norms(losses).cpu(), oracle.norms(truth(name)), TOLERANCE[torch.float32])


@every_network
@every_pass
@pytest.mark.parametrize("norm_strategy", ["auto", "gram", "direct"])
def test_the_networks_of_the_benchmark_are_exact(name, second_pass, norm_strategy):
    torch.manual_seed(0)
    workload = WORKLOADS[name]
    model, (inputs, targets) = workload.model().double().to(DEVICE), workload.batch(4)
    batch = inputs.to(DEVICE), targets.to(DEVICE)
    if batch[0].is_floating_point():
        batch = batch[0].double(), batch[1]
    clipper = ghostclip.GhostClipper(model, 0.5, second_pass=second_pass, norm_strategy=norm_strategy)

    def losses(model, batch):
        return workload.losses(model(batch[0]), batch[1])

    assert clipper.verify(losses, batch) < 1e-9


@every_pass
def test_an_example_that_is_not_finite_contributes_zero(second_pass):
    torch.manual_seed(0)
    model, (inputs, targets) = WORKLOADS["cnn"].model().to(DEVICE), WORKLOADS["cnn"].batch(4)
    clipper = ghostclip.GhostClipper(model, 0.5, second_pass=second_pass)
    inputs[2] = torch.inf
    kept = [0, 1, 3]
    sums = []
    for rows in ([0, 1, 2, 3], kept):
        outputs = model(inputs[rows].to(DEVICE))
        result = clipper.backward(
            torch.nn.functional.cross_entropy(outputs, targets[rows].to(DEVICE), reduction="none")
        )
        sums.append({name: grad.clone() for name, grad in gradients(model).items()})
        model.zero_grad()
        assert result.weights.count_nonzero() == 3
    for name, value in sums[1].items():
        torch.testing.assert_close(sums[0][name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.usefixtures("declarations")
@every_pass
def test_a_declared_layer_is_verified_there_and_exact(second_pass):
    model, x = declared(MyLinear, torch.nn.Linear, 5, 4).double(), torch.randn(6, 3, 5, dtype=torch.float64)
    model(x)
    expected = oracle.per_example_grads(ghostclip.unwrap(model), losses_of, (x,))
    clipper = ghostclip.GhostClipper(model.to(DEVICE), 0.5, second_pass=second_pass)
    MyLinear.calls = 0
    clipper.backward(losses_of(model(x.to(DEVICE))))
    assert MyLinear.calls == 1
    found = {name: grad.cpu() for name, grad in gradients(model).items()}
    assert_dicts_close(found, oracle.clipped_sum(expected, 0.5), TOLERANCE[torch.float64])
