"""Tables read by ids: parameters of one dimension, and an embedding that both positions and examples read."""

from collections.abc import Callable

import oracle
import pytest
import torch
from torch import Tensor, nn

from ghostclip import GhostClipper

# A parameter of one dimension read by ids [B] or [B, T].
READ: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda p, ids: p[ids],
    "index_select": lambda p, ids: p.index_select(0, ids),
    "of several": lambda p, ids: p[ids[:, None].expand(-1, 3)].sum(1),
    "take": lambda p, ids: p.take(ids),
}


class Biases(nn.Module):
    def __init__(self, read: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.bias, self.read = nn.Linear(3, 1), nn.Parameter(torch.randn(7)), read

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return (self.layer(x)[:, 0] + self.read(self.bias, ids)).square()


def assert_exact(clipper: GhostClipper, losses: Tensor) -> None:
    expected = oracle.norms_by_single_losses(clipper.model, losses)
    torch.testing.assert_close(clipper.norms(losses), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", READ)
def test_numbers_that_are_read_by_ids(name: str) -> None:
    torch.manual_seed(0)
    model = Biases(READ[name]).double()
    clipper = GhostClipper(model)
    for examples in (4, 1, 7, 12):
        assert_exact(clipper, model(torch.randn(examples, 3).double(), torch.randint(0, 7, (examples,))))
    assert clipper.norms(model(torch.randn(0, 3).double(), torch.randint(0, 7, (0,)))).shape == (0,)
    x, ids = torch.randn(5, 3).double(), torch.tensor([0, 3, 3, 6, 1])
    grads = clipper.per_example_grads(model(x, ids))["bias"]
    for row, (one, place) in enumerate(zip(x, ids, strict=True)):
        (expected,) = torch.autograd.grad(model(one[None], place[None]).sum(), [model.bias])
        torch.testing.assert_close(grads[row], expected)


class Both(nn.Module):
    """One embedding read by positions [T] and by examples' ids [B], added or side by side."""

    def __init__(self, side_by_side: bool) -> None:
        super().__init__()
        self.layer, self.table, self.side_by_side = nn.Linear(4, 4), nn.Embedding(9, 4), side_by_side

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        h, own = (self.layer(x) + self.table(torch.arange(x.shape[1]))).mean(1), self.table(ids)
        return (torch.cat([h, own], 1) if self.side_by_side else h + own).tanh().square().sum(1)


@pytest.mark.parametrize("sizes", [(4, 5, 3, 6, 10), (5, 4, 2), (3, 5, 5, 4)])
@pytest.mark.parametrize("side_by_side", [False, True])
def test_positions_and_examples_read_one_table(side_by_side: bool, sizes: tuple[int, ...]) -> None:
    """Among others in a batch of as many examples as positions."""
    torch.manual_seed(0)
    model = Both(side_by_side).double()
    clipper = GhostClipper(model)
    for examples in sizes:
        x, ids = torch.randn(examples, 5, 4).double(), torch.randint(0, 9, (examples,))
        for loss, norm in zip(model(x, ids), clipper.norms(model(x, ids)), strict=True):
            grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            torch.testing.assert_close(norm, torch.cat([grad.flatten() for grad in grads]).norm())


class Reversed(nn.Module):
    """A hook between layers, beside a parameter outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.head, self.scale = nn.Linear(4, 4), nn.Linear(4, 2), nn.Parameter(torch.ones(4))
        self.seen: list[Tensor] = []

    def turned(self, grad: Tensor) -> Tensor:
        self.seen.append(grad)
        return -0.1 * grad

    def forward(self, x: Tensor) -> Tensor:
        h = self.low(x)
        h.register_hook(self.turned)
        return self.head(h.tanh() * self.scale).square().sum(1)


@pytest.mark.parametrize("second_pass", ["cached", "reweight"])
def test_hooks_on_tensors_beside_a_parameter_outside_of_layers(second_pass: str) -> None:
    torch.manual_seed(0)
    model, x = Reversed().double(), torch.randn(5, 4).double()
    clipper = GhostClipper(model, 0.1, second_pass=second_pass)
    for _ in range(2):
        norms = clipper.backward(model(x)).norms
        torch.testing.assert_close(norms, oracle.norms_by_single_losses(model, model(x)))
        model.zero_grad()
    assert model.seen
