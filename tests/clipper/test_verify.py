"""`verify` passes where sums are the loop's, and names what is wrong where they aren't."""

import private_runs as runs
import pytest
import torch
from case_models import Wired, two_linears
from case_types import project
from cases import case
from comparing import every_pass, ready
from own_layers import Scale
from torch import nn

import ghostclip
from ghostclip import VerificationError
from ghostclip.nn import GhostLayer


@every_pass
@pytest.mark.parametrize("name", ["cnn", "tied head"])
def test_verify_passes_on_good_models(name, second_pass):
    row = case(name)
    model, clipper, _ = ready(row, second_pass=second_pass)
    assert clipper.verify(lambda m, batch: row.losses(m(*batch)), row.inputs()) <= 1e-9
    assert all(p.grad is None for p in model.parameters())


def test_sums_that_were_there_before_are_there_and_known_afterwards():
    row = case("cnn")
    model, clipper, losses = ready(row)
    clipper.backward(losses)
    before = [p.grad.clone() for p in model.parameters()]
    clipper.verify(lambda m, batch: row.losses(m(*batch)), row.inputs())
    clipper.backward(row.losses(model(*row.inputs())))
    assert all(not torch.equal(old, p.grad) for old, p in zip(before, model.parameters(), strict=True))


def keys_with_bias(m, x):
    """Attention by hand: what a bias adds to all keys, the softmax takes away, so that its gradient is rounding."""
    return torch.softmax(m.query(x) @ m.key(x).mT, dim=-1) @ x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_verify_does_not_compare_rounding_with_rounding(dtype):
    model = Wired(keys_with_bias, query=nn.Linear(6, 6), key=nn.Linear(6, 6)).to(dtype)
    clipper = ghostclip.GhostClipper(model, 0.1)
    worst = clipper.verify(lambda m, x: m(x).square().sum((1, 2)), torch.randn(5, 7, 6, dtype=dtype))
    assert 0 < worst < (1e-3 if dtype == torch.float32 else 1e-9)


def test_verify_finds_examples_that_meet_below_all_layers():
    """No gradient shows it; a loop over single examples does."""
    clipper = ghostclip.GhostClipper(Wired(lambda m, x: m.body(x - x.mean(0)), body=two_linears()))
    with pytest.raises(VerificationError):
        clipper.verify(lambda m, batch: m(batch).square().mean(1), torch.randn(5, 3, dtype=torch.float64))


@every_pass
def test_verify_names_the_layer_whose_rule_is_wrong(second_pass):
    model = nn.Sequential(nn.Linear(3, 4), Scale(4), nn.Linear(4, 2)).double()
    clipper = ghostclip.GhostClipper(model, second_pass=second_pass)
    with pytest.raises(VerificationError, match=r"1\.weight"):
        clipper.verify(lambda m, batch: project(m(batch)), torch.randn(5, 3, dtype=torch.float64))


class OwnScale(GhostLayer, Scale):
    """Written with its rule; it wraps no other class."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.capture(super().forward(x), x, parameters=("weight",))

    def per_example(self, name, call, inputs, grad):
        return grad * inputs[0]


def test_a_layer_that_wraps_no_class_is_verified_explained_and_stays_when_unwrapped():
    model = nn.Sequential(nn.Linear(3, 3), OwnScale(3))
    clipper = ghostclip.GhostClipper(model)
    assert clipper.verify(lambda model, x: model(x).square().sum(1), torch.randn(4, 3)) < 1e-4
    assert "OwnScale" in str(clipper.explain())
    assert isinstance(ghostclip.unwrap(model)[1], OwnScale)


class Shift(nn.Module):
    """A layer of the tests' own: one added number per feature."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class UnreadShift(GhostLayer, Shift, wraps=Shift):
    """Its formula needs no input, so that it captures none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.capture(super().forward(x), parameters=("bias",))

    def per_example(self, name, call, inputs, grad):
        return grad


def test_a_capture_without_its_input_is_told_where_layers_below_got_no_gradient():
    model = nn.Sequential(nn.Linear(5, 4), Shift(4), nn.Linear(4, 3))
    engine = runs.engine_for(model, None, runs.data(6), batch_size=6, noise_multiplier=1.0)
    with pytest.raises(VerificationError, match=r"0\.weight \(1\)[\s\S]*whose capture must get the tensor"):
        engine.step(next(iter(engine.batches())), runs.losses_of)
