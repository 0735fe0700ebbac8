"""Marks: powers of two that losses are multiplied with, and how rows of gradients are held against them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Marks", "Numbers", "compared", "numbers", "shuffled"]

# The largest entry of each row, and a random projection of it, [rows] each.
Numbers = tuple[Tensor, Tensor]


class Compared(NamedTuple):
    """Which rows do not fit their marks, which do only to within `Marks.tolerance`, and which show whose they are."""

    off: Tensor
    loose: Tensor
    clear: Tensor


@dataclass(frozen=True)
class Marks:
    """The powers of two that losses are multiplied with, and what counts as equal.

    Attributes:
        levels, lowest: marks are 2 ** lowest to 2 ** (lowest + levels - 1). All are less than ``plain``: a backward
            that normalizes what it is given returns every row as it was, as if its mark were ``plain``.
        tolerance: what share of its largest entry a row may be off, before it isn't multiplied with its mark.
        floor: rows whose largest entry is no larger show nothing. Below the smallest normal number rounding doesn't
            scale with a mark. None: by the gradient's type.
        plain: what the unmarked losses are multiplied with.
    """

    levels: int = 16
    lowest: int = -16
    tolerance: float = 2.0**-12
    floor: float | None = None
    plain: float = 1.0

    def drawn(self, losses: Tensor, sizes: Tensor | None = None) -> Tensor:
        """Marks [B]: levels spread evenly over the examples, in an order that is random and another one in each batch.

        Args:
            losses: [B].
            sizes: [n, B] or [B], of the examples' gradients. Where these differ by more than 2 ** 10, marks bring them
                to one size; else what a small example has in a row of a large one would be within `tolerance`. None:
                they differ by less.
        """
        marks = self._digit(losses, shuffled(len(losses), losses.device), 1)
        return marks if sizes is None else marks * _alike(sizes).to(marks.dtype)

    def drawn_apart(self, losses: Tensor, sizes: Tensor | None) -> Tensor:
        """As `drawn`, [n, B]; as many as tell any two examples apart, and show a small one beside a large one."""
        order, place, found = shuffled(len(losses), losses.device), 1, list[Tensor]()
        while place < len(losses):
            found.append(self._digit(losses, order, place))
            place *= self.levels
        alike = torch.ones_like(losses) if sizes is None else _alike(sizes).to(losses.dtype)
        if bool((alike != 1).any()):
            found.append(2.0 ** (2 * self.lowest + self.levels - 1) / found[0])  # what had the smallest has the largest
        return torch.stack(found) * alike

    def _digit(self, losses: Tensor, order: Tensor, place: int) -> Tensor:
        """Marks [B] by a digit of numbers [B]: the one that counts ``place``, with base `levels`."""
        level = order // place % self.levels
        if len(losses) < self.levels:
            return self.of(level * (self.levels - 1) // max(1, len(losses) - 1), losses)
        return self.of(shuffled(self.levels, losses.device)[level], losses)

    def of(self, level: Tensor, like: Tensor) -> Tensor:
        """The marks of levels, in the type of ``like``."""
        powers = [2.0 ** (self.lowest + power) for power in range(self.levels)]
        return torch.tensor(powers, dtype=like.dtype, device=level.device)[level]


# Gradients of one example that are larger than another's by more than this power of two are made alike by this one.
FARTHEST = 80.0
# Smaller ones than this power of two are left out of that, and none is made smaller than the second by it: beside marks
# they would leave float32.
SMALLEST, LOWEST = -30.0, -60.0


def _alike(sizes: Tensor) -> Tensor:
    """Powers of two [B] that make the largest sizes of all examples about that of the smallest; ones where they are."""
    sizes = sizes.double().view(-1, sizes.shape[-1])
    known = sizes.isfinite() & (sizes > 0)
    power, infinite = torch.where(known, sizes, 1.0).log2().round(), torch.full_like(sizes, math.inf)
    large, small = torch.where(known, power, -infinite).amax(0), torch.where(known, power, infinite).amin(0)
    least = torch.where(large.isfinite(), large, math.inf).amin().clamp(min=SMALLEST)
    over = torch.minimum((large - least).clamp(0.0, FARTHEST), (small - LOWEST).clamp(min=0.0))
    return torch.where(over.amax() > 10, torch.exp2(-over), 1.0)


# Drawn apart from torch's own random numbers, which must not depend on whether a batch is measured.
_dice = torch.Generator("cpu")
_dice.seed()


def shuffled(count: int, device: torch.device) -> Tensor:
    return torch.randperm(count, generator=_dice, device="cpu").to(device)


def numbers(grad: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """For each row of a gradient along one dimension its largest entry and a fixed random projection, [rows] each."""
    if grad.layout != torch.strided:
        grad = grad.to_dense()
    if grad.is_complex():
        grad = torch.view_as_real(grad.resolve_conj())
    if grad.dtype not in (torch.float32, torch.float64):
        grad = grad.float()
    rows = grad.movedim(dim, 0).flatten(1) if grad.dim() > 1 else grad.reshape(-1, 1)
    if not rows.numel():
        return rows.new_zeros(len(rows)), rows.new_zeros(len(rows))
    # Thrice as fast as the largest absolute value, and ten times as fast as the norm that is one.
    largest = torch.maximum(rows.amax(1), rows.amin(1).neg_())
    return largest, rows @ _direction(rows.shape[1], rows.dtype, rows.device)


@functools.lru_cache(maxsize=256)
def _direction(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(width)
    return torch.randn(width, generator=generator, dtype=dtype, device="cpu").to(device)


def compared(
    plain: Numbers, marked: Numbers, marks: Tensor, floor: float, way: Marks, rounding: float = 0.0
) -> Compared:
    """How rows of marked backwards fit their marks.

    A row shows nothing if it is zero in both backwards, tiny, or not finite. One that is zero in the plain backward
    only belongs to several examples, which cancel.

    Args:
        plain: [rows] each.
        marked: [rows], or [backwards, rows].
        marks: of each row, as ``marked``.
        floor: the size up to which rows show nothing.
        way: whose marks they are.
        rounding: what share of its largest entry a row may be off that one example alone has a part in.
    """
    (largest, projected), (largest_now, projected_now) = plain, marked
    ratio = marks.to(largest.dtype) / way.plain
    size = ratio * largest
    apart = torch.maximum((largest_now - size).abs_(), (projected_now - ratio * projected).abs_())
    clear = (largest > floor) & largest.isfinite() & largest_now.isfinite()
    cancelled = (largest == 0) & (largest_now > floor)
    loose = (clear & ~(apart <= rounding * size)) | cancelled
    return Compared((clear & ~(apart <= way.tolerance * size)) | cancelled, loose, clear)
