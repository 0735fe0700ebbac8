"""Checkpointed blocks that draw random numbers anew each time they are computed."""

import random

import numpy as np
import pytest
import torch
from case_models import Wired
from comparing import every_pass
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ghostclip import GhostClipper
from ghostclip.clipping import PerLayer
from ghostclip.graph import layouts

BOUND = 0.01
# Bytes in which the gradients of layers outside of checkpointed blocks can be kept, and those of the others can't.
BUDGET = {"three layers": 1000, "one": 500}
DRAWS = {
    "dropout": lambda h: F.dropout(h, 0.5),
    "numpy": lambda h: h * float(np.random.random()),
    "python": lambda h: h * random.random(),
}


def model(draw):
    torch.manual_seed(0)

    def wiring(m, x):
        h = m.first(x)
        for part in (m.second, m.third):
            h = checkpoint(
                lambda h, part=part: part(DRAWS[draw](h.relu())), h, use_reentrant=False, preserve_rng_state=False
            )
        return m.head(h)

    sizes = {"first": (8, 12), "second": (12, 12), "third": (12, 12), "head": (12, 2)}
    return Wired(wiring, **{name: nn.Linear(*size) for name, size in sizes.items()})


def squares(outputs):
    return outputs.flatten(1).square().sum(1)


@pytest.mark.parametrize("policy", [BOUND, PerLayer(BOUND)], ids=["flat", "each layer"])
@every_pass
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.one_in(4)
def test_a_share_in_batches_of_one_keeps_to_the_bound(draw, second_pass, policy):
    network = model(draw)
    clipper = GhostClipper(network, policy, second_pass=second_pass, memory_budget=BUDGET["three layers"])
    for x in torch.randn(12, 1, 5, 8):
        network.zero_grad()
        clipper.backward(squares(network(x)))
        assert torch.cat([p.grad.flatten() for p in network.parameters()]).norm() <= BOUND * (1 + 1e-5)


def test_a_forward_after_a_backward_draws_numbers_that_no_pass_has_drawn():
    """Also where the second pass computes fewer blocks again than the first: none below the lowest layer it is for."""
    drawn = []

    def noted(h):
        drawn.append(float(np.random.random()))
        return h * drawn[-1]

    def wiring(m, x):
        h = checkpoint(lambda h: noted(h).tanh(), m.first(x), use_reentrant=False, preserve_rng_state=False)
        return checkpoint(lambda h: m.second(noted(h)), h, use_reentrant=False, preserve_rng_state=False)

    network = Wired(wiring, first=nn.Linear(8, 12), second=nn.Linear(12, 12))
    clipper = GhostClipper(network, BOUND, second_pass="cached", memory_budget=BUDGET["one"])
    for x in torch.ones(5, 1, 5, 8):
        before = len(drawn)
        losses = squares(network(x))
        assert not set(drawn[before:]) & set(drawn[:before])
        clipper.backward(losses, retain_graph=True)  # freeing the graph would compute all blocks once more
        assert len(drawn) - before == 5


@pytest.mark.parametrize(("rank", "computed"), [(2, 4), (40, 6)], ids=["small", "large"])
def test_blocks_with_small_gradients_are_computed_again_once(rank, computed):
    """Two in the forward, two in the first pass and, where gradients are large, two in the second pass."""
    forwards = []

    def counted(h, block):
        forwards.append(1)
        return h + block(h).tanh()

    def wiring(m, x):
        h = m.first(x)
        for block in m.blocks:
            h = checkpoint(counted, h, block, use_reentrant=False)
        return m.head(h)

    blocks = nn.ModuleList([nn.Sequential(nn.Linear(48, rank), nn.Linear(rank, 48)) for _ in range(2)])
    model = Wired(wiring, first=nn.Linear(8, 48).requires_grad_(False), blocks=blocks, head=nn.Linear(48, 2)).double()
    clipper, x = GhostClipper(model, 0.5), torch.randn(4, 32, 8, dtype=torch.float64)
    for _ in range(3):  # the third isn't measured
        forwards.clear()
        model.zero_grad()
        clipper.backward(squares(model(x)))
    assert len(forwards) == computed
    assert clipper.verify(lambda model, x: squares(model(x)), x) < 1e-9


def test_an_input_that_requires_a_gradient_is_no_reason_to_measure(monkeypatch):
    """As embeddings do for the sake of checkpointing: no backward that measures goes below the lowest layer."""
    measured, of_batch = [], layouts._measured
    monkeypatch.setattr(layouts, "_measured", lambda *given: measured.append(given[0].batches) or of_batch(*given))
    model = Wired(lambda m, x: m.second(m.first(x.sin()).tanh()), first=nn.Linear(8, 12), second=nn.Linear(12, 2))
    clipper = GhostClipper(model, 0.5)
    for _ in range(7):
        clipper.backward(squares(model(torch.randn(4, 5, 8, requires_grad=True))))
    assert measured == [1, 2, 4]
