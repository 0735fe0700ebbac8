"""Adapters on frozen layers of weights quantized by bitsandbytes; test_row_layouts.py has the products by name."""

from types import SimpleNamespace

import pytest
import torch
from case_models import Wired
from torch import nn

import ghostclip
from ghostclip import UnsupportedModelError

try:  # installed by `make test-quantized`
    import bitsandbytes
except ModuleNotFoundError:
    bitsandbytes = None

with_the_library = pytest.mark.skipif(bitsandbytes is None, reason="bitsandbytes isn't installed")


def four_bit(**options):
    return bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", **options)


def eight_bit(threshold=0.0):
    return bitsandbytes.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False, threshold=threshold)


def adapted(m, x):
    h = m.below(x).tanh()
    return m.base(h) + m.up(m.down(h))


def low_rank(base):
    """Adapters of rank 2 around a quantized layer, over positions [B, T, 64], with a trained layer below."""
    down, up = nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False)
    return Wired(adapted, below=nn.Linear(64, 64), base=base.requires_grad_(False), down=down, up=up)


@with_the_library
@pytest.mark.parametrize("base", [four_bit, lambda: four_bit(compress_statistics=True), eight_bit])
def test_adapters_on_a_quantized_layer_are_exact(base):
    torch.manual_seed(0)
    model = low_rank(base()).to("cpu")
    clipper = ghostclip.GhostClipper(model, clipping=0.5)
    for _ in range(4):
        x = torch.randn(5, 3, 64)
        clipper.verify(lambda m, x: m(x).square().mean((1, 2)), x)
        clipper.backward(model(x).square().mean((1, 2)))
    assert not clipper.passes.is_open


@with_the_library
def test_eight_bits_by_the_library():
    with pytest.raises(UnsupportedModelError, match=r"base: Linear8bitLt .* above 6 .*llm_int8_threshold=0\.0"):
        ghostclip.wrap(low_rank(eight_bit(threshold=6.0)))
    assert ghostclip.check(low_rank(eight_bit())) == []


@pytest.mark.parametrize(("threshold", "problems"), [(6.0, 1), (0.0, 0)])
def test_eight_bits_with_features_apart_where_one_example_is_large_are_refused(threshold, problems):
    """By a stand-in, which needs no library."""
    base = type("Linear8bitLt", (nn.Module,), {"__module__": "bitsandbytes.nn.modules"})()
    base.state = SimpleNamespace(threshold=threshold)
    assert [finding.path for finding in ghostclip.check(low_rank(base))] == ["base"] * problems
