"""Layers written outside of the package, as in CONTRIBUTING.md: strategies and passes are those of built-in layers."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import oracle
import pytest
import torch
from case_types import project
from comparing import assert_close, assert_dicts_close, gradients
from documents import run
from graphs import interpret
from torch import nn

import ghostclip
from ghostclip.clipping import PerLayer
from ghostclip.nn import GhostLayer
from ghostclip.nn.base import LAYERS

# name of the plain class: its arguments, the shape of an example
OUTSIDE: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "Scale": ((5,), (3, 5)),
    "Projection": ((5, 5), (3, 5)),
    "LocallyConnected1d": ((3, 3, 2, 5), (3, 5)),
}
outside = pytest.mark.parametrize("name", OUTSIDE)


@pytest.fixture(scope="module")
def classes() -> Iterator[dict[str, Any]]:
    """The names that the code of CONTRIBUTING.md leaves behind; its rules are gone afterwards."""
    before = dict(LAYERS)
    yield run("CONTRIBUTING.md")
    LAYERS.clear()
    LAYERS.update(before)


class Model(nn.Module):
    """A layer, called once or twice where its output fits its input, between plain ones."""

    def __init__(self, layer: nn.Module, width: int, times: int) -> None:
        super().__init__()
        self.before, self.layer, self.times = nn.Linear(width, width), layer, times

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.tanh(self.layer(self.before(x) * (1 + turn))) for turn in range(self.times)]


def made(classes: dict[str, Any], name: str, times: int = 1, batch: int = 4) -> tuple[nn.Module, torch.Tensor]:
    args, shape = OUTSIDE[name]
    torch.manual_seed(3)
    model = Model(classes[name](*args), shape[-1], times).double()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model, torch.randn(batch, *shape, dtype=torch.float64)


@outside
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("batch", [0, 1, 4])
def test_both_second_passes_are_the_loop(classes, name, times, batch):
    model, x = made(classes, name, times, batch)
    expected = oracle.per_example_grads(model, project, (x,))
    for second_pass, norm_strategy in product(("cached", "reweight"), ("gram", "direct")):
        clipper = ghostclip.GhostClipper(model, 0.5, second_pass=second_pass, norm_strategy=norm_strategy)
        model.zero_grad()
        result = clipper.backward(project(model(x)))
        assert_close(result.norms, oracle.norms(expected), 1e-10)
        assert_dicts_close(gradients(model), oracle.clipped_sum(expected, 0.5), 1e-10)
        assert isinstance(model.layer, GhostLayer)
        assert {row.rule for row in clipper.explain() if row.layer == "layer"} == {f"My{name}"}


@outside
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("batch", [0, 1, 4])
def test_per_example_gradients_and_clipping_by_layer(classes, name, times, batch):
    model, x = made(classes, name, times, batch)
    expected = oracle.per_example_grads(model, project, (x,))
    clipper = ghostclip.GhostClipper(model, PerLayer(0.5))
    assert_dicts_close(clipper.per_example_grads(project(model(x))), expected, 1e-10)
    clipper.backward(project(model(x)))
    sums = oracle.clipped_sum_by_layer(expected, 0.5, ("before", "layer"))
    assert_dicts_close(gradients(model), sums, 1e-10)


@pytest.mark.parametrize(("forced", "found"), [("gram", "gram"), ("direct", "direct")])
def test_a_strategy_is_chosen_as_for_a_linear_layer(classes, forced, found):
    model, x = made(classes, "Projection")
    clipper = ghostclip.GhostClipper(model, norm_strategy=forced)
    clipper.norms(project(model(x)))
    chosen = {row.layer: row.strategy for row in clipper.explain() if row.parameter == "weight"}
    assert found in chosen["layer"]
    assert chosen["layer"].removeprefix("half ") == chosen["before"].removeprefix("half ")


@pytest.mark.parametrize("name", ["Scale", "Projection"])
def test_examples_in_another_dimension(classes, name):
    model, x = made(classes, name)
    x = x.transpose(0, 1)
    expected = oracle.per_example_grads(model, lambda out: project(out, 1), (x,), (1,))
    ghostclip.wrap(model, batch_dim=1)
    ghostclip.GhostClipper(model, 0.5).backward(project(model(x), 1))
    assert_dicts_close(gradients(model), oracle.clipped_sum(expected, 0.5), 1e-10)


@outside
def test_rows_folded_into_the_batch(classes, name):
    model, _ = made(classes, name)
    x = torch.randn(4, 2, *OUTSIDE[name][1], dtype=torch.float64)

    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.flatten(0, 1))[0].unflatten(0, x.shape[:2])

    folded = Folded()
    expected = oracle.per_example_grads(folded, project, (x,))
    ghostclip.GhostClipper(folded, 0.5).backward(project(folded(x)))
    assert_dicts_close(gradients(folded), oracle.clipped_sum(expected, 0.5), 1e-10)


@outside
@pytest.mark.parametrize("options", [{"second_pass": "cached"}, {"second_pass": "reweight"}, {}], ids=str)
@pytest.mark.one_in(4)
def test_compiled_steps(classes, name, options, monkeypatch):
    interpret(monkeypatch)
    model, x = made(classes, name, times=2)
    losses = lambda outputs: sum(out.flatten(1).square().sum(1) for out in outputs)  # noqa: E731
    expected = oracle.per_example_grads(model, losses, (x,))
    clipper = ghostclip.GhostClipper(model, 0.5, compile=True, **options)
    for _ in range(3):
        model.zero_grad()
        clipper.clip(lambda m, b: losses(m(b)), x)
    assert_dicts_close(gradients(model), oracle.clipped_sum(expected, 0.5), 1e-10)
    assert (clipper.compiled.graphs, clipper.compiled.refusals) == (1, [])


@outside
def test_frozen_parts_and_the_backward(classes, name):
    model, x = made(classes, name)
    model.layer.weight.requires_grad_(False)
    expected = oracle.per_example_grads(model, project, (x,))
    ghostclip.GhostClipper(model, 0.5).backward(project(model(x)))
    assert_dicts_close(gradients(model), oracle.clipped_sum(expected, 0.5), 1e-10)
    assert type(ghostclip.unwrap(model).layer) is classes[name]
