"""The fuzzer: fixed cases pass, a case is its seed's, planted bugs and bad data sets are found."""

import pytest
import torch
from scripts import script

fuzz = script("fuzz")

from fuzzing import settings, work  # noqa: E402
from fuzzing.collates import COLLATES  # noqa: E402
from fuzzing.data_pairs import data_case  # noqa: E402

SEEDS = range(24)
PAIRS = [seed for seed in SEEDS if seed % work.PAIRS_EVERY == 0]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.one_in(6)
def test_fixed_cases_have_no_unexplained_difference(seed):
    assert work.run_case(seed).findings == []


def test_a_case_is_its_seed_s():
    first, again = (work.run_case(7) for _ in range(2))
    assert (first.recipe, first.counts, first.worst_error) == (again.recipe, again.counts, again.worst_error)
    assert first.counts["batches"]


PLANTED = {
    "weights that are too large": ("ghostclip.clipping.policies.margin", lambda dtype: 1.001),
    "cross terms that are left out": ("ghostclip.norms.combine.cross", lambda outer, rows: torch.zeros(())),
    "no test for cancellation": ("ghostclip.norms.outer.OuterProduct.squared_sizes", lambda *_: torch.zeros(())),
}


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.one_in(3)
def test_a_planted_bug_is_found(name, monkeypatch):
    monkeypatch.setattr(*PLANTED[name])
    assert any(work.run_case(seed).findings for seed in SEEDS)


def test_a_planted_bug_is_found_by_pairs(monkeypatch):
    monkeypatch.setattr("ghostclip.clipping.policies.flat_weights", lambda norms, bound: torch.ones_like(norms))
    found = [what for seed in PAIRS for what in work.run_case(seed).findings]
    assert any("moves the sum by" in what for what in found)


def test_every_decision_that_is_forced_is_there():
    assert settings.missing_knobs() == []


HONEST = {each.name: each for each in COLLATES if each.honest and not each.random}
DISHONEST = {each.name: each for each in COLLATES if not each.honest}


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.one_in(8)
def test_honest_collates_move_at_most_the_bound(name):
    outcomes = [data_case(seed, only=name, self_check=False) for seed in range(2)]
    if HONEST[name].honest is True:
        assert [outcome.findings for outcome in outcomes] == [[]] * 2
    else:
        assert any("accepted" in what for outcome in outcomes for what in outcome.findings)  # of users
    assert max(outcome.worst_share for outcome in outcomes) > 0.5


@pytest.mark.parametrize("name", DISHONEST)
@pytest.mark.one_in(6)
def test_what_moves_more_is_found_without_the_self_check(name):
    cases = (data_case(seed, only=name, self_check=False) for seed in range(20))
    assert any("accepted" in what for case in cases for what in case.findings)
