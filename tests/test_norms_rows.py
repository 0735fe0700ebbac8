"""Norms of gradients that fall on rows of a table, every way, against the table itself."""

import pytest
import torch

from ghostclip.norms.outer import Outer, gram
from ghostclip.norms.rows import Rows, pairs_squared_norms, repeats_squared_norms, runs_squared_norms

WAYS = [runs_squared_norms, repeats_squared_norms, pairs_squared_norms]
INDICES = {
    "all the same": lambda: torch.full((3, 6), 2),
    "none twice": lambda: torch.stack([torch.randperm(9)[:6] for _ in range(3)]),
    "same across examples": lambda: torch.arange(6).expand(3, 6),
    "ends meet": lambda: torch.tensor([[0, 1, 2, 5, 5, 5], [5, 5, 5, 0, 0, 0], [0, 0, 0, 8, 8, 8]]),
    "at random": lambda: torch.randint(9, (3, 6)),
    "two positions": lambda: torch.tensor([[1, 1], [1, 2], [2, 2]]),
    "one example": lambda: torch.randint(3, (1, 6)),
    "no example": lambda: torch.empty(0, 6, dtype=torch.int64),
}


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_norms_equal_those_of_the_table(name, way):
    torch.manual_seed(0)
    indices = INDICES[name]()
    gradients = torch.randn(*indices.shape, 5, dtype=torch.float64)
    table = Rows(indices, gradients, torch.Size((9, 5))).per_example()
    torch.testing.assert_close(way(indices, gradients), table.flatten(1).square().sum(1), rtol=1e-12, atol=0)


def test_rows_that_cancel_keep_their_digits():
    indices = torch.zeros(2, 4, dtype=torch.int64)
    gradients = torch.randn(2, 1, 8) * torch.tensor([1.0, -1.0, 1.0, -1.0]).view(1, 4, 1)
    gradients = gradients + 1e-4 * torch.randn(2, 4, 8)
    exact = gradients.double().sum(1).square().sum(1)
    for way in WAYS:
        torch.testing.assert_close(way(indices, gradients).double(), exact, rtol=1e-2, atol=0)


@pytest.mark.parametrize("positions", [255, 256, 257, 700])
def test_gram_matrices_of_long_sequences_are_worked_off_in_blocks(positions):
    torch.manual_seed(0)
    left, right = (torch.randn(2, positions, size, dtype=torch.float64) for size in (3, 4))
    squared, scale = gram(left, right)
    exact = Outer(left, right, torch.Size((3, 4))).per_example().flatten(1).square().sum(1)
    torch.testing.assert_close(squared, exact, rtol=1e-10, atol=0)
    expected = (left.square().sum(2) * right.square().sum(2)).sum(1)
    torch.testing.assert_close(scale, expected, rtol=1e-12, atol=0)
