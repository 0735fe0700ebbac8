"""Matrices of correlated noise: their shape, their norms, errors against dense linear algebra, and their optimality."""

import itertools
import math
from typing import Any

import numpy as np
import pytest

from ghostclip.noise import BandedToeplitz, BufferedToeplitz, Correlation

STEPS = 30
MATRICES: list[Correlation] = [
    BandedToeplitz(bands=1),
    BandedToeplitz(bands=2),
    BandedToeplitz(bands=8),
    BandedToeplitz(bands=40),
    BandedToeplitz(coefficients=[2.0, 1.0, 0.5]),
    BandedToeplitz(coefficients=[1.0, -0.4, 0.1]),
    BufferedToeplitz(buffers=1),
    BufferedToeplitz(buffers=3),
]


@pytest.mark.parametrize("correlation", MATRICES, ids=repr)
def test_matrices_are_lower_triangular_with_columns_of_norm_1(correlation: Correlation) -> None:
    matrix = correlation.matrix(steps=STEPS)
    assert (matrix.shape, matrix.dtype) == ((STEPS, STEPS), np.float64)
    assert np.abs(np.linalg.norm(matrix, axis=0) - 1).max() < 1e-14
    assert not np.triu(matrix, 1).any()
    if correlation.bands is not None:
        assert not np.tril(matrix, -correlation.bands).any()
        assert np.diagonal(matrix, -min(correlation.bands, STEPS) + 1).all()
    # Toeplitz but for the norms by which columns are divided.
    series = correlation.series(STEPS)
    for step, column in enumerate(matrix.T):
        assert column[step:] == pytest.approx(series[: STEPS - step] / np.linalg.norm(series[: STEPS - step]))


@pytest.mark.parametrize("correlation", MATRICES, ids=repr)
def test_errors_are_those_of_prefix_sums_by_dense_linear_algebra(correlation: Correlation) -> None:
    prefix = np.tri(STEPS) @ np.linalg.inv(correlation.matrix(steps=STEPS))
    assert correlation.error(steps=STEPS) == pytest.approx(math.sqrt((prefix**2).sum(1).mean()), rel=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 30, 2000, 10**5])
def test_one_band_has_the_error_of_independent_noise(steps: int) -> None:
    assert BandedToeplitz(bands=1).error(steps=steps) == math.sqrt((steps + 1) / 2)


@pytest.mark.parametrize("bands", [2, 3, 8])
def test_no_other_coefficients_nearby_have_a_smaller_error(bands: int) -> None:
    best, draw = BandedToeplitz(bands=bands), np.random.default_rng(bands)
    series = best.series(STEPS)[:bands]
    least = best.error(steps=STEPS)
    for size in (1e-3, 1e-2, 1e-1):
        for _ in range(20):
            other = series + size * draw.standard_normal(bands) * series
            assert BandedToeplitz(coefficients=other.tolist()).error(steps=STEPS) > least


@pytest.mark.parametrize("steps", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_coefficients_of_long_runs_are_better_than_those_of_shorter_ones(steps: int) -> None:
    """In memory for a few times the bands of numbers a step."""
    best = BandedToeplitz(bands=8)
    shorter = BandedToeplitz(coefficients=best.series(steps // 4)[:8].tolist())
    assert 0.99 * shorter.error(steps=steps) < best.error(steps=steps) < shorter.error(steps=steps)


def test_errors_fall_with_bands_and_buffers_to_that_of_the_best_toeplitz_matrix() -> None:
    banded = [BandedToeplitz(bands=bands).error(steps=200) for bands in (1, 2, 4, 8, 16, 200)]
    buffered = [BufferedToeplitz(buffers=buffers).error(steps=200) for buffers in (1, 2, 3)]
    assert banded == sorted(banded, reverse=True)
    assert buffered == sorted(buffered, reverse=True)
    assert banded[-1] < buffered[-1] < 1.02 * banded[-1]


@pytest.mark.parametrize("correlation", MATRICES, ids=repr)
@pytest.mark.parametrize("separation", [1, 4, 7, 30])
def test_no_participation_moves_more_than_the_sensitivity(correlation: Correlation, separation: int) -> None:
    """Random directions and signs, and the adversarial one that lets all columns add up."""
    matrix, draw = correlation.matrix(steps=STEPS), np.random.default_rng(separation)
    bound = correlation.sensitivity(STEPS, separation)
    per_turn = correlation.turn_sensitivity(STEPS, separation)
    reached = 0.0
    for first in range(separation):
        turns = np.arange(first, STEPS, separation)
        directions = draw.standard_normal((20, len(turns), 3))
        directions /= np.linalg.norm(directions, axis=-1, keepdims=True)
        moved = [np.linalg.norm(matrix[:, turns] @ each) for each in directions]
        moved += [np.linalg.norm(matrix[:, turns] @ signs) for signs in (np.ones(len(turns)), (-1.0) ** turns)]
        assert max(moved) <= bound * (1 + 1e-12)
        for count in range(1, len(turns) + 1):
            first_ones = np.linalg.norm(matrix[:, turns[:count]].sum(1))
            assert first_ones <= per_turn * math.sqrt(count) * (1 + 1e-12)
        reached = max(reached, *moved)
    if min(correlation.series(STEPS)) >= 0:
        assert reached == pytest.approx(bound, rel=1e-12)


@pytest.mark.parametrize("bands", [1, 2, 5])
def test_turns_that_are_bands_apart_move_as_many_rows_by_one_each(bands: int) -> None:
    """What cyclic Poisson sampling is charged for: |C d|^2 is the number of turns, whichever turns are taken."""
    matrix = BandedToeplitz(bands=bands).matrix(steps=20)
    for group in range(bands):
        turns = range(group, 20, bands)
        for taken in itertools.product([0, 1], repeat=len(turns)) if bands > 1 else [(1,) * 20]:
            chosen = [turn for turn, is_in in zip(turns, taken, strict=True) if is_in]
            assert np.linalg.norm(matrix[:, chosen].sum(1)) == pytest.approx(math.sqrt(len(chosen)), abs=1e-12)
    assert BandedToeplitz(bands=bands).turn_sensitivity(20, bands) == 1.0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"bands": 0}, ValueError, "bands must be a whole number >= 1; got 0"),
        ({"bands": 1.5}, ValueError, "bands must be a whole number >= 1"),
        ({"bands": True}, TypeError, "bands must be a whole number >= 1"),
        ({"bands": "all"}, ValueError, "bands must be a whole number >= 1, or \"auto\"; got 'all'"),
        ({"coefficients": []}, ValueError, "coefficients must be finite numbers, the first of them > 0"),
        ({"coefficients": [0.0, 1.0]}, ValueError, "coefficients must be finite numbers, the first of them > 0"),
        ({"coefficients": [1.0, math.nan]}, ValueError, "coefficients must be finite numbers"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        BandedToeplitz(**arguments)


def test_what_is_not_known_yet_is_refused_and_names_are_short() -> None:
    auto = BandedToeplitz(bands="auto")
    with pytest.raises(ValueError, match=r"chosen by a PrivacyEngine"):
        auto.matrix(steps=3)
    with pytest.raises(ValueError, match=r"^steps must be a whole number >= 1; got 0"):
        BandedToeplitz().error(steps=0)
    with pytest.raises(ValueError, match=r"^buffers must be a whole number >= 1; got 0"):
        BufferedToeplitz(buffers=0)
    assert repr(auto) == "BandedToeplitz(bands='auto')"
    assert repr(BandedToeplitz(coefficients=[1, 0.5])) == "BandedToeplitz(coefficients=[1.0, 0.5])"
    assert repr(BufferedToeplitz()) == "BufferedToeplitz(buffers=3)"
    assert BandedToeplitz() == BandedToeplitz(bands=8)
