"""Random small models of parameters in odd places: each is clipped exactly, or refused; never silently wrong.

Sizes are drawn so that the batch, the positions and the features are often the same or multiples of each other, and
batches of several sizes go through one clipper, so that what was found out in one is used in another.
"""

import functools
import random

import pytest
import torch
from comparing import assert_exact_by_losses
from random_pieces import PIECES, Part
from torch import nn

import ghostclip

FRACTION = 0.4  # of the random models may be refused at most, lest the test look at refusals only


def drawn(seed):
    """A model with a trained first layer, batches for it, and options of the clipper."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    sizes = {"T": choose.choice([2, 3, 4, 4, 6, 8]), "d": choose.choice([2, 4, 4, 6])}
    names = [choose.choice(list(PIECES)) for _ in range(choose.choice([1, 2, 3]))]
    model = nn.Sequential(nn.Linear(sizes["d"], sizes["d"]), *(Part(name, sizes) for name in names)).double()
    batches = [torch.randn(choose.choice([1, 2, 3, 4, 4, 6, 8]), sizes["T"], sizes["d"]).double() for _ in range(3)]
    return model, batches, {"second_pass": choose.choice(["reweight", "cached"])}


def losses_of(model, x):
    return (torch.tanh(model(x)) + 0.1).square().mean((1, 2))


@functools.cache
def assert_exact_or_refused(seed):
    """ "exact" or "refused"; raises where a batch is clipped otherwise than by the loop."""
    model, batches, options = drawn(seed)
    clipper = ghostclip.GhostClipper(model, 0.05, **options)
    for x in batches:
        try:
            assert_exact_by_losses(clipper, losses_of(model, x), 1e-8)
        except ghostclip.GhostClipError:
            return "refused"
    return "exact"


@pytest.mark.parametrize("block", range(0, 1500, 20))
@pytest.mark.one_in(75)
def test_random_models_are_exact_or_refused(block):
    for seed in range(block, block + 20):
        assert_exact_or_refused(seed)


def test_most_random_models_train():
    refused = sum(assert_exact_or_refused(seed) == "refused" for seed in range(40))
    assert refused < FRACTION * 40
