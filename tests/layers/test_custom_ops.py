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


TERMS = {
    "lookups": lambda gradients, indices: LookupGrads(indices, gradients, torch.Size((4, 5))),
    "bags": lambda gradients, indices: BagGrads(gradients[:, 0], indices, None, torch.Size((4, 5))),
    "weighted bags": lambda gradients, indices: BagGrads(
        gradients[:, 0], indices, gradients[:, :, 1], torch.Size((4, 5))
    ),
}


def convolution(dtype, stride=1, groups=1):
    """Gradients and images of 3 examples, and what is a term of them."""
    images = torch.randn(3, 4, 7, 6, dtype=dtype)
    shape, geometry = torch.Size((6, 4 // groups, 3, 2)), Geometry((stride, 1), (1, 0), (1, 2), groups)
    weight = torch.zeros(shape, dtype=dtype)
    places = torch.nn.functional.conv2d(
        images, weight, None, geometry.stride, geometry.padding, geometry.dilation, groups
    )
    return [torch.randn_like(places), images], lambda grads, images: ConvGrads(images, grads, shape, geometry)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("options", [{"stride": 2}, {"groups": 2}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_a_graph_of_a_convolution_gives_what_the_call_gives(dtype, options, keep):
    inputs, term = convolution(dtype, **options)

    def answer(*inputs):
        found = ConvGrads._by_shifts(term(*inputs), keep)
        return [found.squared_norms] + ([found.kept] if keep else [])

    graph = make_fx(answer)(*inputs)
    other, _ = convolution(dtype, **options)
    for found, expected in zip(graph(*other), answer(*other), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", TERMS)
def test_a_graph_gives_what_the_call_gives(name, dtype):
    def inputs():
        return torch.randn(3, 8, 5, dtype=dtype), torch.randint(0, 4, (3, 8))

    def answer(gradients, indices):
        return TERMS[name](gradients, indices).closed_form(False).squared_norms

    graph = make_fx(answer)(*inputs())
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert any(name.startswith("ghostclip.") for name in called), called
    other = inputs()
    assert torch.equal(graph(*other), answer(*other))


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
