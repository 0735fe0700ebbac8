"""Marks: powers of two that losses are multiplied with, and how rows of gradients are held against them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["MarkScheme", "codes", "compared", "numbers", "numbers_by_dim"]

# An example's gradients are divided by their size over the smallest example's, at most by 2 ** FARTHEST: those of sizes
# 2 ** 40, 1 and 2 ** 3 by 2 ** 40, 1 and 2 ** 3.
FARTHEST = 80.0
# Sizes below 2 ** SMALLEST count as that, and no gradient is divided to below 2 ** LOWEST: times a mark it would leave
# float32.
SMALLEST, LOWEST = -30.0, -60.0
# The power of two by which one example is made large where somebody's own code runs in the backward.
ODD_POWER = 40
# The longest direction that is remembered; a longer one is drawn again, 4 ns an entry.
REMEMBERED = 1 << 22

# Drawn apart from torch's own random numbers, which must not depend on whether a batch is measured.
_dice = torch.Generator("cpu")
_dice.seed()


@dataclass(frozen=True)
class MarkScheme:
    """The powers of two that losses are multiplied with, and what counts as equal.

    Attributes:
        levels, lowest: marks are 2 ** lowest to 2 ** (lowest + levels - 1). Where ownership is measured all are less
            than ``plain``: a backward that normalizes what it is given returns every row as it was, as if its mark were
            ``plain``.
        tolerance: a row whose error, relative to its largest entry, is above it doesn't fit its mark.
        rounding: the largest such error of a row in which one example alone has a part.
        floor: rows whose largest entry is no larger show nothing. None: a large multiple of the smallest normal number,
            below which rounding doesn't scale with a mark.
        plain: what the unmarked losses are multiplied with.
    """

    levels: int = 16
    lowest: int = -16
    tolerance: float = 2.0**-12
    rounding: float = 0.0
    floor: float | None = None
    plain: float = 1.0

    @classmethod
    def of_batch(cls, examples: int) -> MarkScheme:
        """Those with 32 levels where these save a backward, as for 20 examples; else those with 16.

        Beside small marks, more of what extreme inputs make on the way leaves float32. Where all levels come equally
        often, as for 16 examples, the mean of all marks would be one of them, and a row of which all examples have the
        same part would look like that example's: then there are eight levels more.
        """
        levels = 32 if 16 < examples <= 32 or 256 < examples <= 1024 else 16
        levels += 8 if examples in (levels, levels**2, levels**3) else 0
        return cls(levels, -levels)

    @classmethod
    def of_half(cls, largest: float, dtype: torch.dtype) -> MarkScheme:
        """Those for float16, which has few powers of two: gradients are brought near 2 ** 8 first.

        Four levels: a row of 2 ** -8, the floor, times the least mark is 2 ** -12. Beside 2 ** -16, of eight levels,
        float16's least step of 2 ** -24 is as much as the tolerance, and 41 of 1,440 batches with one large example
        were laid out wrong.

        Args:
            largest: entry of the gradients, where the losses are multiplied with one.
            dtype: of the losses.
        """
        most = math.frexp(torch.finfo(dtype).max)[1] - 1
        power = min(8 - math.frexp(largest)[1], most) if largest else 0
        return cls(4, power - 4, 2.0**-7, 2.0**-7, 2.0**-8, 2.0**power)

    def lowered(self) -> MarkScheme:
        """The same below by 2 ** 4, where something between the losses and the layers left float16."""
        return replace(self, lowest=self.lowest - 4, plain=self.plain / 16)

    def drawn(self, losses: Tensor, sizes: Tensor | None = None) -> Tensor:
        """Marks [B]: levels spread evenly over the examples, in an order that is random and another one in each batch.

        Args:
            losses: [B].
            sizes: [n, B] or [B], of the examples' gradients. Where these differ by more than 2 ** 10, marks bring them
                to one size; else what a small example has in a row of a large one would be within `tolerance`. None:
                they differ by less, or aren't known.
        """
        marks = next(self._digits(losses))
        return marks if sizes is None else marks * _alike(sizes).to(marks.dtype)

    def drawn_apart(self, losses: Tensor, sizes: Tensor | None = None) -> Tensor:
        """As `drawn`, [n, B]; as many as tell any two examples apart, and show a small one beside a large one."""
        found = list(self._digits(losses))
        alike = torch.ones_like(losses) if sizes is None else _alike(sizes).to(losses.dtype)
        if bool((alike != 1).any()):
            found.append(2.0 ** (2 * self.lowest + self.levels - 1) / found[0])  # what had the smallest has the largest
        return torch.stack(found) * alike

    def starts_with_one_odd(self, losses: Tensor) -> Tensor:
        """Starts [n, B] of backwards in which one example is NaN, infinite or large; all others have ``plain``.

        In float16 none is large but finite, since gradients overflow.
        """
        odd = [math.nan, math.inf, 2.0**ODD_POWER][: 3 if self.floor is None else 2]
        starts = torch.full((len(odd), len(losses)), self.plain, dtype=losses.dtype, device=losses.device)
        starts[:, int(torch.randint(len(losses), (), generator=_dice, device="cpu"))] = starts.new_tensor(odd)
        return starts

    def _digits(self, losses: Tensor) -> Iterator[Tensor]:
        """Marks [B] by the digits of numbers that the examples are given at random, spread over all levels."""
        count, place = len(losses), 1
        number = torch.randperm(count, generator=_dice, device="cpu").to(losses.device)
        powers = [2.0 ** (self.lowest + power) for power in range(self.levels)]
        marks = torch.tensor(powers, dtype=losses.dtype, device=losses.device)
        while place == 1 or place < count:
            largest_digit = min(self.levels - 1, (count - 1) // place)
            yield marks[number // place % self.levels * (self.levels - 1) // max(1, largest_digit)]
            place *= self.levels


def _alike(sizes: Tensor) -> Tensor:
    """Powers of two [B] that bring all examples to the size of the smallest; ones where none exceeds 2 ** 10."""
    sizes = sizes.double().view(-1, sizes.shape[-1])
    known = sizes.isfinite() & (sizes > 0)
    power, infinite = torch.where(known, sizes, 1.0).log2().round(), torch.full_like(sizes, math.inf)
    large, small = torch.where(known, power, -infinite).amax(0), torch.where(known, power, infinite).amin(0)
    least = torch.where(large.isfinite(), large, math.inf).amin().clamp(min=SMALLEST)
    over = torch.minimum((large - least).clamp(0.0, FARTHEST), (small - LOWEST).clamp(min=0.0))
    return torch.where(over.amax() > 10, torch.exp2(-over), 1.0)


def numbers(grad: Tensor, dim: int) -> Tensor:
    """[2, rows]: the largest magnitude in each row along one dimension, and the row's product with a fixed vector."""
    rows = _real(grad).movedim(dim, 0)
    return _of_first(rows, rows, rows)


def numbers_by_dim(grad: Tensor) -> list[Tensor]:
    """`numbers` of rows along each dimension, by other projections; faster than for one dimension after another."""
    high = low = along = _real(grad)
    found = [_of_first(high, low, along)]
    for size in high.shape[:-1] if high.numel() else ():
        high, low = high.amax(0), low.amin(0)
        along = (_direction(size, along.dtype, along.device) @ along.reshape(size, -1)).view(high.shape)
        found.append(_of_first(high, low, along))
    return found if high.numel() else [high.new_zeros(2, size) for size in high.shape]


def _real(grad: Tensor) -> Tensor:
    """A gradient of at least one dimension, float32 or float64; complex numbers are two in the last dimension."""
    if grad.layout != torch.strided:
        grad = grad.to_dense()
    if grad.is_complex():
        grad = torch.view_as_real(grad.resolve_conj())
    grad = grad if grad.dim() else grad.reshape(1)
    return grad if grad.dtype in (torch.float32, torch.float64) else grad.float()


def _of_first(high: Tensor, low: Tensor, along: Tensor) -> Tensor:
    """`numbers` of rows along the first dimension, of which largest and smallest entries and a projection are given."""
    rows = high.shape[0]
    if not high.numel():
        return high.new_zeros(2, rows)
    given = high, low, along
    high, low, along = [given[0].reshape(rows, -1)] * 3 if low is high else [each.reshape(rows, -1) for each in given]
    # The larger of max and -min takes a third of the time of abs().max(), and a tenth of that of norm(inf).
    largest = torch.maximum(high.amax(1), low.amin(1).neg_())
    return torch.stack([largest, along @ _direction(along.shape[1], along.dtype, along.device)])


def _direction(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A fixed random vector; of logits [B, T, vocabulary] it takes hundreds of megabytes, and isn't kept."""
    return (_remembered if width <= REMEMBERED else _drawn)(width, dtype, device)


def _drawn(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(width)
    return torch.randn(width, generator=generator, dtype=dtype, device="cpu").to(device)


_remembered = functools.lru_cache(maxsize=256)(_drawn)


class Compared(NamedTuple):
    """Of each row: whether it is off by more than the scheme's ``tolerance``, or ``rounding``; and is comparable."""

    off: Tensor
    loose: Tensor
    clear: Tensor


def compared(plain: Tensor, marked: Tensor, marks: Tensor, scheme: MarkScheme) -> Compared:
    """How rows of marked backwards fit their marks.

    A row shows nothing if it is zero in both backwards, tiny, or not finite. One that is zero in the plain backward
    only belongs to several examples, which cancel.

    Args:
        plain: `numbers` [..., 2, rows] of a plain backward.
        marked: those of a marked one, or of several, [backwards, ..., 2, rows].
        marks: of each row, [rows] or [backwards, ..., rows].
        scheme: whose marks they are.
    """
    ratio = marks.to(plain.dtype) / scheme.plain
    apart = (marked - ratio.unsqueeze(-2) * plain).abs_().amax(-2)
    largest, largest_now = plain[..., 0, :], marked[..., 0, :]
    floor = torch.finfo(plain.dtype).tiny * 2.0**60 if scheme.floor is None else scheme.floor
    clear = (largest > floor) & largest.isfinite() & largest_now.isfinite()
    cancelled = (largest == 0) & (largest_now > floor)
    size = ratio * largest
    loose = (clear & ~(apart <= scheme.rounding * size)) | cancelled
    return Compared((clear & ~(apart <= scheme.tolerance * size)) | cancelled, loose, clear)


def codes(ratios: Tensor) -> Tensor:
    """One number for the powers of two that are nearest to some ratios, [n, ...]; [...].

    Seven powers up to 2 ** 255 fit into 63 bits, or ten up to 2 ** 31: float16, whose marks are within 2 ** 4, takes
    eight and more for over 4,096 examples.
    """
    most = 255 if len(ratios) < 8 else 31
    power = ratios.double().log2().round().nan_to_num(0, 0, 0).clamp(-most, most).to(torch.int64) + most
    code = torch.zeros_like(power[0])
    for each in power:
        code = code * (2 * most + 1) + each
    return code
