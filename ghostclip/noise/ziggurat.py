"""Exact samples of the normal distribution, by a ziggurat whose random digits are revealed only as far as needed.

What is under f(x) = exp(-x^2 / 2), x >= 0, is covered by 1024 horizontal layers of one area (Marsaglia and Tsang 2000):
layer i reaches from x = 0 to its width w_i, and from its floor Y_i up by its height A / w_i, where A is the area and
Y_i the sum of the heights below. A point drawn uniformly in a layer drawn uniformly is uniform in their union, and
those under f have a normal x. Three things make that exact rather than approximate:

- The widths are float32 numbers, and *by definition* exact; the heights are A / w_i as real numbers. The widths are a
  little larger than they must be, so that the layers certainly cover what is under f.
- x = w_i U is not a float but a real number, whose first binary digits are known; further ones are drawn when a
  decision needs them ("interval refining", Haney et al. 2022). Decisions are made in float64 with a bound on its
  error, and where that is not enough (for usual sums less than once in 2^32 times) with 60 decimal digits.
- The one approximation is the lowest layer's end at 13 standard deviations: what lies beyond has probability 2^-125.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from itertools import accumulate

import numpy as np

from ghostclip.noise.cipher import KeyStream

__all__ = ["DIGITS", "LAYERS", "LAYER_BITS", "REACH", "Ziggurat", "ziggurat"]

# What a random word of 32 bits holds, as lattice.c has it too: a layer, a sign, and digits of a share of its width.
LAYER_BITS, DIGITS = 10, 21
LAYERS = 1 << LAYER_BITS
REACH = 13.0
# Widths are about this much too large, and what is taken for inside of f that much too small: far above rounding.
WIDER, NARROWER = 1 + 2.0**-23, 1 - 2.0**-20
# Bounds the error in float64 of a point's height minus f there, both at most 1, which is below 2^-49.
DOUBT = 2.0**-45
PRECISION = Context(prec=60)


@dataclass(frozen=True)
class Ziggurat:
    """The layers, from the lowest to the highest.

    Attributes:
        widths: [1024], exact.
        exact_floors: [1025], the top included, to 60 digits.
        floors, heights: [1024], rounded to the nearest float64.
        inside: [1024], the share of each width that is certainly under f at all of the layer's heights.
        table: [1024], what lattice.c reads of them: the width, and the first digits below which all is inside.
    """

    widths: np.ndarray
    exact_floors: list[Decimal]
    floors: np.ndarray
    heights: np.ndarray
    inside: np.ndarray
    table: np.ndarray

    def under(self, layers: np.ndarray, shares: np.ndarray, stream: KeyStream) -> tuple[np.ndarray, ...]:
        """Which points are under f, at heights drawn from ``stream``.

        Args:
            layers: [n], of the points.
            shares: [n], their x over the layer's width, to 2^-52.
            stream: gives a word for each point whose height matters.

        Returns:
            Whether each is under f [n], whether that is in doubt [n], and the first 53 digits of the heights [n].
        """
        accepted = shares < self.inside[layers]
        doubtful = np.zeros(len(layers), bool)
        digits = np.zeros(len(layers), np.uint64)
        rest = np.flatnonzero(~accepted)
        digits[rest] = stream.words64(len(rest)) >> np.uint64(11)
        layers = layers[rest]
        heights = self.floors[layers] + (digits[rest].astype(np.float64) + 0.5) * 2.0**-53 * self.heights[layers]
        curve = np.exp(-0.5 * np.square(self.widths[layers] * shares[rest]))
        accepted[rest] = heights < curve
        doubtful[rest] = np.abs(heights - curve) < DOUBT
        return accepted, doubtful, digits

    def certainly_under(self, layer: int, x: Fraction, height: Fraction) -> bool:
        """Whether the point ``x`` of a layer, at that share of its height, is under f; to 60 digits."""
        with localcontext(PRECISION):
            floors = self.exact_floors
            above = floors[layer] + _decimal(height) * (floors[layer + 1] - floors[layer])
            return above < (-_decimal(x * x) / 2).exp()


@functools.cache
def ziggurat() -> Ziggurat:
    """The layers, with the least area that lets 1024 of them reach up to f(0) = 1."""
    low = math.sqrt(math.pi / 2) / LAYERS
    high = 1.2 * low
    while high - low > 2.0**-20 * low:
        area = (low + high) / 2
        low, high = (low, area) if _stack(area) is not None else (area, high)
    widths = _stack(high)
    assert widths is not None
    wide = np.array(widths)
    inside = np.append(wide[1:] / wide[:-1] * NARROWER, 0.0)
    table = np.empty(LAYERS, [("width", np.float32), ("inside", np.uint32)])
    table["width"], table["inside"] = wide, np.floor(inside * 2**DIGITS)
    with localcontext(PRECISION):
        exact = list(accumulate((Decimal(high) / Decimal(width) for width in widths), initial=Decimal(0)))
    floors = np.array([float(floor) for floor in exact[:-1]])
    return Ziggurat(wide, exact, floors, high / wide, inside, table)


def _stack(area: float) -> tuple[float, ...] | None:
    """Widths of the layers of that area, the last ones repeated above the top; None when they don't reach the top."""
    widths, floor = [REACH], 0.0
    for _ in range(LAYERS - 1):
        floor += area / widths[-1]
        higher = math.sqrt(-2 * math.log(floor)) * WIDER if floor < 1 else widths[-1]
        widths.append(float(np.float32(higher)))
    return tuple(widths) if floor + area / widths[-1] > 1 else None


def _decimal(number: Fraction) -> Decimal:
    """To the digits of the context."""
    return Decimal(number.numerator) / Decimal(number.denominator)
