"""Noise that withstands who reads floating-point numbers to the last digit: keys of a cipher, sums on a lattice.

Each release has a key of its own from the operating system (`cipher`). It has no state: neither a fork, nor a copy, nor
the number of processes or of physical batches changes what is drawn from. It promises nothing about time: how long a
release takes depends on the numbers drawn and, slightly, on the sums. Sums on another device are brought to the CPU for
it, and back. Where several processes train together, one of them calls it on the sums of all, and passes on the result.

Let S be a clipped sum, a vector of floats, each of which is a real number. What is released of each coordinate is

    H * round((S + N) / (divisor * H)),    N normal with the standard deviation that was asked for,

where H, the step of the lattice, is a power of two made of public numbers alone. It is computed exactly: N is a real
number whose digits are revealed until they tell which multiple of H is nearest (`ziggurat`). So the output's law is
that of a real Gaussian mechanism on S followed by a rounding that knows nothing of S. A function of a release costs no
privacy: every bound for the Gaussian mechanism (PLD, RDP, with or without sampling) holds for the output as it stands,
without a term for the rounding, for the number of coordinates, or for how coarse H is; and the output's low digits say
nothing that the law does not (Mironov 2012; Haney et al. 2022; Holohan and Braghin 2021). A discrete Gaussian
(Canonne, Kamath and Steinke 2020) would need S rounded first, which raises its sensitivity by up to H sqrt(dimension).

What is not exact: noise ends at 13 standard deviations (probability 2^-125 a number), and the words come from a cipher.
What is not covered: S is a sum that floating point rounded, so that an example's presence may move it by more than the
sum of its own parts by rounding (Casacuberta et al. 2022); and how long it takes, which depends on the numbers.

A coordinate beyond 2^40 steps, which is above 2^31 standard deviations, counts as 2^40 steps; that brings neighbours
no further apart. One that is not a number, which clipped sums have none of, counts as zero.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from ghostclip.native import library
from ghostclip.noise.cipher import CipherGenerator, KeyStream
from ghostclip.noise.release import Noise, check_release, flat, on_flat
from ghostclip.noise.ziggurat import DIGITS, LAYER_BITS, LAYERS, ziggurat

__all__ = ["FINENESS", "HardenedNoise", "Lattice"]

# The step is 2^-8 to 2^-9 of the noise: it adds a millionth of its variance, and float32 holds 2^15 times the noise.
FINENESS = 8
LIMIT = 2.0**40
# Released noise outside of it would come near the ends of float64, where numbers are rounded to zero or infinity.
LEAST, MOST = 2.0**-900, 2.0**900
# Coordinates worked on together, so that their words stay in the cache.
CHUNK = 1 << 16
# Digits in float64, and those that are drawn at once where they don't settle it.
ENOUGH, MORE = 52, 128


class HardenedNoise(Noise):
    """Gaussian noise, fresh at each release, that leaves its sums on a lattice."""

    mode = "hardened"
    private = True

    def __init__(self) -> None:
        self.draws = 0

    def generator_on(self, device: torch.device) -> str:
        """See `Noise.generator_on`."""
        return "AES-256, a cipher, in OpenSSL, with a key of its own for each step"

    @torch.no_grad()
    def release(self, sums: Sequence[Tensor], std: float, divisor: float = 1.0) -> list[Tensor]:
        """See `Noise.release`; rounded exactly to multiples of a power of two, but for a ``std`` of 0."""
        check_release(sums, std, divisor)
        if std == 0:
            return [tensor / divisor for tensor in sums]
        lattice, stream = Lattice(std, divisor), KeyStream()
        self.draws += 1

        def released(some: list[Tensor]) -> Tensor:
            found = lattice.release(flat(some).cpu().numpy(), stream)
            return torch.from_numpy(found).to(some[0].device)

        return on_flat(sums, released)

    def generator(self, key: bytes | None = None) -> CipherGenerator:
        """See `Noise.generator`; from the same cipher."""
        return CipherGenerator(key)


class Lattice:
    """Where the numbers of one release lie, and how they get there.

    Args:
        std: standard deviation of the noise in a sum, finite and > 0; it is met or exceeded by at most 2^-49 of it.
        divisor: what the noisy sums are divided by, > 0.
        fineness: the step is the largest power of two that is at most 2^-fineness of ``std / divisor``.

    Attributes:
        step: every released number is a multiple of it.
        spread: standard deviation of the noise, in steps.

    Raises:
        ValueError: ``std / divisor`` is too small or too large to be computed with.
    """

    def __init__(self, std: float, divisor: float, fineness: int = FINENESS) -> None:
        released = std / divisor * (1 + 2.0**-50)
        if not LEAST < released < MOST:
            raise ValueError(
                f"the noise's standard deviation over the batch size must be between {LEAST:.3g} and {MOST:.3g} for "
                f"hardened noise; got {std!r} / {divisor!r}"
            )
        self.step = math.ldexp(1.0, math.frexp(released)[1] - 1 - fineness)
        self.spread = released / self.step
        self._divisor, self._scale = divisor, 1.0 / divisor / self.step
        self._layers = ziggurat()
        self._widths = self._layers.widths * self.spread

    def release(self, sums: np.ndarray, stream: KeyStream) -> np.ndarray:
        """The noisy sums over the divisor, rounded to the lattice.

        Args:
            sums: [n], float32 or float64, contiguous.
            stream: random words.

        Returns:
            [n], of the same type; float32 beyond 2^24 steps is rounded again, to a multiple of more than one step.
        """
        out = np.empty_like(sums)
        left, words = [np.empty(0, np.intp)], [np.empty(0, np.uint32)]
        for start in range(0, len(sums), CHUNK):
            fresh = stream.words32(min(CHUNK, len(sums) - start))
            found = self._look(sums[start : start + CHUNK], out[start : start + CHUNK], fresh)
            left.append(found + start)
            words.append(fresh[found])
        rest = np.concatenate(left)
        out[rest] = self.step * self._settle(sums[rest], np.concatenate(words), stream)
        return out

    def _look(self, sums: np.ndarray, out: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Fills what the first digits settle, in C; returns the indices of the rest: all without a compiler."""
        real = "float" if sums.dtype == np.float32 else "double"
        compiled = library("lattice", real)
        if compiled is None:
            return np.arange(len(sums))
        look = compiled[f"ghostclip_lattice_{real}"]
        look.restype = ctypes.c_int64
        left = np.empty(len(sums) + 1, np.int64)
        arrays = [ctypes.c_void_p(array.ctypes.data) for array in (sums, out, left, words, self._layers.table)]
        numbers = [ctypes.c_double(number) for number in (self._scale, self.step, LIMIT, self.spread)]
        return left[: look(*arrays, ctypes.c_int64(len(sums)), *numbers)]

    def _settle(self, sums: np.ndarray, words: np.ndarray, stream: KeyStream) -> np.ndarray:
        """The multiples [n] of the step, by more digits, and fresh words for points that are not under the curve."""
        found, waiting = np.empty(len(sums)), np.arange(len(sums))
        with np.errstate(over="ignore"):
            targets = np.nan_to_num(sums.astype(np.float64) * self._scale, nan=0.0).clip(-LIMIT, LIMIT)
        while len(waiting):
            layers, signs = (words & (LAYERS - 1)).astype(np.intp), np.where(words & LAYERS, -1.0, 1.0)
            digits = (words >> (LAYER_BITS + 1)).astype(np.uint64) << np.uint64(ENOUGH - DIGITS)
            digits |= stream.words64(len(words)) >> np.uint64(64 - ENOUGH + DIGITS)
            shares = (digits.astype(np.float64) + 0.5) * 2.0**-ENOUGH
            accepted, doubtful, heights = self._layers.under(layers, shares, stream)
            noisy = targets[waiting] + signs * self._widths[layers] * shares
            whole = np.rint(noisy)
            error = (np.abs(targets[waiting]) + self._widths[layers]) * 2.0**-50
            doubtful |= accepted & ~(np.abs(np.abs(noisy - whole) - 0.5) > error)
            for index in np.flatnonzero(doubtful):
                point = int(layers[index]), int(digits[index]), int(heights[index])
                answer = self._exactly(float(sums[waiting[index]]), float(signs[index]), point, stream)
                accepted[index] = answer is not None
                whole[index] = 0 if answer is None else answer
            found[waiting[accepted]] = whole[accepted]
            waiting = waiting[~accepted]
            words = stream.words32(len(waiting))
        return found

    def _exactly(self, total: float, sign: float, point: tuple[int, int, int], stream: KeyStream) -> int | None:
        """The multiple of the step by 180 digits; None when the point (layer, digits, height's) is not under f."""
        layer, digits, height = point
        more = [int.from_bytes(stream.words64(MORE // 64).tobytes(), "little") for _ in range(2)]
        x = Fraction(self._layers.widths[layer]) * Fraction((digits << MORE) + more[0], 1 << (ENOUGH + MORE))
        if not self._layers.certainly_under(layer, x, Fraction((height << MORE) + more[1], 1 << (53 + MORE))):
            return None
        limit, sum_ = Fraction(LIMIT), Fraction(float(np.nan_to_num(total, nan=0.0)))
        target = min(max(sum_ / Fraction(self._divisor) / Fraction(self.step), -limit), limit)
        return math.floor(target + Fraction(sign) * Fraction(self.spread) * x + Fraction(1, 2))
