"""Structures that are measured in every batch: what examples share is looked for in the 1st, 2nd, 4th, ... batch alone.

In the others, layers and the boundaries that were found are looked at.
"""

import oracle
import pytest
import torch
from comparing import every_pass, gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

import ghostclip
from ghostclip.errors import UnsupportedModelError
from ghostclip.graph import layouts, measuring, reader

WIDTH = 5


class Picked(nn.Module):
    """A layer that reads the rows it is sent by their values; positions and a scale that all share; a gated branch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(WIDTH, 6), nn.Linear(6, 3)
        self.table, self.scale = nn.Embedding(7, 6), nn.Parameter(torch.rand(6) + 0.5)
        self.late = nn.Parameter(torch.randn(6))

    def forward(self, x, gate=1.0, mixed=0.0):
        positions = self.table(torch.arange(x.shape[1])) * (self.scale + mixed * x.mean())
        h = torch.tanh(self.first(x)) + positions
        rows = (h + gate * (h * self.late)).flatten(0, 1)
        sent = (rows[:, 0] > 0).nonzero()[:, 0]
        found = torch.zeros(len(rows), 3).index_add(0, sent, self.second(rows[sent]))
        return found.view(len(x), -1).square().sum(1)


@pytest.fixture
def searched(monkeypatch):
    """In which batches everything was looked at."""
    found, whole, measured = [], measuring.measure_all, layouts._measured

    def counted(structure, *rest):
        monkeypatch.setattr(measuring, "measure_all", lambda *a, **k: found.append(structure.batches) or whole(*a, **k))
        return measured(structure, *rest)

    monkeypatch.setattr(layouts, "_measured", counted)
    return found


def batch(number):
    torch.manual_seed(number)
    return torch.randn(6, 7, WIDTH)


def clip(clipper, data, **options):
    clipper.model.zero_grad()
    result = clipper.clip(lambda model, x: model(x, **options), data)
    return result.norms, gradients(clipper.model)


def assert_exact(clipper, data, **options):
    model = Picked()
    model.load_state_dict(clipper.model.state_dict())
    grads = oracle.grads_of_single_losses(model, model(data, **options))
    norms, sums = clip(clipper, data, **options)
    torch.testing.assert_close(norms, oracle.norms(grads))
    torch.testing.assert_close(sums, oracle.clipped_sum(grads, 1.0), rtol=1e-4, atol=1e-5)


@every_pass
def test_batches_in_part_are_exact(second_pass, searched):
    clipper = ghostclip.GhostClipper(ghostclip.wrap(Picked()), 1.0, second_pass=second_pass)
    for number in range(11):
        assert_exact(clipper, batch(number))
    assert searched == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("second_pass", "budget", "backwards"), [("cached", None, 3), ("cached", 1, 5), ("reweight", None, 5)]
)
def test_gradients_of_the_plain_backward_are_held_where_they_may_be_kept(second_pass, budget, backwards, monkeypatch):
    """Rows in no order take two marked backwards; norms and sums take one each where nothing may be held."""
    clipper = ghostclip.GhostClipper(ghostclip.wrap(Picked()), 1.0, second_pass=second_pass, memory_budget=budget)
    run, seeds = reader.run_backward, []

    def counted(tensors, grads, *rest, **options):
        seeds.append(type(tensors[0].grad_fn).__name__)
        return run(tensors, grads, *rest, **options)

    for number in range(2):
        clip(clipper, batch(number))
    monkeypatch.setattr(reader, "run_backward", counted)
    assert_exact(clipper, batch(2))
    assert len([name for name in seeds if name == "SumBackward1"]) == backwards


def test_blocks_that_are_computed_again_are_not_held(monkeypatch):
    """Their inputs are those of one backward, and would keep what checkpointing is to save."""

    class Checkpointed(Picked):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    clipper, held = ghostclip.GhostClipper(ghostclip.wrap(Checkpointed()), 1.0), []
    in_part = measuring.measure_boundaries
    monkeypatch.setattr(measuring, "measure_boundaries", lambda *given: held.append(given[-1]) or in_part(*given))
    for number in range(4):
        assert_exact(clipper, batch(number))
    assert held == [False]


def test_a_boundary_that_was_silent_has_all_looked_at(searched):
    clipper = ghostclip.GhostClipper(ghostclip.wrap(Picked()), 1.0)
    for number in range(5):
        clip(clipper, batch(number), gate=0.0)
    assert_exact(clipper, batch(5), gate=1.0)
    assert searched == [1, 2, 4, 6]


def test_rows_of_several_examples_at_a_boundary_have_all_looked_at(searched):
    """They are refused: the rows of one example are read for another."""

    class Exchanged(Picked):
        def forward(self, x, order):
            h = (torch.tanh(self.first(x)) * self.scale).flatten(1)
            return self.second((h + order @ h).view(len(x), -1, 6)).square().sum((1, 2))

    clipper = ghostclip.GhostClipper(ghostclip.wrap(Exchanged()), 1.0)
    for number in range(5):
        clip(clipper, batch(number), order=torch.zeros(6, 6))
    with pytest.raises(UnsupportedModelError, match="examples mix"):
        clip(clipper, batch(5), order=torch.ones(6, 6))
    assert searched == [1, 2, 4, 6]


def test_what_is_shared_is_tried_again(searched):
    """A table that begins to depend on the examples changes no owner of a gradient."""
    clipper = ghostclip.GhostClipper(ghostclip.wrap(Picked()), 1.0)
    for number in range(7):
        clip(clipper, batch(number))
    with pytest.raises(UnsupportedModelError):
        clip(clipper, batch(7), mixed=1.0)


def test_batches_that_show_nothing_have_all_looked_at_again(searched):
    """Where all examples are alike, overwriting rows changes nothing."""
    clipper = ghostclip.GhostClipper(ghostclip.wrap(Picked()), 1.0)
    for number in range(2):
        clip(clipper, batch(number)[:1].expand(6, -1, -1).clone())
    with pytest.raises(UnsupportedModelError):
        clip(clipper, batch(2), mixed=1.0)
