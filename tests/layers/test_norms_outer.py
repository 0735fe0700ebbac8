"""Norms of sums of outer products by Gram matrices, beside those of the gradients themselves."""

import pytest
import torch

from ghostclip.norms.outer import OuterProduct, gram


def sides(batch, positions, outputs, inputs, dtype=torch.float64):
    return (torch.randn(batch, positions, width, dtype=dtype) for width in (outputs, inputs))


def test_factors_of_any_layout():
    left, right = sides(4, 6, 20, 9)
    exact = torch.bmm(left.mT, right).flatten(1).square().sum(1)
    by_time = left.transpose(0, 1).contiguous().transpose(0, 1)
    for first, second in ((left, right), (by_time, right.mT.contiguous().mT)):
        term = OuterProduct(first, second, torch.Size((20, 9)))
        for strategy in term.candidates().values():
            torch.testing.assert_close(strategy.run(term).squared_norms, exact, rtol=1e-12, atol=0)
        weights = torch.rand(4, dtype=torch.float64)
        expected = torch.tensordot(weights, term.per_example(), 1)
        torch.testing.assert_close(term.weighted_sum(weights), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("positions", [255, 256, 257, 700])
def test_gram_matrices_of_long_sequences_are_worked_off_in_blocks(positions):
    left, right = sides(2, positions, 3, 4)
    squared, scale = gram(left, right)
    exact = OuterProduct(left, right, torch.Size((3, 4))).per_example().flatten(1).square().sum(1)
    torch.testing.assert_close(squared, exact, rtol=1e-10, atol=0)
    expected = (left.square().sum(2) * right.square().sum(2)).sum(1)
    torch.testing.assert_close(scale, expected, rtol=1e-12, atol=0)
