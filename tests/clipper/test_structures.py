"""The structure of a graph: told apart by what operations do, and not by sizes of batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn

import ghostclip
from ghostclip import GhostClipper, UnsupportedModelError
from ghostclip.graph import layouts
from ghostclip.graph.parameter_names import ParameterNames
from ghostclip.graph.reader import read_graph

EXAMPLES, WIDTH = 4, 5
X = (EXAMPLES, WIDTH)


class Model(nn.Module):
    """Two layers and a parameter, for a forward that is given."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bare = nn.Parameter(torch.randn(7, WIDTH))
        self.form = forward

    def forward(self, *inputs: Any) -> Tensor:
        return self.form(self, *inputs)


def squared(h: Tensor) -> Tensor:
    return h.square().flatten(1).sum(1)


def test_two_layers_of_one_kind_are_told_apart() -> None:
    def form(m: Any, x: Tensor, other: bool) -> Tensor:
        layers = (m.first, m.last) if other else (m.last, m.first)
        return squared(layers[1](layers[0](x)))

    model = ghostclip.wrap(Model(form))
    names = ParameterNames(model)
    found = [read_graph(model(torch.randn(X), other), names).structure for other in (False, True, False)]
    assert found[0] == found[2] != found[1]


def test_no_more_is_remembered_than_structures_of_the_last_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that cuts at random makes a new graph in most steps; what was forgotten is measured anew."""
    monkeypatch.setattr(layouts, "REMEMBERED", 3)

    def form(m: Any, x: Tensor, cut: int, turn: bool = False) -> Tensor:
        h = m.first(x).tanh()
        h = torch.cat([h[:, :cut].exp(), h[:, cut:] * m.bare[0]], 1)
        return squared(m.last(h + turn * h.roll(1, 0)))

    model = Model(form).double()
    clipper = GhostClipper(model)
    for cut in [*range(9), *range(9)]:
        losses = model(torch.randn(EXAMPLES, 9, WIDTH).double(), cut)
        expected = oracle.norms_by_single_losses(model, losses)
        torch.testing.assert_close(clipper.norms(losses), expected, rtol=1e-10, atol=0)
        assert len(clipper.passes._layouts._structures) <= 4
    with pytest.raises(UnsupportedModelError, match="mix"):
        clipper.norms(model(torch.randn(EXAMPLES, 9, WIDTH).double(), 3, True))
