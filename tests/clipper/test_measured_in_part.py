"""Structures that are measured in every batch: what examples share is looked for in the 1st, 2nd, 4th, ... batch alone.

In the others, layers and the boundaries that were found are looked at.
"""

import oracle
import pytest
import torch
from case_fallback import with_parameters
from comparing import every_pass, gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

import ghostclip
from ghostclip.errors import UnsupportedModelError
from ghostclip.graph import layouts, measuring, reader

WIDTH = 5


def picked(m, x, gate=1.0, mixed=0.0):
    """A layer that reads the rows it is sent by their values; positions and a scale that all share; a gated branch."""
    positions = m.table(torch.arange(x.shape[1])) * (m.scale + mixed * x.mean())
    h = torch.tanh(m.first(x)) + positions
    rows = (h + gate * (h * m.late)).flatten(0, 1)
    sent = (rows[:, 0] > 0).nonzero()[:, 0]
    found = torch.zeros(len(rows), 3).index_add(0, sent, m.second(rows[sent]))
    return found.view(len(x), -1).square().sum(1)


def network(wiring=picked):
    torch.manual_seed(3)
    layers = {"first": nn.Linear(WIDTH, 6), "second": nn.Linear(6, 3), "table": nn.Embedding(7, 6)}
    return with_parameters(wiring, {"scale": (6,), "late": (6,)}, **layers)


def clipper_of(wiring=picked, **options):
    return ghostclip.GhostClipper(ghostclip.wrap(network(wiring)), 1.0, **options)


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


def clip(clipper, data, *more):
    clipper.model.zero_grad()
    result = clipper.clip(lambda model, x: model(x, *more), data)
    return result.norms, gradients(clipper.model)


def assert_exact(clipper, data, *more):
    model = network()
    model.load_state_dict(clipper.model.state_dict())
    grads = oracle.grads_of_single_losses(model, model(data, *more))
    norms, sums = clip(clipper, data, *more)
    torch.testing.assert_close(norms, oracle.norms(grads))
    torch.testing.assert_close(sums, oracle.clipped_sum(grads, 1.0), rtol=1e-4, atol=1e-5)


@every_pass
def test_batches_in_part_are_exact(second_pass, searched):
    clipper = clipper_of(second_pass=second_pass)
    for number in range(9):
        assert_exact(clipper, batch(number))
    assert searched == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("second_pass", "budget", "backwards"), [("cached", None, 3), ("cached", 1, 5), ("reweight", None, 5)]
)
def test_gradients_of_the_plain_backward_are_held_where_they_may_be_kept(second_pass, budget, backwards, monkeypatch):
    """Rows in no order take two marked backwards; norms and sums take one each where nothing may be held."""
    clipper = clipper_of(second_pass=second_pass, memory_budget=budget)
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

    def recomputed(m, x):
        return checkpoint(lambda x: picked(m, x), x, use_reentrant=False)

    clipper, held = clipper_of(recomputed), []
    in_part = measuring.measure_boundaries
    monkeypatch.setattr(measuring, "measure_boundaries", lambda *given: held.append(given[-1]) or in_part(*given))
    for number in range(4):
        assert_exact(clipper, batch(number))
    assert held == [False]


def test_a_boundary_that_was_silent_has_all_looked_at(searched):
    clipper = clipper_of()
    for number in range(5):
        clip(clipper, batch(number), 0.0)
    assert_exact(clipper, batch(5), 1.0)
    assert searched == [1, 2, 4, 6]


def exchanged(m, x, order):
    """The rows of one example are read for another."""
    h = (torch.tanh(m.first(x)) * m.scale).flatten(1)
    return m.second((h + order @ h).view(len(x), -1, 6)).square().sum((1, 2))


ALIKE = [batch(number)[:1].expand(6, -1, -1).clone() for number in range(2)]
# name: (forward, batches that don't mix, what they and the next one are given beside)
LATE = {
    "rows of several examples at a boundary": (
        exchanged, [batch(number) for number in range(5)], [torch.zeros(6, 6)], [torch.ones(6, 6)]),
    # A table that begins to depend on the examples changes no owner of a gradient.
    "what is shared": (picked, [batch(number) for number in range(7)], [], [1.0, 1.0]),
    # Where all examples are alike, overwriting rows changes nothing.
    "what is shared, after batches that show nothing": (picked, ALIKE, [], [1.0, 1.0]),
}  # fmt: skip


@pytest.mark.parametrize("name", LATE)
def test_what_begins_to_mix_has_all_looked_at_and_is_refused(name, searched):
    wiring, batches, before, mixed = LATE[name]
    clipper = clipper_of(wiring)
    for data in batches:
        clip(clipper, data, *before)
    with pytest.raises(UnsupportedModelError, match="examples mix" if wiring is exchanged else None):
        clip(clipper, batch(len(batches)), *mixed)
    assert searched[-1] == len(batches) + 1
