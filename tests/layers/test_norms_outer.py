"""Norms of sums of outer products by Gram matrices, beside those of the gradients themselves."""

import pytest
import torch

from ghostclip.native import library
from ghostclip.norms.outer import OuterProduct, gram

FORMS = ["gram", "half gram"] if library("gram") is not None else ["gram"]


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


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [*FORMS, "direct"])
def test_a_bad_example_stays_by_itself(name, bad):
    left, right = sides(5, 6, 20, 9)
    term = OuterProduct(left, right, torch.Size((20, 9)))
    run = term.candidates()[name].run
    clean = run(term).squared_norms
    right[3, 2, 1] = bad
    found = run(term).squared_norms
    assert not found[3].isfinite()
    assert torch.equal(found[[0, 1, 2, 4]], clean[[0, 1, 2, 4]])


@pytest.mark.parametrize("name", FORMS)
def test_cancellation_falls_back_to_the_direct_form(name):
    right = torch.ones(2, 6, 5) + 1e-3 * torch.randn(2, 6, 5)
    left = torch.randn(2, 6, 20)
    left -= left.mean(1, keepdim=True)
    term = OuterProduct(left, right, torch.Size((20, 5)))
    exact = torch.bmm(left.double().mT, right.double()).flatten(1).square().sum(1)
    found = term.candidates()[name].run(term).squared_norms
    assert torch.allclose(found.double(), exact, rtol=1e-3)


@pytest.mark.parametrize("positions", [255, 256, 257, 700])
def test_gram_matrices_of_long_sequences_are_worked_off_in_blocks(positions):
    left, right = sides(2, positions, 3, 4)
    squared, scale = gram(left, right)
    exact = OuterProduct(left, right, torch.Size((3, 4))).per_example().flatten(1).square().sum(1)
    torch.testing.assert_close(squared, exact, rtol=1e-10, atol=0)
    expected = (left.square().sum(2) * right.square().sum(2)).sum(1)
    torch.testing.assert_close(scale, expected, rtol=1e-12, atol=0)
