"""The plan follows the measurements, is remembered, and can be forced; no choice changes a norm."""

import pytest
import torch

from ghostclip.norms.outer import OuterProduct
from ghostclip.planner import Planner


@pytest.fixture(autouse=True)
def without_compiled_strategies(monkeypatch):
    """The same few strategies on every machine, so that a test can give each measurement."""
    monkeypatch.setattr("ghostclip.norms.outer.gram_is_there", lambda like: False)
    monkeypatch.setattr("ghostclip.norms.convolution.shifts_are_there", lambda images: False)


def linear_term(positions=6):
    torch.manual_seed(0)
    left, right = torch.randn(3, positions, 4, dtype=torch.float64), torch.randn(3, positions, 5, dtype=torch.float64)
    return OuterProduct(left, right, torch.Size((4, 5)))


def planner_that_measures(costs):
    """A planner whose clock gives the candidates, in the order of their flops, these costs."""
    left = iter(costs)
    return Planner(measure=lambda run, device, best: next(left))


@pytest.mark.parametrize(("costs", "expected"), [((2.0, 1.0), "gram"), ((1.0, 2.0), "direct")])
def test_a_changed_measurement_changes_the_plan(costs, expected):
    planner = planner_that_measures(costs)
    _, choice = planner.answer(linear_term(), keep=False)
    assert (choice.name, choice.reason) == (expected, "fastest measured")
    assert choice.milliseconds == dict(zip(("direct", "gram"), costs, strict=True))


def test_a_graph_chooses_by_the_same_comparison(monkeypatch):
    """What keeps gradients is taken where it is a little slower, as in the uncompiled passes."""
    planner = planner_that_measures([1.1, 0.0, 1.0])  # direct, the sum where none is kept, gram
    term = linear_term(positions=20)
    _, outside = planner.answer(term, keep=True)
    monkeypatch.setattr("ghostclip.planner.is_traced", lambda: True)
    _, inside = planner.answer(term, keep=True)
    assert outside.milliseconds == inside.milliseconds == {"direct": 1.1, "gram": 1.0}
    assert (outside.name, inside.name, inside.keep) == ("direct", "direct", True)


def test_deterministic_algorithms_need_no_clock(monkeypatch):
    def never(run, device, best):
        raise AssertionError("measured")

    clocked = Planner(measure=lambda run, device, best: 1.0)
    _, before = clocked.answer(linear_term(positions=64), keep=False)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    _, after = clocked.answer(linear_term(positions=64), keep=False)
    _, long = Planner(measure=never).answer(linear_term(positions=64), keep=False)
    _, short = Planner(measure=never).answer(linear_term(positions=2), keep=False)
    assert (long.name, short.name) == ("direct", "gram")
    assert before.milliseconds
    assert after == long
