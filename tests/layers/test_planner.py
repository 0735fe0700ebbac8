"""The plan follows the measurements, is remembered, and can be forced; no choice changes a norm."""

import pickle

import pytest
import torch
from cases import case as find
from comparing import ready

from ghostclip.norms.combine import Tied
from ghostclip.norms.convolution import ConvGrads, Geometry
from ghostclip.norms.outer import OuterProduct
from ghostclip.norms.rows import LookupGrads
from ghostclip.planner import Planner, milliseconds


@pytest.fixture(autouse=True)
def without_compiled_strategies(monkeypatch):
    """The same few strategies on every machine, so that a test can give each measurement."""
    monkeypatch.setattr("ghostclip.norms.outer.gram_is_there", lambda like: False)
    monkeypatch.setattr("ghostclip.norms.convolution.shifts_are_there", lambda images: False)


def linear_term(positions=6):
    torch.manual_seed(0)
    left, right = torch.randn(3, positions, 4, dtype=torch.float64), torch.randn(3, positions, 5, dtype=torch.float64)
    return OuterProduct(left, right, torch.Size((4, 5)))


def convolution_term():
    torch.manual_seed(0)
    images, grads = torch.randn(3, 2, 6, 6, dtype=torch.float64), torch.randn(3, 4, 4, 4, dtype=torch.float64)
    return ConvGrads(images, grads, torch.Size((4, 2, 3, 3)), Geometry((1, 1), (0, 0), (1, 1), 1))


def rows_term():
    torch.manual_seed(0)
    return LookupGrads(torch.randint(4, (3, 7)), torch.randn(3, 7, 5, dtype=torch.float64), torch.Size((4, 5)))


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


@pytest.mark.parametrize(("kept", "choice"), [(8.2, ("direct", True)), (8.3, ("gram", False))])
def test_the_clipped_sum_that_follows_counts(kept, choice):
    planner = planner_that_measures((kept, 5.0, 2.0))  # direct and its sum, the sum of what is not kept, gram
    _, found = planner.answer(linear_term(), keep=True)
    assert (found.name, found.keep) == choice
    assert found.milliseconds == {"direct": kept, "gram": 7.0}


def test_gradients_are_not_kept_beyond_the_memory_budget():
    for room, keep in ((3 * 4 * 5 * 4, True), (3 * 4 * 5 * 4 - 1, False)):
        answer, choice = planner_that_measures((1.0, 9.0, 9.0)).answer(linear_term(), keep=True, room=room)
        assert (choice.keep, answer.kept is not None) == (keep, keep)


def test_a_shape_is_measured_once():
    planner = planner_that_measures((2.0, 1.0))
    first, second = (planner.answer(linear_term(), keep=False) for _ in range(2))
    assert first[1] is second[1]
    assert torch.equal(first[0].squared_norms, second[0].squared_norms)


def test_a_choice_is_for_one_type_of_indices():
    """The compiled function reads one type only."""
    term, planner = rows_term(), Planner()
    narrow = LookupGrads(term.indices.int(), term.gradients, term.shape)
    assert narrow.key != term.key
    expected = planner.answer(term, keep=False)[0].squared_norms
    torch.testing.assert_close(planner.answer(narrow, keep=False)[0].squared_norms, expected, rtol=1e-12, atol=0)


def test_a_planner_is_pickled_with_its_choices():
    planner = Planner()
    terms = [linear_term(), convolution_term(), rows_term(), Tied(linear_term(7), rows_term())]
    found = [planner.answer(term, keep=False) for term in terms]
    twin = pickle.loads(pickle.dumps(planner))
    for term, (answer, choice) in zip(terms, found, strict=True):
        again, chosen = twin.answer(term, keep=False)
        assert chosen == choice
        assert torch.equal(again.squared_norms, answer.squared_norms)


@pytest.mark.parametrize("keep", [False, True])
def test_a_layer_without_outputs(keep):
    """It has no gradient, and still is one of several examples."""
    term = OuterProduct(torch.randn(3, 6, 0), torch.randn(3, 6, 5), torch.Size((0, 5)))
    answer = term.by_direct(keep)
    assert answer.squared_norms.tolist() == [0.0, 0.0, 0.0]
    assert (None if answer.kept is None else answer.kept.shape) == ((3, 0, 5) if keep else None)


@pytest.mark.parametrize("strategy", ["gram", "direct"])
def test_a_family_can_be_forced(strategy):
    for make in (linear_term, convolution_term):
        term = make()
        _, choice = Planner(strategy).answer(term, keep=True)
        assert term.candidates()[choice.name].family == strategy


def test_deterministic_algorithms_need_no_clock():
    def never(run, device, best):
        raise AssertionError("measured")

    clocked = Planner(measure=lambda run, device, best: 1.0)
    _, before = clocked.answer(linear_term(positions=64), keep=False)
    torch.use_deterministic_algorithms(True)
    try:
        _, after = clocked.answer(linear_term(positions=64), keep=False)
        _, long = Planner(measure=never).answer(linear_term(positions=64), keep=False)
        _, short = Planner(measure=never).answer(linear_term(positions=2), keep=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (long.name, short.name) == ("direct", "gram")
    assert before.milliseconds
    assert after == long


@pytest.mark.parametrize(("positions", "measured"), [(100, ["direct", "gram"]), (20000, ["direct"])])
def test_hopeless_candidates_are_not_measured(positions, measured):
    _, choice = planner_that_measures((1.0, 2.0)).answer(linear_term(positions), keep=False)
    assert (choice.name, list(choice.milliseconds)) == ("direct", measured)


def test_larger_batches_share_a_measurement_and_it_is_made_on_a_sample():
    seen = []

    def measure(run, device, best):
        seen.append(run().squared_norms.shape[0])
        return 1.0

    planner = Planner(measure=measure)
    for batch in (500, 40, 33):
        left, right = torch.randn(batch, 6, 4), torch.randn(batch, 6, 5)
        _, choice = planner.answer(OuterProduct(left, right, torch.Size((4, 5))), keep=False)
    assert seen == [32, 32]
    assert choice.milliseconds == {"direct": 500 / 32, "gram": 500 / 32}


def test_a_beaten_candidate_is_run_once_and_a_close_one_again():
    runs = []
    milliseconds(lambda: runs.append(1), torch.device("cpu"), best=1e-9)
    assert len(runs) == 1
    milliseconds(lambda: runs.append(1), torch.device("cpu"), best=1e9)
    assert len(runs) == 1 + 4


@pytest.mark.parametrize("case", ["linear 3-D", "linear 3-D long", "conv2d padding", "conv2d groups"])
def test_every_layer_with_a_choice_shows_two_costs(case):
    _, clipper, losses = ready(find(case))
    clipper.backward(losses)
    rows = [row for row in clipper.explain() if row.parameter == "weight"]
    assert rows
    assert all(len(row.milliseconds) >= 2 for row in rows)
