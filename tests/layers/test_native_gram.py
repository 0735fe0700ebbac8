"""Gram norms by compiled C beside those by batched products."""

import pytest
import torch

from ghostclip.native import library
from ghostclip.native.gram import ragged_gram
from ghostclip.norms.outer import gram


@pytest.fixture(autouse=True)
def compiled():
    if library("gram") is None:
        pytest.skip("no C compiler here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("lengths", [(), (0,), (3,), (0, 1, 17, 0, 5), (16, 33, 1, 2), (1,) * 40], ids=str)
@pytest.mark.parametrize("widths", [(1, 1), (6, 4), (130, 17), (7, 257)], ids=str)
def test_ragged_examples_are_the_same_one_by_one(lengths, widths, dtype):
    """Sides may be parts of wider rows."""
    left, right = (torch.randn(sum(lengths), width + 2, dtype=dtype)[:, 1:-1] for width in widths)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    squared, scale = ragged_gram(left, right, starts)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for example, (l, r) in enumerate(zip(left.split(lengths), right.split(lengths), strict=True) if lengths else ()):
        expected, size = gram(l.unsqueeze(0), r.unsqueeze(0)) if len(l) else (left.new_zeros(1),) * 2
        assert torch.allclose(squared[example], expected, rtol=tolerance, atol=tolerance)
        assert torch.allclose(scale[example], size, rtol=tolerance)
    assert len(squared) == len(scale) == len(lengths)


def test_ragged_examples_are_shared_among_threads():
    lengths = torch.randint(0, 60, (50,))
    left, right = (torch.randn(int(lengths.sum()), 64) for _ in range(2))
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 4):
            torch.set_num_threads(number)
            found.append(ragged_gram(left, right, starts))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *found))
