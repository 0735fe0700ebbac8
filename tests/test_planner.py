"""The plan follows the measurements, is remembered, and can be forced; no choice changes a norm."""

import pytest
import torch

from ghostclip.norms.convolution import Geometry, Patches
from ghostclip.norms.outer import Outer
from ghostclip.planner import Planner


def linear_term(positions=6):
    torch.manual_seed(0)
    left, right = torch.randn(3, positions, 4, dtype=torch.float64), torch.randn(3, positions, 5, dtype=torch.float64)
    return Outer(left, right, torch.Size((4, 5)))


def convolution_term():
    torch.manual_seed(0)
    images, grads = torch.randn(3, 2, 6, 6, dtype=torch.float64), torch.randn(3, 4, 4, 4, dtype=torch.float64)
    return Patches(images, grads, torch.Size((4, 2, 3, 3)), Geometry((1, 1), (0, 0), (1, 1), 1))


def planner_that_measures(costs):
    """A planner whose clock gives the candidates, in the order they are tried, these costs."""
    left = iter(costs)
    return Planner(measure=lambda run, device: next(left))


@pytest.mark.parametrize(("costs", "expected"), [((2.0, 1.0), "direct"), ((1.0, 2.0), "gram")])
def test_a_changed_measurement_changes_the_plan(costs, expected):
    planner = planner_that_measures(costs)
    _, choice = planner.answer(linear_term(), keep=False)
    assert (choice.name, choice.reason) == (expected, "fastest measured")
    assert choice.milliseconds == dict(zip(("gram", "direct"), costs, strict=True))


def test_a_shape_is_measured_once():
    planner = planner_that_measures((2.0, 1.0))
    first, second = (planner.answer(linear_term(), keep=False) for _ in range(2))
    assert first[1] is second[1]
    assert torch.equal(first[0].squared_norms, second[0].squared_norms)


@pytest.mark.parametrize("make", [linear_term, convolution_term])
def test_every_candidate_gives_the_same_norms(make):
    term = make()
    expected = term.per_example().flatten(1).square().sum(1)
    assert len(term.candidates()) >= 2
    for candidate in term.candidates().values():
        for keep in (False, candidate.keeps):
            answer = candidate.run(keep)
            torch.testing.assert_close(answer.squared_norms, expected, rtol=1e-12, atol=0)
            assert (answer.kept is not None) == keep
            if keep:
                torch.testing.assert_close(answer.kept, term.per_example(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strategy", ["gram", "direct"])
def test_a_family_can_be_forced(strategy):
    for make in (linear_term, convolution_term):
        term = make()
        _, choice = Planner(strategy).answer(term, keep=True)
        assert term.candidates()[choice.name].family == strategy


def test_deterministic_algorithms_need_no_clock():
    def never(run, device):
        raise AssertionError("measured")

    torch.use_deterministic_algorithms(True)
    try:
        _, long = Planner(measure=never).answer(linear_term(positions=64), keep=False)
        _, short = Planner(measure=never).answer(linear_term(positions=2), keep=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (long.name, short.name) == ("direct", "gram")


def test_hopeless_candidates_are_not_measured():
    planner = planner_that_measures((1.0,))
    _, choice = planner.answer(linear_term(positions=500), keep=False)
    assert (choice.name, list(choice.milliseconds)) == ("direct", ["direct"])
