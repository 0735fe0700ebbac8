"""Paired sensitivity: one more example, however nasty, moves the clipped sum by at most the bound.

`experiments/sensitivity.py` has all rows under all policies, and says what was measured.
"""

import pytest
import torch
from cases import CASES, case
from paired import ADVERSARIES, OTHERS, POLICIES, SECOND_PASSES, STRATEGIES, Pair
from torch import nn

import ghostclip

MOST = 1 + 1e-5
# What takes most digits away from attention and normalization.
EXTREME = {"3e4": lambda x: 3e4 * x, "1e8": lambda x: 1e8 * x, "constant 1e5": lambda x: torch.full_like(x, 1e5)}


@pytest.fixture(autouse=True)
def extremes(monkeypatch):
    for name, adversary in EXTREME.items():
        monkeypatch.setitem(ADVERSARIES, name, adversary)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
@pytest.mark.one_in(160)
def test_no_example_moves_a_sum_by_more_than_the_bound(number):
    """Under flat clipping by reweighting, and one of the other combinations in turn."""
    pair, policies = Pair(CASES[number], torch.float32), list(POLICIES)
    other = policies[number % len(policies)], SECOND_PASSES[number % 2], STRATEGIES[number % 3]
    for combination in (("flat", "reweight", "direct"), other):
        clipper = pair.clipper(*combination)
        found = {name: pair.ratio(clipper, name) for name in ADVERSARIES}
        assert all(ratio <= MOST for ratio in found.values()), (combination, found)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("second_pass", SECOND_PASSES)
@pytest.mark.parametrize("policy", ["flat", "per layer"])
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.one_in(2)
def test_positions_that_cancel_to_rounding_errors(dims, policy, second_pass, strategy):
    pair = Pair(case(f"instancenorm{dims}d no affine"), torch.float32)
    clipper = pair.clipper(policy, second_pass, strategy)
    assert max(pair.ratio(clipper, name) for name in (*EXTREME, "constant", "huge", "plain")) <= MOST


def test_the_bound_is_reached():
    pair = Pair(case("linear 3-D"), torch.float32)
    assert pair.ratio(pair.clipper("flat", "reweight"), "plain") > 0.9999


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["linear 3-D", "conv2d plain", "encoder layer"])
def test_narrow_parameters_keep_to_the_bound_that_is_stated(name, dtype):
    pair = Pair(case(name), dtype)
    clipper = pair.clipper("flat", "reweight")
    worst = max(pair.ratio(clipper, name) for name in ("plain", "constant", "one-hot", "NaN", "inf"))
    assert clipper.sensitivity / pair.bound == 1 + OTHERS * torch.finfo(dtype).eps
    assert worst <= clipper.sensitivity / pair.bound


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("second_pass", ["reweight", "cached"])
def test_rounding_of_narrow_sums_of_many_alike_is_within_the_bound_that_is_stated(dtype, backwards, second_pass):
    """The sum grows far beyond one example's share, and so does what rounding it may do to that."""
    worst = 0.0
    for seed in range(8):
        torch.manual_seed(seed)
        clipper = ghostclip.GhostClipper(nn.Linear(40, 30).to(dtype), 1.0, second_pass=second_pass)
        rows = (torch.randn(40) + 0.1 * torch.randn(90, 40)).to(dtype)
        sums, stated = [], 0.0
        for count in (90, 89):
            clipper.model.zero_grad()
            for part in rows[:count].chunk(backwards):
                stated = clipper.backward(clipper.model(part).float().square().sum(1)).sensitivity
            sums.append(torch.cat([p.grad.double().flatten() for p in clipper.model.parameters()]))
        moved = float((sums[0] - sums[1]).norm())
        assert moved <= stated
        assert stated == 1.0 + backwards * 89 * torch.finfo(dtype).eps
        worst = max(worst, moved)
    assert worst > 1.0 + torch.finfo(dtype).eps
