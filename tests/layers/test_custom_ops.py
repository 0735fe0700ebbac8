"""Custom ops, compiled C inside of graphs: each gives what its function gives outside, and declares its shapes."""

import pytest
import torch

from ghostclip.native import library, rows, shifts


@pytest.fixture(autouse=True)
def compiled():
    if library("rows") is None:
        pytest.skip("no C compiler here")


AXES = [3, 2], [2, 1], [1, 0], [1, 2]
IMAGES, GRADS = torch.randn(3, 4, 7, 6), torch.randn(3, 6, 4, 4)
CALLS = {
    "shifts": (shifts.shifted_products, (IMAGES, GRADS, *AXES, False)),
    "shifts, kept": (shifts.shifted_products, (IMAGES, GRADS, *AXES, True)),
    "rows": (rows.chained_squared_norms, (torch.randint(0, 4, (3, 8)), torch.randn(3, 8, 5))),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_a_compiler_is_told_of_an_operation_is_so(name):
    function, arguments = CALLS[name]
    torch.library.opcheck(function.operation, arguments)
