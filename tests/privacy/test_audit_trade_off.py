"""The one-run audit by trade-off curves: against linear programs, over simulated repetitions, with a planted bug."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.stats import binom, norm

from ghostclip.audit.one_run import OneRun
from ghostclip.audit.trade_off import _least_false, noise_from_guesses, refutes
from ghostclip.audit.training import Claim
from ghostclip.audit.trials import log_ratios

CLAIM = Claim(1.0, 0.25, 20, 1e-5)
FAILURE = 0.01


def gaussian(right: float, mu: float) -> float:
    """x(y) of a mu-Gaussian mechanism."""
    return float(norm.cdf(norm.ppf(right) - mu))


def pure(right: float, epsilon: float) -> float:
    """x(y) of pure differential privacy."""
    return max(right * math.exp(-epsilon), 1 - math.exp(epsilon) * (1 - right), 0.0)


def largest_probability(epsilon: float, m: int, r: int, v: int) -> float:
    """The largest P[j >= v] that the inequalities allow, as a linear program: x is a maximum of two lines."""
    j = np.arange(r + 1)
    rows, limits = [], []
    for c in range(1, r + 1):
        false, right = np.where(j >= c - 1, (r - j) / m, 0.0), np.where(j >= c, j / m, 0.0)
        rows += [math.exp(-epsilon) * right - false, math.exp(epsilon) * right - false]
        limits += [0.0, math.exp(epsilon) - 1.0]
    found = linprog(-(j >= v).astype(float), rows, limits, [np.ones(r + 1)], [1.0], bounds=(0, 1))
    assert found.status == 0
    return -float(found.fun)


@pytest.mark.parametrize(("m", "r", "v"), [(10, 10, 8), (10, 6, 5), (40, 20, 16), (12, 12, 7), (30, 5, 5)])
@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_the_recursion_finds_what_a_linear_program_finds(epsilon: float, m: int, r: int, v: int) -> None:
    most = largest_probability(epsilon, m, r, v)
    curve = partial(pure, epsilon=epsilon)
    if most < 1 - 1e-6:
        assert refutes(curve, canaries=m, guesses=r, correct=v, failure=most * (1 + 1e-6))
    assert not refutes(curve, canaries=m, guesses=r, correct=v, failure=most * (1 - 1e-6))


def test_randomized_response_is_never_refuted_more_often_than_it_may() -> None:
    """All guessed: j is binomial with the accuracy of epsilon-private randomized response (Steinke et al. 2023)."""
    m, epsilon = 50, 1.0
    accuracy = 1 / (1 + math.exp(-epsilon))
    for v in range(m + 1):
        tail = float(binom.sf(v - 1, m, accuracy))
        if 0 < tail < 1:
            least = tail * (1 - 1e-9)
            assert not refutes(partial(pure, epsilon=epsilon), canaries=m, guesses=m, correct=v, failure=least)


def guessed(generator: Any, noise: float, canaries: int, guesses: int) -> OneRun:
    """One run of the claimed rate and steps with that noise; guesses by the scores of the claim, half "in"."""
    inside = generator.integers(0, 2, canaries).astype(bool)
    taken = inside[:, None] & (generator.random((canaries, CLAIM.steps)) < CLAIM.sample_rate)
    seen = taken + noise * generator.standard_normal(taken.shape)
    order = np.argsort(log_ratios(seen, CLAIM.sample_rate, CLAIM.noise_multiplier).sum(1))
    half = guesses // 2
    return OneRun(canaries, guesses, int(inside[order[-half:]].sum() + (~inside[order[:half]]).sum()))


def claimed_curve(noise: float = 1.0) -> Callable[[float], float]:
    return partial(_least_false, noise=noise, sample_rate=CLAIM.sample_rate, steps=CLAIM.steps)


def test_a_sound_mechanism_is_never_above_its_claim_in_200_repetitions() -> None:
    generator = np.random.default_rng(1)
    for _ in range(200):
        run = guessed(generator, 1.0, 1000, 200)
        assert not refutes(claimed_curve(), **vars(run), failure=FAILURE)


@pytest.mark.parametrize(("bound", "found"), [(1.0, False), (2.0, True)])
def test_clipping_at_twice_the_bound_is_found_where_little_is_claimed(bound: float, found: bool) -> None:
    """One release of noise multiplier 2 over all of 4,000 canaries, a tenth guessed about; epsilon 8 hides the bug."""
    generator = np.random.default_rng(2)
    for _ in range(5):
        inside = generator.integers(0, 2, 4000).astype(bool)
        order = np.argsort(bound * inside + 2.0 * generator.standard_normal(4000))
        correct = int(inside[order[-200:]].sum() + (~inside[order[:200]]).sum())
        curve = partial(gaussian, mu=1 / 2.0)
        assert refutes(curve, canaries=4000, guesses=400, correct=correct, failure=FAILURE) == found


def test_the_noise_is_the_least_that_is_refuted() -> None:
    arguments: dict[str, Any] = {"canaries": 200, "guesses": 60, "correct": 55, "failure": FAILURE}
    noise = noise_from_guesses(**arguments, sample_rate=1.0, steps=1)
    assert refutes(partial(gaussian, mu=1 / noise), **arguments)
    assert not refutes(partial(gaussian, mu=1.05 / noise), **arguments)


@pytest.mark.parametrize("correct", [0, 30, 33])
def test_guesses_like_a_coin_s_refute_nothing(correct: int) -> None:
    arguments: dict[str, Any] = {"canaries": 200, "guesses": 60, "correct": correct, "failure": FAILURE}
    assert noise_from_guesses(**arguments, sample_rate=0.5, steps=2) == math.inf
    assert CLAIM.with_noise(math.inf) == 0.0
