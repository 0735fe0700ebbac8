"""Norms and sums of convolutions by each strategy, against the gradient of each example by itself."""

import pytest
import torch

from ghostclip.native import library
from ghostclip.native.shifts import shifted_products
from ghostclip.norms.convolution import ConvGrads, Geometry, weight_gradient

needs_compiler = pytest.mark.skipif(library("shifts") is None, reason="no C compiler here")
# Sizes, kernel, stride, padding, dilation, and channels in and out: more and fewer than fit into vectors and panels.
SHAPES = {
    "an image": ((9, 7), (3, 2), (1, 1), (0, 0), (1, 1), 3, 4),
    "padding": ((4, 5), (3, 3), (1, 1), (1, 2), (1, 1), 3, 4),
    "strides and padding": ((9, 8), (3, 3), (2, 3), (1, 2), (1, 1), 2, 19),
    "dilation": ((12, 9), (3, 2), (1, 2), (2, 0), (2, 3), 1, 33),
    "dilation, no stride": ((9, 8), (3, 2), (1, 1), (1, 0), (2, 3), 3, 4),
    "pixels that no tap meets": ((8, 7), (2, 2), (3, 3), (0, 0), (1, 1), 3, 16),
    "padding beyond the image": ((2, 1), (5, 3), (1, 1), (4, 2), (1, 1), 7, 5),
    "one place": ((3, 3), (3, 3), (1, 1), (0, 0), (1, 1), 20, 50),
    "longer than a vector": ((3, 21), (2, 5), (1, 1), (1, 2), (1, 1), 3, 4),
    "longer than a panel": ((6, 37), (3, 3), (1, 1), (0, 1), (2, 2), 3, 4),
    "one dimension": ((31,), (4,), (2,), (2,), (1,), 5, 17),
    "one dimension, no stride": ((11,), (4,), (1,), (2,), (1,), 3, 4),
    "three dimensions": ((4, 3, 5), (2, 3, 1), (1, 1, 1), (1, 1, 0), (1, 1, 2), 3, 4),
    "three dimensions with strides": ((4, 3, 5), (2, 3, 1), (1, 2, 1), (1, 1, 0), (1, 1, 2), 3, 6),
    "one tap": ((4, 3), (1, 1), (2, 1), (0, 0), (1, 1), 3, 6),
    "one channel": ((4, 3), (3, 2), (1, 1), (1, 0), (1, 1), 1, 6),
    "one output": ((4, 3), (3, 2), (1, 1), (1, 0), (1, 1), 2, 1),
}


def term_of(name, batch, dtype=torch.float64, factor=1, extra=0, groups=1):
    """The gradients of a batch of the named shape, with so many times its channels, and more channels in."""
    sizes, kernel, stride, padding, dilation, inputs, outputs = SHAPES[name]
    inputs, outputs = factor * inputs + extra, factor * outputs
    axes = zip(sizes, kernel, stride, padding, dilation, strict=True)
    places = [(size + 2 * pad - step * (taps - 1) - 1) // by + 1 for size, taps, by, pad, step in axes]
    torch.manual_seed(0)
    images = torch.randn(inputs, *sizes, batch, dtype=dtype).movedim(-1, 0)  # not next to each other
    grads = torch.randn(batch, outputs, *places, dtype=dtype)
    shape = torch.Size((outputs, inputs // groups, *kernel))
    return ConvGrads(images, grads, shape, Geometry(stride, padding, dilation, groups))


def single(term, each):
    part = slice(each, each + 1)
    return weight_gradient(term.images[part].double(), term.grads[part].double(), term.shape, term.geometry)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("last", ["nothing", "images", "grads", "both"])
@pytest.mark.parametrize("name", [name for name in SHAPES if "three" not in name])
def test_shifts_equal_single_gradients(name, last, keep, dtype):
    term = term_of(name, 4, dtype)
    term.images[1] = torch.inf  # a bad example in between
    for side in ("images", "grads"):
        if last in (side, "both"):
            setattr(term, side, getattr(term, side).movedim(1, -1).contiguous().movedim(-1, 1))
    axes = term.shape[2:], term.geometry.stride, term.geometry.padding, term.geometry.dilation
    squared, *kept = shifted_products(term.images, term.grads, *axes, keep)
    assert bool(kept) == keep
    assert not squared[1].isfinite()
    off = dict.fromkeys(("rtol", "atol"), 1e-5 if dtype == torch.float32 else 1e-12)
    for each in (0, 2, 3):
        gradient = single(term, each)
        torch.testing.assert_close(squared[each].double(), gradient.square().sum(), **off)
        if keep:
            torch.testing.assert_close(kept[0][each].double(), gradient, **off)


@pytest.mark.parametrize("name", SHAPES)
def test_the_weighted_sum_equals_single_gradients(name):
    for extra in (40, 0):  # more numbers in the images, or in the gradients: either may be the one that is scaled
        term, weights = term_of(name, 5, extra=extra), torch.rand(5, dtype=torch.float64)
        expected = sum(weight * single(term, each) for each, weight in enumerate(weights))
        found = term.weighted_sum(weights)
        # As optimizers' states are, which are made like it: what is compiled asks for the parameter's own strides.
        assert found.stride() == torch.empty(term.shape).stride()
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_narrow_gradients_are_summed_in_single_precision():
    term = ConvGrads(torch.randn(3, 4, 3, 3).bfloat16(), torch.randn(3, 5, 3, 3).bfloat16(), torch.Size((5, 4, 3, 3)),
                   Geometry((1, 1), (1, 1), (1, 1), 1))  # fmt: skip
    weights = torch.rand(3)
    assert term.weighted_sum(weights).dtype == torch.float32
    expected = (weights.view(-1, 1) * term.per_example().flatten(1)).sum(0).view(term.shape)
    torch.testing.assert_close(term.weighted_sum(weights), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("row_order", ["example", "row"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_several_rows_of_an_example_are_summed_before_their_norm(name, groups, row_order):
    rows = 3
    term = term_of(name, 2 * rows, factor=2, groups=groups)
    each = term.per_example()
    expected = each.unflatten(0, (2, rows)).sum(1) if row_order == "example" else each.unflatten(0, (rows, 2)).sum(0)
    found = term.split_rows(rows, row_order)
    torch.testing.assert_close(found.per_example(), expected, rtol=1e-11, atol=1e-11)
    squared = expected.square().flatten(1).sum(1)
    for strategy in found.candidates().values():
        torch.testing.assert_close(strategy.run(found).squared_norms, squared, rtol=1e-11, atol=0)
    weights = torch.tensor([0.5, 2.0], dtype=torch.float64)
    weighted = torch.einsum("b,b...->...", weights, expected)
    torch.testing.assert_close(found.weighted_sum(weights), weighted, rtol=1e-11, atol=1e-11)
