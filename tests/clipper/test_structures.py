"""The structure of a graph: told apart by what operations do, and not by sizes of batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ghostclip
from ghostclip import GhostClipper, UnsupportedModelError
from ghostclip.graph import layouts
from ghostclip.graph.parameter_names import ParameterNames
from ghostclip.graph.reader import read_graph

EXAMPLES, WIDTH = 4, 5
X, SQUARE = (EXAMPLES, WIDTH), (EXAMPLES, EXAMPLES, WIDTH)


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


# One change to a forward each; the graph has as many operations as before.
CHANGES: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "permute": lambda h, other: h.permute(*((1, 0, 2) if other else (0, 1, 2))),
    "transpose": lambda h, other: h.transpose(0, int(other)),
    "sum": lambda h, other: h.sum(int(other)),
    "mean": lambda h, other: h.mean(int(other)),
    "keepdim": lambda h, other: h.amax(0, keepdim=other),
    "softmax": lambda h, other: h.softmax(int(other)),
    "cumsum": lambda h, other: h.cumsum(int(other)),
    "cat": lambda h, other: torch.cat([h, h], int(other)),
    "stack": lambda h, other: torch.stack([h, h], int(other)),
    "slice": lambda h, other: h[int(other) :],
    "end": lambda h, other: h[: 2 + other],
    "end of a whole": lambda h, other: h[: 3 + other],
    "step": lambda h, other: h[:, :: 1 + other],
    "select": lambda h, other: h[int(other)],
    "split": lambda h, other: h.split(2, int(other))[0],
    "number of parts": lambda h, other: h.split(1 + other)[0],
    "sizes of parts": lambda h, other: h.split([1, 3] if other else [3, 1])[0],
    "which part": lambda h, other: h.chunk(2)[int(other)],
    "unbind": lambda h, other: h.unbind(int(other))[0],
    "unfold": lambda h, other: h.unfold(int(other), 2, 2),
    "size of windows": lambda h, other: F.avg_pool1d(h, 2 + other),
    "groups": lambda h, other: F.channel_shuffle(h[..., None], 4 if other else 2),
    "diagonal": lambda h, other: h.diagonal(int(other)),
    "pad": lambda h, other: F.pad(h, (0, 0, int(other), 1)),
    "as_strided": lambda h, other: h.as_strided((2, 2), (1, 2) if other else (2, 1)),
    "repeat": lambda h, other: h.repeat(1 + other, 2 - other, 1),
    "unsqueeze": lambda h, other: h.unsqueeze(int(other)),
    "squeeze": lambda h, other: h[:1, :1].squeeze(int(other)),
    "view": lambda h, other: h[0].reshape((1, -1) if other else (-1, 1)),
    "expand": lambda h, other: (h[:1] if other else h[:, :1]).expand(SQUARE),
    "order of inputs": lambda h, other: torch.cat([h.tanh(), h.exp()] if other else [h.exp(), h.tanh()]),
    "which input": lambda h, other: (lambda a, b: a * b + (a if other else b))(h.tanh(), h.tanh()),
    "roll": lambda h, other: h.roll(1, int(other)),
    "normalized": lambda h, other: F.layer_norm(h, h.shape[1 + other :]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_structure_of_a_graph_tells_a_change_and_no_size(name: str) -> None:
    model = Model(lambda m, x, other: CHANGES[name](m.first(x), other).flatten().square())
    ghostclip.wrap(model)
    names = ParameterNames(model)

    def structure(other: bool) -> int:
        return read_graph(model(torch.randn(SQUARE), other), names).structure

    assert structure(False) == structure(False)
    assert structure(True) == structure(True)
    assert structure(False) != structure(True)


def test_the_structure_is_that_of_batches_of_other_sizes() -> None:
    def form(m: Any, x: Tensor) -> Tensor:
        h = m.first(x.flatten(0, 1)).view(x.shape)
        h = torch.cat([h[:, :-1], m.bare[:1].expand(len(x), 1, WIDTH)], 1)
        return m.last(torch.cat(h.chunk(2, -1), -1)).square().mean((1, 2))

    model = ghostclip.wrap(Model(form))
    names = ParameterNames(model)
    found = {read_graph(model(torch.randn(size, 6, WIDTH)), names).structure for size in (2, 3, 6, 12)}
    assert len(found) == 1


def test_the_structure_is_that_of_texts_of_other_lengths() -> None:
    def form(m: Any, x: Tensor) -> Tensor:
        length = x.shape[1]
        h = (m.first(x) + m.bare[:length]).tanh()[:, :length]
        return m.last(h[:, 1:] - h[:, :-1])[:, :100].square().mean((1, 2))

    model = ghostclip.wrap(Model(form))
    names = ParameterNames(model)
    found = {read_graph(model(torch.randn(4, length, WIDTH)), names).structure for length in (3, 4, 6, 7)}
    assert len(found) == 1


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
