"""The ziggurat under the lattice's noise: its layers cover the curve, and doubts are settled by sixty digits."""

import bisect
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ghostclip.noise.cipher import KeyStream
from ghostclip.noise.hardened import ENOUGH
from ghostclip.noise.ziggurat import DIGITS, LAYERS, PRECISION, REACH, ziggurat


def test_the_layers_cover_the_curve_and_no_more_is_taken_for_inside() -> None:
    layers, floors = ziggurat(), ziggurat().exact_floors
    assert floors[-1] >= 1 > floors[-2]
    assert np.all(np.diff(layers.widths) < 0)
    for layer in range(LAYERS):
        width = Decimal(layers.widths[layer])
        if layer:
            assert (-width * width / 2).exp() <= floors[layer]
        inside = width * Decimal(layers.inside[layer])
        assert layers.inside[layer] == 0 or (-inside * inside / 2).exp() >= floors[layer + 1]
        assert Fraction(int(layers.table["inside"][layer]), 1 << DIGITS) <= Fraction(layers.inside[layer])
        assert Decimal(float(layers.table["width"][layer])) == width
        assert layers.floors[layer] == float(floors[layer])
    assert 2 * stats.norm.sf(REACH) < 2.0**-125


class Fixed(KeyStream):
    """A stream of words that are given."""

    def __init__(self, words: list[int]) -> None:
        self._given = np.array(words, np.uint64)

    def words(self, count: int) -> np.ndarray:
        found, self._given = self._given[:count], self._given[count:]
        return found


@settings(max_examples=100, deadline=None)
@given(layer=st.integers(0, LAYERS - 1), digits=st.integers(0, 2**ENOUGH - 1), word=st.integers(0, 2**64 - 1))
def test_float64_says_what_sixty_digits_say_or_doubts(layer: int, digits: int, word: int) -> None:
    shares = np.array([(digits + 0.5) * 2.0**-ENOUGH])
    accepted, doubtful, heights = ziggurat().under(np.array([layer]), shares, Fixed([word]))
    x = Fraction(float(ziggurat().widths[layer])) * Fraction(2 * digits + 1, 1 << (ENOUGH + 1))
    height = Fraction(2 * int(heights[0]) + 1, 1 << 54)
    assert bool(doubtful[0]) or accepted[0] == ziggurat().certainly_under(layer, x, height)


@pytest.mark.parametrize("nearness", ["-1e-12", "1e-12", "-1e-18", "1e-18", "-1e-30", "1e-30"])
def test_points_next_to_the_curve_are_told_apart(nearness: str) -> None:
    # Heights just above and below the curve, most of which float64 can't tell from it.
    with localcontext(PRECISION):
        x, floors = Decimal(13) / 8, ziggurat().exact_floors
        curve = (-x * x / 2).exp()
        layer = bisect.bisect_right(floors, curve) - 1
        share = (curve - floors[layer]) / (floors[layer + 1] - floors[layer]) + Decimal(nearness)
    assert ziggurat().certainly_under(layer, Fraction(x), Fraction(share)) == nearness.startswith("-")
