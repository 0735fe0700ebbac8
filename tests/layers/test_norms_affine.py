"""Linear layers on one position measured and summed, norms of groups and weights, at any sizes and strides."""

import pytest
import torch
from comparing import assert_dicts_close, gradients

import ghostclip
from ghostclip.clipping import PerLayer, flat_weights
from ghostclip.norms import reduce
from ghostclip.norms.affine import LinearPair

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
SIZES = [(1, 1), (3, 17), (64, 65), (128, 63), (515, 16), (15, 100), (2, 8193)]
NAMES = [("weight", "bias"), ("weight",), ("bias",)]


def layers(batch, dtype, names):
    generator = torch.Generator().manual_seed(batch)
    made = [[torch.randn(batch, size, generator=generator, dtype=dtype) for size in sizes] for sizes in SIZES]
    return [LinearPair(left, right, names) for left, right in made]


def per_example(layer):
    both = {"weight": torch.einsum("bp,bd->bpd", layer.left, layer.right), "bias": layer.left}
    return [both[name].double() for name in layer.names]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("batch", [0, 1, 16, 37, 300])
def test_norms_and_sums_of_many_layers(batch, names, dtype):
    some = layers(batch, dtype, names)
    for layer in some:
        each = torch.rand(batch, dtype=dtype)
        found = zip(per_example(layer), layer.squared_norms(), layer.weighted_sums(each), strict=True)
        for gradient, norm, total in found:
            expected = gradient.flatten(1).square().sum(1).to(dtype)
            torch.testing.assert_close(norm, expected, rtol=TOLERANCE[dtype], atol=0)
            expected = torch.tensordot(each.double(), gradient, 1).to(dtype)
            torch.testing.assert_close(total, expected, rtol=TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])


@pytest.mark.parametrize("names", NAMES)
def test_strided_tensors(names):
    wide = torch.randn(19, 64)
    rows = LinearPair(wide[:, 3:40], torch.randn(38, 21)[::2], names)
    columns = LinearPair(wide.clone().t()[:19], torch.randn(1, 21).expand(19, 21), names)
    weights = [torch.rand(38)[::2], torch.rand(19)]
    expected = [gradient for layer in (rows, columns) for gradient in per_example(layer)]
    norms = torch.stack([gradient.flatten(1).square().sum(1) for gradient in expected]).float()
    squared = torch.stack([*rows.squared_norms(), *columns.squared_norms()])
    torch.testing.assert_close(squared, norms, rtol=1e-5, atol=0)
    found = [*rows.weighted_sums(weights[0]), *columns.weighted_sums(weights[1])]
    repeated = [each for each in weights for _ in names]
    for total, gradient, each in zip(found, expected, repeated, strict=True):
        torch.testing.assert_close(total, torch.tensordot(each.double(), gradient, 1).float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norms_and_weights(dtype):
    rows = torch.rand(3, 700, dtype=dtype)
    found = reduce.norms([rows[2], rows], dtype)
    torch.testing.assert_close(found, (rows.sum(0) + rows[2]).sqrt())
    torch.testing.assert_close(reduce.norms([rows[1]], dtype), rows[1].sqrt())
    weights = flat_weights(found, 0.5)
    torch.testing.assert_close(weights, (0.5 / found).clamp(max=1.0))
    assert (weights * found <= 0.5).all()
    odd = flat_weights(torch.tensor([0.0, torch.inf, torch.nan, 4.0], dtype=dtype), 2.0)
    torch.testing.assert_close(odd, torch.tensor([1.0, 0.0, torch.nan, 0.5], dtype=dtype), equal_nan=True)


@pytest.mark.parametrize("spoil", [torch.nan, torch.inf, -torch.inf])
def test_one_number_that_is_not_finite_is_seen(spoil):
    for size in (1, 33):
        fine, spoilt = torch.rand(size), torch.rand(size)
        spoilt[-1] = spoil
        assert reduce.all_finite(fine, fine.half(), fine.double())
        assert not reduce.all_finite(fine, spoilt)
        assert not reduce.all_finite(spoilt.double(), fine)


def classifier():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()


@pytest.mark.parametrize("spoil", [None, torch.nan, torch.inf])
def test_groups_that_wait_for_each_other_do_what_the_others_do(spoil):
    x, y = torch.randn(9, 6).double(), torch.arange(9) % 3
    if spoil is not None:
        x[4] = spoil
    found = []
    clipper = ghostclip.GhostClipper(classifier(), PerLayer(0.3))
    for _ in range(2):
        clipper.model.zero_grad()
        losses = torch.nn.functional.cross_entropy(clipper.model(x), y, reduction="none")
        found.append((clipper.backward(losses), gradients(clipper.model)))
        with pytest.raises(ghostclip.StaleInputError, match="freed"):
            clipper.backward(losses)
    assert_dicts_close(found[0][1], found[1][1], 1e-12)
    for of in ("norms", "weights"):
        torch.testing.assert_close(*(getattr(result, of) for result, _ in found), equal_nan=True)
    assert spoil is None or not any(bool(weights[4]) for weights in found[1][0].weights.values())
