"""Adapters on frozen layers of quantized weights, whose products are functions of other libraries."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ghostclip
from ghostclip import UnsupportedModelError
from ghostclip.graph import layouts
from ghostclip.graph.operations import ROW_BY_ROW
from ghostclip.graph.parameter_names import ParameterNames
from ghostclip.graph.reader import read_graph

try:  # installed by `make test-quantized`
    import bitsandbytes
except ModuleNotFoundError:
    bitsandbytes = None

BATCHES, EXAMPLES, WIDTH = 5, 4, 8


# The rule by name, on stand-ins --------------------------------------------------------------------------------------


def function(module: str, name: str) -> type[torch.autograd.Function]:
    """A product with a frozen weight, and maybe a bias, that says it is some library's function."""

    def forward(ctx, x, weight, bias):
        ctx.weight = weight
        return x @ weight.t() + bias

    def backward(ctx, grad):
        return grad @ ctx.weight, None, grad.flatten(0, -2).sum(0)

    content = {"forward": staticmethod(forward), "backward": staticmethod(backward), "__module__": module}
    return type(name, (torch.autograd.Function,), content)


class Adapted(nn.Module):
    """A frozen product between an adapter and a head; ``turned``: with the examples in the last dimension."""

    def __init__(self, product, bias=False, checkpointed=False, turned=False):
        super().__init__()
        self.adapter, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.bias = nn.Parameter(torch.zeros(WIDTH), requires_grad=bias)
        self.product, self.checkpointed, self.turned = product, checkpointed, turned

    def adapted(self, x):
        h = self.adapter(x).tanh()
        size = len(h) if self.turned else WIDTH
        bias = torch.zeros(size) if self.turned else self.bias
        found = self.product.apply(h.t() if self.turned else h, torch.eye(size) * 2, bias)
        return found.t() if self.turned else found

    def forward(self, x):
        h = checkpoint(self.adapted, x, use_reentrant=False) if self.checkpointed else self.adapted(x)
        return self.head(h).square().sum(1)


def measured(product, **options):
    """Which of some batches are measured, by number from 1."""
    torch.manual_seed(0)
    model, known = ghostclip.wrap(Adapted(product, **options)), layouts.Layouts(lambda _: None)
    names, found = ParameterNames(model), []
    for number in range(1, BATCHES + 1):
        losses = model(torch.randn(EXAMPLES, WIDTH))
        if known.lay_out(losses, read_graph(losses, names), names, forward=lambda: None).measured:
            found.append(number)
    return found


@pytest.mark.parametrize("name", sorted(ROW_BY_ROW))
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_known_product_is_measured_as_any_operation(name, checkpointed):
    module, _, own = name.rpartition(".")
    assert measured(function(module, own), checkpointed=checkpointed) == [1, 2, 4]


def test_under_checkpointing_any_other_function_is_measured_in_every_batch():
    assert measured(function("elsewhere", "MatMul4Bit"), checkpointed=True) == [1, 2, 3, 4, 5]
    assert measured(function("elsewhere", "MatMul4Bit")) == [1, 2, 4]


def test_a_known_product_that_has_the_examples_in_the_last_dimension_is_measured_in_every_batch():
    assert measured(function("hqq.core.quantize", "HQQMatmulCachedDeq"), turned=True) == [1, 2, 3, 4, 5]


def test_a_known_product_whose_bias_is_trained_is_any_function():
    product = function("bitsandbytes.autograd._functions", "MatMul4Bit")
    assert measured(product, bias=True, checkpointed=True) == [1, 2, 3, 4, 5]


# The library itself --------------------------------------------------------------------------------------------------


with_the_library = pytest.mark.skipif(bitsandbytes is None, reason="bitsandbytes isn't installed")


def four_bit(**options):
    return bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", **options)


def eight_bit(threshold=0.0):
    return bitsandbytes.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False, threshold=threshold)


class LowRank(nn.Module):
    """Adapters of rank 2 around a quantized layer, over positions [B, T, 64], with a trained layer below."""

    def __init__(self, base):
        super().__init__()
        self.below, self.base = nn.Linear(64, 64), base.requires_grad_(False)
        self.down, self.up = nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False)

    def forward(self, x):
        h = self.below(x).tanh()
        return self.base(h) + self.up(self.down(h))


@with_the_library
@pytest.mark.parametrize("base", [four_bit, lambda: four_bit(compress_statistics=True), eight_bit])
def test_adapters_on_a_quantized_layer_are_exact(base):
    torch.manual_seed(0)
    model = LowRank(base()).to("cpu")
    clipper = ghostclip.GhostClipper(model, clipping=0.5)
    for _ in range(4):
        x = torch.randn(5, 3, 64)
        clipper.verify(lambda m, x: m(x).square().mean((1, 2)), x)
        clipper.backward(model(x).square().mean((1, 2)))
    assert not clipper.passes.is_open


@with_the_library
def test_eight_bits_by_the_library():
    with pytest.raises(UnsupportedModelError, match=r"base: Linear8bitLt .* above 6 .*llm_int8_threshold=0\.0"):
        ghostclip.wrap(LowRank(eight_bit(threshold=6.0)))
    assert ghostclip.check(LowRank(eight_bit())) == []


@pytest.mark.parametrize(("threshold", "problems"), [(6.0, 1), (0.0, 0)])
def test_eight_bits_with_features_apart_where_one_example_is_large_are_refused(threshold, problems):
    """By a stand-in, which needs no library."""
    kind = type("Linear8bitLt", (nn.Module,), {"__module__": "bitsandbytes.nn.modules"})
    base = kind()
    base.state = SimpleNamespace(threshold=threshold)
    found = ghostclip.check(LowRank(base))
    assert [finding.path for finding in found] == ["base"] * problems
