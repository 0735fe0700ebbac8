"""Custom ops, compiled C inside of graphs: each gives what its function gives outside, and declares its shapes."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ghostclip.native import library, rows
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


def test_what_a_compiler_is_told_of_an_operation_is_so():
    torch.library.opcheck(rows.chained_squared_norms.operation, (torch.randint(0, 4, (3, 8)), torch.randn(3, 8, 5)))
