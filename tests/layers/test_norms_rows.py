"""Norms of gradients that fall on rows of a table, by each strategy, against the table itself."""

import pytest
import torch

from ghostclip.native import library
from ghostclip.native.rows import chained_squared_norms, summed_rows
from ghostclip.native.shifts import shifted_products
from ghostclip.norms.rows import LookupGrads, runs_squared_norms


def chains(indices: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    """Norms by the compiled strategy; the sums of squares that it returns beside them are checked here."""
    squared, sizes = chained_squared_norms(indices, gradients)
    finite = gradients.isfinite().flatten(1).all(1)
    torch.testing.assert_close(sizes[finite], gradients[finite].flatten(1).square().sum(1))
    return squared


needs_compiler = pytest.mark.skipif(library("rows") is None, reason="no C compiler here")
STRATEGIES = [runs_squared_norms, pytest.param(chains, marks=needs_compiler)]
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
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.__name__)
def test_norms_equal_those_of_the_table(name, strategy):
    indices = INDICES[name]()
    gradients = torch.randn(*indices.shape, 5, dtype=torch.float64)
    table = LookupGrads(indices, gradients, torch.Size((9, 5))).per_example()
    torch.testing.assert_close(strategy(indices, gradients), table.flatten(1).square().sum(1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_that_cancel_keep_their_digits(strategy):
    indices = torch.zeros(2, 4, dtype=torch.int64)
    gradients = torch.randn(2, 1, 8) * torch.tensor([1.0, -1.0, 1.0, -1.0]).view(1, 4, 1)
    gradients = gradients + 1e-4 * torch.randn(2, 4, 8)
    exact = gradients.double().sum(1).square().sum(1)
    torch.testing.assert_close(strategy(indices, gradients).double(), exact, rtol=1e-2, atol=0)


@needs_compiler
@pytest.mark.parametrize("keep", [None, False, True], ids=["rows", "shifts", "shifts, kept"])
def test_what_a_compiler_is_told_of_an_operation_in_c_is_so(keep):
    function, arguments = chained_squared_norms, (torch.randint(0, 4, (3, 8)), torch.randn(3, 8, 5))
    if keep is not None:
        function = shifted_products
        arguments = torch.randn(3, 4, 7, 6), torch.randn(3, 6, 4, 4), [3, 2], [2, 1], [1, 0], [1, 2], keep
    torch.library.opcheck(function.operation, arguments)


LAYOUTS = {
    "plain": lambda g: g,
    "positions first": lambda g: g.transpose(0, 1).contiguous().transpose(0, 1),
    "features first": lambda g: g.mT.contiguous().mT,
    "expanded": lambda g: g[:, :1].expand_as(g),
}


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [1, 7, 16, 67])
def test_compiled_rows_of_any_layout(layout, width, dtype):
    indices, weights = torch.randint(40, (70, 5)).t()[:, ::2], torch.rand(5, dtype=dtype)
    gradients = LAYOUTS[layout](torch.randn(5, 35, width, dtype=dtype))
    tolerance = {"rtol": 1e-4 if dtype == torch.float32 else 1e-12, "atol": 1e-6 if dtype == torch.float32 else 1e-12}
    table = summed_rows(indices, gradients, weights, 40)
    exact = LookupGrads(indices, gradients, torch.Size((40, width))).per_example()
    torch.testing.assert_close(table, torch.einsum("b,brd->rd", weights, exact), **tolerance)
    squared = chains(indices, gradients)
    torch.testing.assert_close(squared, exact.flatten(1).square().sum(1), **tolerance)
