"""A rule of one's own, in one class; without it the same module goes by the fallback, to the same numbers."""

import pytest
import torch
from comparing import assert_exact
from torch import nn

import ghostclip
from ghostclip.nn import GhostLayer, LayerCall
from ghostclip.nn.base import LAYERS
from ghostclip.norms.outer import OuterProduct


class LowRank(nn.Module):
    """x @ U @ V, as adapters have it: inputs [B, ..., features]."""

    def __init__(self, features: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(features, rank))
        self.up = nn.Parameter(torch.randn(rank, features))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input @ self.down @ self.up


class RuledLowRank(GhostLayer, LowRank):
    """`LowRank` with a rule: each parameter's gradient is a sum of outer products over positions."""

    rule = "low rank"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        inner = self.capture(input @ self.down, input, parameters=("down",))
        return self.capture(inner @ self.up, inner, parameters=("up",))

    @classmethod
    def parameter_names(cls, module: nn.Module) -> tuple[str, ...]:
        return ("down", "up")

    def per_example(
        self, name: str, call: LayerCall, inputs: tuple[torch.Tensor, ...], grad: torch.Tensor
    ) -> OuterProduct:
        left, right = (x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2) for x in (inputs[0], grad))
        return OuterProduct(left, right, getattr(self, name).shape)


@pytest.fixture
def with_rule(monkeypatch):
    """What ``class RuledLowRank(GhostLayer, LowRank, wraps=LowRank)`` says once and for all."""
    monkeypatch.setitem(LAYERS, LowRank, RuledLowRank)
    monkeypatch.setattr(RuledLowRank, "wrapped", LowRank, raising=False)


def model_of(shape):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(5, 6), LowRank(6, 2), nn.Tanh(), nn.Linear(6, 3)).double()
    return model, torch.randn(4, *shape, 5, dtype=torch.float64)


@pytest.mark.parametrize("second_pass", ["reweight", "cached"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_the_rule_is_the_loop(with_rule, shape, second_pass):
    model, x = model_of(shape)
    clipper = assert_exact(model, x, clipping=0.5, second_pass=second_pass)
    assert {row.rule for row in clipper.explain() if row.layer == "1"} == {"low rank"}
    assert type(ghostclip.unwrap(model)[1]) is LowRank


@pytest.mark.parametrize("shape", [(), (3,)])
def test_so_is_the_fallback_without_it(shape):
    model, x = model_of(shape)
    clipper = assert_exact(model, x, clipping=0.5)
    assert type(model[1]) is LowRank
    assert {row.rule for row in clipper.explain() if row.layer == "1"} == {"fallback (LowRank)"}
