"""The fuzzer's data sets: collates are what they say, and what moves a sum too far is found."""

import random

import pytest
import torch
from scripts import script

script("fuzz")

from fuzzing.collates import COLLATES, PACKINGS, Rows, draw_data, losses_of, model_for  # noqa: E402
from fuzzing.data_pairs import data_case  # noqa: E402

HONEST = {each.name: each for each in COLLATES if each.honest and not each.random}
DISHONEST = {each.name: each for each in COLLATES if not each.honest}


def moved_by_company(collate, kind, packing, seed=3):
    """The largest change of an example's loss when others of its batch are left out."""
    torch.manual_seed(seed)
    data = Rows(draw_data(kind, 6, torch.Generator().manual_seed(seed), longest=20), collate.augment)
    model, pack = model_for(random.Random(seed), kind, "none"), PACKINGS[packing]
    with torch.no_grad():
        whole, few = (losses_of(model, pack(collate.collate([data[place] for place in places])))
                      for places in (range(6), (3, 1)))  # fmt: skip
    if collate.honest == "without users":  # in another order
        return max(float((whole - loss).abs().min()) for loss in few)
    return float((few - whole[[3, 1]]).abs().max())


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", HONEST)
def test_honest_collates_leave_losses_alone(name, packing):
    for kind in HONEST[name].kinds:
        assert moved_by_company(HONEST[name], kind, packing) < 1e-12


@pytest.mark.parametrize("packing", ["dict", "lists"])
@pytest.mark.parametrize("name", DISHONEST)
def test_dishonest_collates_change_losses(name, packing):
    for kind in DISHONEST[name].kinds:
        assert max(moved_by_company(DISHONEST[name], kind, packing, seed) for seed in range(5)) > 1e-3


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.one_in(2)
def test_honest_collates_move_at_most_the_bound(name):
    outcomes = [data_case(seed, only=name, self_check=False) for seed in range(2)]
    if HONEST[name].honest is True:
        assert [outcome.findings for outcome in outcomes] == [[]] * 2
    else:
        assert any("accepted" in what for outcome in outcomes for what in outcome.findings)  # of users
    assert max(outcome.worst_share for outcome in outcomes) > 0.5


@pytest.mark.parametrize("name", DISHONEST)
def test_what_moves_more_is_found_without_the_self_check(name):
    cases = (data_case(seed, only=name, self_check=False) for seed in range(20))
    assert any("accepted" in what for case in cases for what in case.findings)
