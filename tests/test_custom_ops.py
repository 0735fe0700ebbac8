"""Custom ops, compiled C inside of graphs: each gives what its function gives outside, and declares its shapes."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ghostclip.native import gram, library, shifts
from ghostclip.native import rows as chains
from ghostclip.norms.convolution import ConvGrads
from ghostclip.norms.im2col import Geometry
from ghostclip.norms.outer import OuterProduct
from ghostclip.norms.rows import LookupGrads


@pytest.fixture(autouse=True)
def compiled():
    if library("gram") is None:
        pytest.skip("no C compiler here")


def convolution(dtype, stride=1, groups=1):
    """Gradients and images of 3 examples, and what is a term of them."""
    images = torch.randn(3, 4, 7, 6, dtype=dtype)
    shape, geometry = torch.Size((6, 4 // groups, 3, 2)), Geometry((stride, 1), (1, 0), (1, 2), groups)
    weight = torch.zeros(shape, dtype=dtype)
    places = torch.nn.functional.conv2d(
        images, weight, None, geometry.stride, geometry.padding, geometry.dilation, groups
    )
    return [torch.randn_like(places), images], lambda grads, images: ConvGrads(images, grads, shape, geometry)


def product(dtype):
    return [torch.randn(3, 9, 5, dtype=dtype), torch.randn(3, 9, 4, dtype=dtype)], lambda left, right: OuterProduct(
        left, right, torch.Size((5, 4))
    )


def rows(dtype):
    return [torch.randn(3, 8, 5, dtype=dtype), torch.randint(0, 4, (3, 8))], lambda gradients, indices: LookupGrads(
        indices, gradients, torch.Size((4, 5))
    )


# The strategy, the term it is for, and whether gradients are kept.
STRATEGIES = {
    "shifts": ("shifts", lambda dtype: convolution(dtype, stride=2), False),
    "shifts, kept": ("shifts", lambda dtype: convolution(dtype, stride=2), True),
    "shifts, groups": ("shifts", lambda dtype: convolution(dtype, groups=2), True),
    "half windows": ("half windows", convolution, False),
    "half gram of patches": ("half gram", convolution, False),
    "half gram": ("half gram", product, False),
    "chains": ("chains", rows, False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_graph_gives_what_the_call_gives(name, dtype):
    strategy, make, keep = STRATEGIES[name]
    torch.manual_seed(0)
    inputs, term = make(dtype)

    def answer(*inputs):
        made = term(*inputs)
        found = made.candidates()[strategy].run(made, keep)
        return [found.squared_norms] + ([found.kept] if keep else [])

    graph = make_fx(answer)(*inputs)
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert any(name.startswith("ghostclip.") for name in called), called
    other, _ = make(dtype)
    for found, expected in zip(graph(*other), answer(*other), strict=True):
        assert torch.equal(found, expected)


AXES = [3, 2], [2, 1], [1, 0], [1, 2]
IMAGES, GRADS = torch.randn(3, 4, 7, 6), torch.randn(3, 6, 4, 4)
CALLS = {
    "shifts": (shifts.shifted_products, (IMAGES, GRADS, *AXES, False)),
    "shifts, kept": (shifts.shifted_products, (IMAGES, GRADS, *AXES, True)),
    "windows": (gram.half_windows, (IMAGES, torch.randn(3, 6, 7, 4), [3, 2], [1, 0], [1, 2])),
    "gram": (gram.half_gram, (torch.randn(3, 9, 5), torch.randn(3, 9, 4))),
    "rows": (chains.chained_squared_norms, (torch.randint(0, 4, (3, 8)), torch.randn(3, 8, 5))),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_a_compiler_is_told_of_an_operation_is_so(name):
    function, arguments = CALLS[name]
    torch.library.opcheck(function.operation, arguments)
