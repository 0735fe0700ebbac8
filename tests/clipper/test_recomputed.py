"""Checkpointed blocks that draw random numbers anew each time they are computed."""

import random

import numpy as np
import pytest
import torch
from case_models import Wired
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ghostclip import GhostClipper
from ghostclip.clipping import PerLayer

BOUND = 0.01
DRAWS = {
    "dropout": lambda h: F.dropout(h, 0.5),
    "numpy": lambda h: h * float(np.random.random()),
    "python": lambda h: h * random.random(),
}


def model(draw):
    torch.manual_seed(0)

    def wiring(m, x):
        blocks = [lambda h, part=part: part(DRAWS[draw](h.relu())) for part in (m.second, m.third)]
        h = m.first(x)
        for block in blocks:
            h = checkpoint(block, h, use_reentrant=False, preserve_rng_state=False)
        return m.head(h)

    sizes = {"first": (8, 12), "second": (12, 12), "third": (12, 12), "head": (12, 2)}
    return Wired(wiring, **{name: nn.Linear(*size) for name, size in sizes.items()})


def squares(outputs):
    return outputs.flatten(1).square().sum(1)


@pytest.mark.parametrize("policy", [BOUND, PerLayer(BOUND)], ids=["flat", "each layer"])
@pytest.mark.parametrize("second_pass", ["cached", "reweight"])
@pytest.mark.parametrize("draw", DRAWS)
def test_a_share_in_batches_of_one_keeps_to_the_bound(draw, second_pass, policy):
    network = model(draw)
    clipper = GhostClipper(network, policy, second_pass=second_pass)
    for x in torch.randn(20, 1, 5, 8):
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
    clipper = GhostClipper(network, BOUND, second_pass="cached")
    for x in torch.ones(5, 1, 5, 8):
        before = len(drawn)
        losses = squares(network(x))
        assert not set(drawn[before:]) & set(drawn[:before])
        clipper.backward(losses, retain_graph=True)  # freeing the graph would compute all blocks once more
        assert len(drawn) - before == 5
