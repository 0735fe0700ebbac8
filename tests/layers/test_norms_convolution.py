"""Norms and sums of convolutions by each strategy, against the gradient of each example by itself."""

import pytest
import torch

from ghostclip.native import library
from ghostclip.native.shifts import shifted_products
from ghostclip.norms.convolution import ConvGrads, Geometry, weight_gradient, windowed_gram

needs_compiler = pytest.mark.skipif(library("shifts") is None, reason="no C compiler here")
SHAPES = {
    "no padding": ((9, 7), (3, 2), (0, 0), (1, 1)),
    "padding": ((4, 5), (3, 3), (1, 2), (1, 1)),
    "padding beyond the image": ((2, 1), (5, 3), (4, 2), (1, 1)),
    "dilation": ((9, 8), (3, 2), (1, 0), (2, 3)),
    "whole input": ((3, 3), (3, 3), (0, 0), (1, 1)),
    "one dimension": ((11,), (4,), (2,), (1,)),
    "longer than a vector": ((3, 21), (2, 5), (1, 2), (1, 1)),
    "longer than a panel": ((6, 37), (3, 3), (0, 1), (2, 2)),
    "three dimensions": ((4, 3, 5), (2, 3, 1), (1, 1, 0), (1, 1, 2)),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_windows_equal_single_gradients(name, batch):
    sizes, kernel, padding, dilation = SHAPES[name]
    torch.manual_seed(0)
    outputs = [
        size + 2 * pad - step * (width - 1)
        for size, width, pad, step in zip(sizes, kernel, padding, dilation, strict=True)
    ]
    images = torch.randn(batch, 3, *sizes, dtype=torch.float64)
    grads = torch.randn(batch, 4, *outputs, dtype=torch.float64)
    squared, _ = windowed_gram(images, grads, kernel, padding, dilation)
    geometry = Geometry((1,) * len(sizes), padding, dilation, 1)
    for each in range(batch):
        part = slice(each, each + 1)
        gradient = weight_gradient(images[part], grads[part], torch.Size((4, 3, *kernel)), geometry)
        torch.testing.assert_close(squared[each], gradient.square().sum(), rtol=1e-11, atol=0)


@pytest.mark.parametrize("name", ["gram", "windows"])
def test_cancellation_between_positions_is_noticed(name):
    torch.manual_seed(0)
    images = 1 + 1e-3 * torch.randn(2, 3, 8, 8)
    grads = torch.randn(2, 4, 6, 6)
    grads -= grads.mean((2, 3), keepdim=True)
    term = ConvGrads(images, grads, torch.Size((4, 3, 3, 3)), Geometry((1, 1), (0, 0), (1, 1), 1))
    exact = (
        ConvGrads(images.double(), grads.double(), term.shape, term.geometry).per_example().flatten(1).square().sum(1)
    )
    found = term.candidates()[name].run(term).squared_norms
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=0)


def test_windows_are_offered_for_stride_one_and_a_kernel_of_several():
    images = torch.randn(2, 3, 8, 8)
    for stride, kernel, offered in (((1, 1), 3, True), ((2, 1), 3, False), ((1, 1), 1, False)):
        outputs = [(8 - kernel) // step + 1 for step in stride]
        shape = torch.Size((4, 3, kernel, kernel))
        term = ConvGrads(images, torch.randn(2, 4, *outputs), shape, Geometry(stride, (0, 0), (1, 1), 1))
        assert ("windows" in term.candidates()) == offered


# Sizes, kernel, stride, padding, dilation, and channels in and out: more and fewer than fit into vectors and panels.
SHIFTED = {
    "an image": ((9, 7), (3, 2), (1, 1), (0, 0), (1, 1), 3, 4),
    "strides and padding": ((9, 8), (3, 3), (2, 3), (1, 2), (1, 1), 2, 19),
    "dilation": ((12, 9), (3, 2), (1, 2), (2, 0), (2, 3), 1, 33),
    "pixels that no tap meets": ((8, 7), (2, 2), (3, 3), (0, 0), (1, 1), 3, 16),
    "padding beyond the image": ((2, 1), (5, 3), (1, 1), (4, 2), (1, 1), 7, 5),
    "one place": ((3, 3), (3, 3), (1, 1), (0, 0), (1, 1), 20, 50),
    "one dimension": ((31,), (4,), (2,), (2,), (1,), 5, 17),
}


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("name", SHIFTED)
def test_shifts_equal_single_gradients(name, keep, dtype):
    sizes, kernel, stride, padding, dilation, inputs, outputs = SHIFTED[name]
    torch.manual_seed(0)
    places = [
        (size + 2 * pad - step * (taps - 1) - 1) // stepped + 1
        for size, taps, stepped, pad, step in zip(sizes, kernel, stride, padding, dilation, strict=True)
    ]
    # A bad example in between, and images that are not next to each other.
    images = torch.randn(inputs, *sizes, 4, dtype=dtype).movedim(-1, 0)
    grads = torch.randn(4, outputs, *places, dtype=dtype)
    images[1] = torch.inf
    shape, geometry = torch.Size((outputs, inputs, *kernel)), Geometry(stride, padding, dilation, 1)
    squared, *kept = shifted_products(images, grads, kernel, stride, padding, dilation, keep)
    assert bool(kept) == keep
    assert not squared[1].isfinite()
    for each in (0, 2, 3):
        part = slice(each, each + 1)
        gradient = weight_gradient(images[part].double(), grads[part].double(), shape, geometry)
        off = {"rtol": 1e-5 if dtype == torch.float32 else 1e-12, "atol": 1e-5 if dtype == torch.float32 else 1e-12}
        torch.testing.assert_close(squared[each].double(), gradient.square().sum(), **off)
        if keep:
            torch.testing.assert_close(kept[0][each].double(), gradient, **off)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_every_candidate_gives_the_same(dimensions, groups, stride):
    torch.manual_seed(0)
    images = torch.randn(3, 6, *[7] * dimensions, dtype=torch.float64)
    grads = torch.randn(3, 4, *[(7 + 2 - 3) // stride + 1] * dimensions, dtype=torch.float64)
    geometry = Geometry((stride,) * dimensions, (1,) * dimensions, (1,) * dimensions, groups)
    term = ConvGrads(images, grads, torch.Size((4, 6 // groups, *[3] * dimensions)), geometry)
    expected = term.per_example()
    for candidate in term.candidates().values():
        found = candidate.run(term, True)
        torch.testing.assert_close(found.squared_norms, expected.flatten(1).square().sum(1), rtol=1e-11, atol=0)
        assert (found.kept is not None) == candidate.keeps
        if candidate.keeps:
            torch.testing.assert_close(found.kept, expected, rtol=1e-11, atol=1e-11)


def test_shifts_are_offered_in_one_and_two_dimensions():
    for dimensions, offered in ((1, True), (2, True), (3, False)):
        ones = (1,) * dimensions
        term = ConvGrads(
            torch.randn(2, 3, *[5] * dimensions),
            torch.randn(2, 4, *[4] * dimensions),
            torch.Size((4, 3, *[2] * dimensions)),
            Geometry(ones, (0,) * dimensions, ones, 1),
        )
        assert ("shifts" in term.candidates()) == (offered and library("shifts") is not None)


SUMMED = SHIFTED | {
    "three dimensions": ((4, 3, 5), (2, 3, 1), (1, 2, 1), (1, 1, 0), (1, 1, 2), 3, 6),
    "one tap": ((4, 3), (1, 1), (2, 1), (0, 0), (1, 1), 3, 6),
    "one channel": ((4, 3), (3, 2), (1, 1), (1, 0), (1, 1), 1, 6),
    "one output": ((4, 3), (3, 2), (1, 1), (1, 0), (1, 1), 2, 1),
}


@pytest.mark.parametrize("name", SUMMED)
def test_the_weighted_sum_equals_single_gradients(name):
    sizes, kernel, stride, padding, dilation, inputs, outputs = SUMMED[name]
    torch.manual_seed(0)
    for images_first in (True, False):
        # More numbers in the images, or in the gradients: either may be the one that is scaled.
        extra = 40 if images_first else 0
        geometry = Geometry(stride, padding, dilation, 1)
        axes = zip(sizes, kernel, stride, padding, dilation, strict=True)
        places = [(size + 2 * pad - step * (width - 1) - 1) // by + 1 for size, width, by, pad, step in axes]
        images = torch.randn(5, inputs + extra, *sizes, dtype=torch.float64)
        grads = torch.randn(5, outputs, *places, dtype=torch.float64)
        weights = torch.rand(5, dtype=torch.float64)
        term = ConvGrads(images, grads, torch.Size((outputs, inputs + extra, *kernel)), geometry)
        expected = sum(
            weight * weight_gradient(images[one], grads[one], term.shape, geometry)
            for weight, one in zip(weights, (slice(i, i + 1) for i in range(5)), strict=True)
        )
        found = term.weighted_sum(weights)
        # As optimizers' states are, which are made like it: what is compiled asks for the parameter's own strides.
        assert found.stride() == torch.empty(term.shape).stride()
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_narrow_gradients_are_summed_in_single_precision():
    torch.manual_seed(0)
    term = ConvGrads(torch.randn(3, 4, 3, 3).bfloat16(), torch.randn(3, 5, 3, 3).bfloat16(), torch.Size((5, 4, 3, 3)),
                   Geometry((1, 1), (1, 1), (1, 1), 1))  # fmt: skip
    weights = torch.rand(3)
    assert term.weighted_sum(weights).dtype == torch.float32
    expected = (weights.view(-1, 1) * term.per_example().flatten(1)).sum(0).view(term.shape)
    torch.testing.assert_close(term.weighted_sum(weights), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("row_order", ["example", "row"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", SHIFTED)
def test_several_rows_of_an_example_are_summed_before_their_norm(name, groups, row_order):
    sizes, kernel, stride, padding, dilation, inputs, outputs = SHIFTED[name]
    inputs, outputs, rows = 2 * inputs, 2 * outputs, 3
    torch.manual_seed(0)
    reach = [step * (width - 1) + 1 for step, width in zip(dilation, kernel, strict=True)]
    places = [
        (size + 2 * pad - each) // step + 1 for size, pad, each, step in zip(sizes, padding, reach, stride, strict=True)
    ]
    images = torch.randn(2 * rows, inputs, *sizes, dtype=torch.float64)
    grads = torch.randn(2 * rows, outputs, *places, dtype=torch.float64)
    shape = torch.Size((outputs, inputs // groups, *kernel))
    term = ConvGrads(images, grads, shape, Geometry(stride, padding, dilation, groups))
    single = term.per_example()
    expected = (
        single.unflatten(0, (2, rows)).sum(1) if row_order == "example" else single.unflatten(0, (rows, 2)).sum(0)
    )
    found = term.split_rows(rows, row_order)
    torch.testing.assert_close(found.per_example(), expected, rtol=1e-11, atol=1e-11)
    for strategy in found.candidates().values():
        torch.testing.assert_close(
            strategy.run(found).squared_norms, expected.square().flatten(1).sum(1), rtol=1e-11, atol=0
        )
    weights = torch.tensor([0.5, 2.0], dtype=torch.float64)
    weighted = torch.einsum("b,b...->...", weights, expected)
    torch.testing.assert_close(found.weighted_sum(weights), weighted, rtol=1e-11, atol=1e-11)
