"""Norms of sums of outer products by Gram matrices: by compiled C, by batched products, and beside the gradients."""

import pytest
import torch

from ghostclip.native import library
from ghostclip.native.gram import half_gram, ragged_gram
from ghostclip.norms.outer import OuterProduct, gram

needs_compiler = pytest.mark.skipif(library("gram") is None, reason="no C compiler here")
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
OFF = {torch.float32: 1e-5, torch.float64: 1e-12}
# Batch, positions, outputs, inputs: around the sizes of blocks, panels and the depth that C takes at a time.
SIZES = [
    (1, 1, 1, 1), (3, 5, 6, 4), (2, 28, 64, 17), (9, 70, 33, 16), (0, 3, 2, 2), (2, 4, 600, 40), (3, 33, 130, 7),
    (2, 129, 257, 40), (2, 8, 128, 129), (2, 15, 5, 5), (2, 16, 5, 5), (2, 17, 5, 5), (2, 47, 1, 300), (1, 300, 20, 3),
    (2, 165, 1700, 6),  # more than a cache holds, so that panels share a read: as many as go together, and one more
]  # fmt: skip


def sides(batch, positions, outputs, inputs, dtype=torch.float64):
    return (torch.randn(batch, positions, width, dtype=dtype) for width in (outputs, inputs))


@needs_compiler
@every_dtype
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_same_as_batched_products(sizes, dtype):
    left, right = sides(*sizes, dtype)
    for found, expected in zip(half_gram(left, right), gram(left, right), strict=True):
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, rtol=OFF[dtype])


@needs_compiler
@every_dtype
@pytest.mark.parametrize("lengths", [(), (0,), (3,), (0, 1, 17, 0, 5), (16, 33, 1, 2), (1,) * 40], ids=str)
@pytest.mark.parametrize("widths", [(1, 1), (6, 4), (130, 17), (7, 257)], ids=str)
def test_ragged_examples_are_the_same_one_by_one(lengths, widths, dtype):
    """Sides may be parts of wider rows."""
    left, right = (torch.randn(sum(lengths), width + 2, dtype=dtype)[:, 1:-1] for width in widths)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    squared, scale, sizes = ragged_gram(left, right, starts)
    for example, (l, r) in enumerate(zip(left.split(lengths), right.split(lengths), strict=True) if lengths else ()):
        expected, size, both = gram(l.unsqueeze(0), r.unsqueeze(0)) if len(l) else left.new_zeros(3, 1)
        assert torch.allclose(squared[example], expected, rtol=OFF[dtype], atol=OFF[dtype])
        assert torch.allclose(scale[example], size, rtol=OFF[dtype])
        assert torch.allclose(sizes[:, example], both.flatten(), rtol=OFF[dtype])
    assert len(squared) == len(scale) == sizes.shape[1] == len(lengths)


@needs_compiler
@every_dtype
@pytest.mark.parametrize("side", [0, 1], ids=["left", "right"])
@pytest.mark.parametrize("kept", [(0, 60), (7, 70), (20, 50), (69, 70), (0, 0)], ids=str)
def test_padding_at_either_end_changes_nothing(kept, side, dtype):
    """Zeros of one side: a padded position has no gradient, whatever its input is."""
    both = list(sides(3, 70, 37, 21, dtype))
    both[side][1, : kept[0]] = both[side][1, kept[1] :] = 0.0
    # What stands beside zeros is in no product, so that its size isn't missed.
    for found, expected in zip(half_gram(*both)[:2], gram(*both)[:2], strict=True):
        assert torch.allclose(found, expected, rtol=OFF[dtype])


@needs_compiler
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 36])
@pytest.mark.parametrize("side", [0, 1], ids=["left", "right"])
def test_padding_beside_a_number_that_is_not_finite_counts(side, place, number):
    """Zero times it is NaN in the gradient, too."""
    both = list(sides(3, 20, 37, 37))
    both[side][1, 12:] = 0.0
    both[1 - side][1, 19, place] = number
    assert half_gram(*both)[0].isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("positions", [255, 256, 257, 700])
def test_gram_matrices_of_long_sequences_are_worked_off_in_blocks(positions):
    left, right = sides(2, positions, 3, 4)
    squared, scale, sizes = gram(left, right)
    exact = OuterProduct(left, right, torch.Size((3, 4))).per_example().flatten(1).square().sum(1)
    torch.testing.assert_close(squared, exact, rtol=1e-10, atol=0)
    expected = (left.square().sum(2) * right.square().sum(2)).sum(1)
    torch.testing.assert_close(scale, expected, rtol=1e-12, atol=0)
    expected = torch.stack([left.square().sum((1, 2)), right.square().sum((1, 2))])
    torch.testing.assert_close(sizes, expected, rtol=1e-12, atol=0)
