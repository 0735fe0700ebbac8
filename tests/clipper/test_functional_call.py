"""Models that run with other tensors in the place of their parameters, as `torch.func.functional_call` has it."""

import copy
from collections.abc import Callable

import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import ghostclip
from ghostclip import GhostClipper, UnsupportedModelError


class Model(nn.Module):
    """A layer, a skeleton that is run with computed weights, and what these are computed from."""

    def __init__(self, form: Callable[["Model", Tensor], Tensor]) -> None:
        super().__init__()
        self.low, self.skeleton, self.form = nn.Linear(3, 5), nn.Linear(5, 5), form
        self.weights, self.down, self.up = (nn.Parameter(torch.randn(shape)) for shape in ((2, 5, 5), (2, 5), (5, 2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self, self.low(x).tanh()).square().sum(1)


def scaled(m: Model, h: Tensor) -> Tensor:
    return functional_call(m.skeleton, {"weight": m.skeleton.weight * 3}, (h,))


def one_of_several(m: Model, h: Tensor) -> Tensor:
    h = functional_call(m.skeleton, {"weight": m.weights[0]}, (h,)).tanh()
    return functional_call(m.skeleton, {"weight": m.weights[1], "bias": m.down[0]}, (h,))


def uncertain(m: Model, h: Tensor) -> Tensor:
    return functional_call(m.skeleton, {"weight": m.weights[0] + F.softplus(m.weights[1]) * 0.3}, (h,))


def low_rank(m: Model, h: Tensor) -> Tensor:
    m.skeleton.requires_grad_(False)
    return functional_call(m.skeleton, {"weight": m.skeleton.weight + m.up @ m.down}, (h,))


def adapted(m: Model, h: Tensor) -> Tensor:
    """One step on something public."""
    own = dict(m.skeleton.named_parameters())
    with torch.enable_grad():  # `ghostclip.check` runs forwards without
        loss = functional_call(m.skeleton, own, (torch.ones(1, 5, dtype=h.dtype),)).square().sum()
        steps = torch.autograd.grad(loss, list(own.values()), create_graph=True)
    return functional_call(m.skeleton, {k: w - 0.1 * g for (k, w), g in zip(own.items(), steps, strict=True)}, (h,))


FORMS = {f.__name__: f for f in (scaled, one_of_several, uncertain, low_rank, adapted)}
X = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def by_hand(model: nn.Module, max_norm: float) -> dict[str, Tensor]:
    """The clipped sum, by one backward for each example."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p) for name, p in named.items()}
    for row in X:
        found = torch.autograd.grad(model(row[None]).sum(), list(named.values()), allow_unused=True)
        norm = torch.cat([g.flatten() for g in found if g is not None]).norm()
        for name, grad in zip(named, found, strict=True):
            total[name] += 0 if grad is None else grad * min(1.0, max_norm / float(norm))
    return total


@pytest.mark.parametrize("second_pass", ["cached", "reweight"])
@pytest.mark.parametrize("name", FORMS)
def test_computed_weights_are_clipped_as_the_loop_does(name: str, second_pass: str) -> None:
    torch.manual_seed(0)
    model = Model(FORMS[name]).double()
    model(X)  # which freezes what the form freezes
    plain = copy.deepcopy(model)
    clipper = GhostClipper(model, 0.5, second_pass=second_pass)
    for _ in range(2):
        model.zero_grad()
        clipper.backward(model(X))
        for own, expected in by_hand(plain, 0.5).items():
            grad = dict(model.named_parameters())[own].grad
            torch.testing.assert_close(torch.zeros_like(expected) if grad is None else grad, expected)
    assert ghostclip.check(model, lambda m, x: m(x), X) == []


def test_parameters_of_another_module_are_refused_by_name() -> None:
    def form(m: Model, h: Tensor) -> Tensor:
        return functional_call(m.skeleton, dict(m.other.named_parameters()), (h,))

    model = Model(form)
    model.other = nn.Linear(5, 5)
    model.double()
    clipper = GhostClipper(model)
    with pytest.raises(UnsupportedModelError, match="skeleton was given other tensors in the place of its parameters"):
        clipper.norms(model(X))
    (problem,) = ghostclip.check(model, lambda m, x: m(x), X)
    assert "functional_call" in str(problem)


def test_parameters_that_are_exchanged_after_the_forward_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 2)).double()
    clipper = GhostClipper(model)
    losses = model(X).square().sum(1)
    model[0].weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(UnsupportedModelError, match="or these were exchanged since"):
        clipper.norms(losses)


def test_its_own_parameters_given_by_name_are_its_own() -> None:
    model = nn.Sequential(nn.Linear(3, 2)).double()
    clipper = GhostClipper(model)
    losses = functional_call(model, dict(model.named_parameters()), (X,)).square().sum(1)
    expected = oracle.norms_by_single_losses(model, losses)
    torch.testing.assert_close(clipper.norms(losses), expected)
