"""Layers written outside of the package, as in CONTRIBUTING.md: strategies and passes are those of built-in layers."""

from functools import partial
from itertools import product

import pytest
import torch
from case_models import Wired
from case_types import project
from comparing import assert_compiled_exact, assert_exact
from documents import run
from graphs import interpret
from torch import nn

import ghostclip
from ghostclip.nn import GhostLayer
from ghostclip.nn.base import LAYERS

# name of the plain class: its arguments; an example is [3, 5]
OUTSIDE = {"Scale": (5,), "Projection": (5, 5), "LocallyConnected1d": (3, 3, 2, 5)}
outside = pytest.mark.parametrize("name", OUTSIDE)


@pytest.fixture(scope="module")
def classes():
    """The names that the code of CONTRIBUTING.md leaves behind; its rules are gone afterwards."""
    before = dict(LAYERS)
    yield run("CONTRIBUTING.md")
    LAYERS.clear()
    LAYERS.update(before)


def in_places(m, x, times):
    """A layer, called once or twice where its output fits its input, behind a plain one; rows may be folded."""
    rows = x.flatten(0, 1) if x.dim() == 4 else x
    outputs = [torch.tanh(m.layer(m.before(rows) * (1 + turn))) for turn in range(times)]
    return [out.unflatten(0, x.shape[:2]) if x.dim() == 4 else out for out in outputs]


def made(classes, name, times=1, batch=4):
    torch.manual_seed(3)
    model = Wired(partial(in_places, times=times), before=nn.Linear(5, 5), layer=classes[name](*OUTSIDE[name])).double()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model, torch.randn(batch, 3, 5, dtype=torch.float64)


@outside
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("batch", [0, 1, 4])
def test_both_second_passes_are_the_loop(classes, name, times, batch):
    for second_pass, norm_strategy in product(("cached", "reweight"), ("gram", "direct")):
        model, x = made(classes, name, times, batch)
        clipper = assert_exact(model, x, clipping=0.5, second_pass=second_pass, norm_strategy=norm_strategy)
        assert isinstance(model.layer, GhostLayer)
        assert {row.rule for row in clipper.explain() if row.layer == "layer"} == {f"My{name}"}


@pytest.mark.parametrize("name", ["Scale", "Projection"])
def test_examples_in_another_dimension(classes, name):
    model, x = made(classes, name)
    ghostclip.wrap(model, batch_dim=1)
    assert_exact(model, x.transpose(0, 1), batch_dims=(1,), losses=lambda out: project(out, 1))


@outside
def test_rows_folded_into_the_batch_and_frozen_parts(classes, name):
    model, x = made(classes, name)
    model.layer.weight.requires_grad_(False)
    assert_exact(model, torch.randn(4, 2, *x.shape[1:], dtype=torch.float64), clipping=0.5)
    assert type(ghostclip.unwrap(model).layer) is classes[name]
    assert_exact(made(classes, name)[0], torch.randn(4, 2, *x.shape[1:], dtype=torch.float64), clipping=0.5)


@outside
@pytest.mark.parametrize("options", [{"second_pass": "cached"}, {"second_pass": "reweight"}, {}], ids=str)
@pytest.mark.one_in(4)
def test_compiled_steps(classes, name, options, monkeypatch):
    interpret(monkeypatch)
    losses = lambda outputs: sum(out.flatten(1).square().sum(1) for out in outputs)  # noqa: E731
    assert_compiled_exact(*made(classes, name, times=2), losses, **options)
