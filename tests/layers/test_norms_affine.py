"""Linear layers on one position measured and summed, norms of groups and weights, at any sizes and strides."""

import pytest
import torch

from ghostclip.clipping import flat_weights
from ghostclip.norms import reduce
from ghostclip.norms.affine import LinearPair

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
SIZES = [(1, 1), (3, 17), (64, 65), (128, 63), (515, 16), (15, 100), (2, 8193)]
NAMES = [("weight", "bias"), ("weight",), ("bias",)]


LAYOUTS = {
    "plain": lambda rows: rows,
    "every second row of a wider tensor": lambda rows: torch.cat([rows, rows], 1).repeat_interleave(2, 0)[
        ::2, : rows.shape[1]
    ],
    "columns": lambda rows: rows.t().contiguous().t(),
    "expanded": lambda rows: rows[:1].expand_as(rows),
}


def layers(batch, dtype, names, layout):
    generator = torch.Generator().manual_seed(batch)
    made = [[torch.randn(batch, size, generator=generator, dtype=dtype) for size in sizes] for sizes in SIZES]
    return [LinearPair(left, LAYOUTS[layout](right), names) for left, right in made]


def per_example(layer):
    both = {"weight": torch.einsum("bp,bd->bpd", layer.left, layer.right), "bias": layer.left}
    return [both[name].double() for name in layer.names]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize(("batch", "layout"), [*((batch, "plain") for batch in (0, 1, 16, 37, 300)),
                                               *((19, layout) for layout in LAYOUTS)])  # fmt: skip
def test_norms_and_sums_of_many_layers(batch, layout, names, dtype):
    some = layers(batch, dtype, names, layout)
    for layer in some:
        each = torch.rand(batch, dtype=dtype)
        found = zip(per_example(layer), layer.squared_norms(), layer.weighted_sums(each), strict=True)
        for gradient, norm, total in found:
            expected = gradient.flatten(1).square().sum(1).to(dtype)
            torch.testing.assert_close(norm, expected, rtol=TOLERANCE[dtype], atol=0)
            expected = torch.tensordot(each.double(), gradient, 1).to(dtype)
            torch.testing.assert_close(total, expected, rtol=TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])


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
