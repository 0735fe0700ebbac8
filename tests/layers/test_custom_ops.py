"""Custom ops, compiled C inside of graphs: each gives what its function gives outside, and declares its shapes."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ghostclip.native import library, rows, shifts
from ghostclip.norms.convolution import ConvGrads, Geometry
from ghostclip.norms.rows import BagGrads, LookupGrads


@pytest.fixture(autouse=True)
def compiled():
    if library("rows") is None:
        pytest.skip("no C compiler here")


def convolution(stride, groups, keep):
    """What a term of gradients and images of 3 examples says, from those images [3, 4, 7, 6]."""
    shape, geometry = torch.Size((6, 4 // groups, 3, 2)), Geometry((stride, 1), (1, 0), (1, 2), groups)
    return lambda grads, images: ConvGrads._by_shifts(ConvGrads(images, grads, shape, geometry), keep)


def rows_of(make):
    return lambda gradients, indices: make(gradients, indices).closed_form(False)


TABLE = torch.Size((4, 5))
# What is asked of two tensors, and the shapes of both; the second of rows holds indices.
ASKED = {
    "lookups": (rows_of(lambda g, indices: LookupGrads(indices, g, TABLE)), (3, 8, 5), (3, 8)),
    "bags": (rows_of(lambda g, indices: BagGrads(g[:, 0], indices, None, TABLE)), (3, 8, 5), (3, 8)),
    "weighted bags": (rows_of(lambda g, indices: BagGrads(g[:, 0], indices, g[:, :, 1], TABLE)), (3, 8, 5), (3, 8)),
    **{f"stride, {keep}": (convolution(2, 1, keep), (3, 6, 4, 4), (3, 4, 7, 6)) for keep in (False, True)},
    **{f"groups, {keep}": (convolution(1, 2, keep), (3, 6, 7, 4), (3, 4, 7, 6)) for keep in (False, True)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", ASKED)
def test_a_graph_gives_what_the_call_gives(name, dtype):
    ask, first, second = ASKED[name]

    def inputs():
        draw = torch.randint(0, 4, second) if len(second) == 2 else torch.randn(second, dtype=dtype)
        return torch.randn(first, dtype=dtype), draw

    def answer(*inputs):
        found = ask(*inputs)
        return [found.squared_norms, *([] if found.kept is None else [found.kept])]

    graph = make_fx(answer)(*inputs())
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert any(name.startswith("ghostclip.") for name in called), called
    other = inputs()
    for found, expected in zip(graph(*other), answer(*other), strict=True):
        assert torch.equal(found, expected)


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
