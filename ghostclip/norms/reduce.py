"""From squared norms of parts to norms, their rounding margins, and the weights that clip them.

The rounding margin: where positions cancel, the gradient that is summed may pass the one measured. The gradient of an
example is a sum over positions, ``G = sum_t left_t (x) right_t``. Measured and summed it goes
through different kernels, in different orders, once unweighted and once weighted: both come out as G and an error of
some ``u * S`` in L2 norm, for the unit roundoff u and ``S = sum_t |left_t| |right_t|``. Where positions point in all
directions, S is about sqrt(T) times the norm and the errors don't count; but where positions cancel (constant inputs
below a normalization over positions), all that is left of G may be these errors.

How many u: a partial sum P adds an error of at most u |P|, in effect random, so that T additions leave
``u / sqrt(3) * sqrt(sum_t |P_t|^2)`` (Higham & Mary 2019, probabilistic rounding error analysis). Where everything
cancels, no partial sum is beyond S / 2, and that is at most ``sqrt(T) / 6 * u S``; kernels add up in registers some 256
positions and then those sums, which keeps it below 3 u S up to T = 65,536; positions in no particular order leave 0.4.
So each of the two is given MARGIN / 2 = 4 u, and a norm is made larger by MARGIN u S: where nothing cancels, by a share
of 5e-7 sqrt(T) in float32. The worst case of all roundings, T u S, is not covered; it takes T errors of one sign.

Of several terms the margin is MARGIN u sqrt(sum_k S_k^2), since errors of different parameters are orthogonal.

Underflow: a product of two numbers below the smallest normal number m may become zero. A sum of n such products is off
by n m at most, and by that times the other factor where it is multiplied with something large. The margin covers it:
what may be lost of a squared norm counts as a part of S^2, `hidden` for each m. That is below 1e-14 of any norm that
matters. It bounds the weight of an example whose gradient is 1e-23, where a policy divides by the norm, and that of one
whose inputs of 1e-23 meet gradients of 1e+19.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "Parts",
    "Sizes",
    "all_finite",
    "hidden",
    "hidden_in_pairs",
    "hidden_in_product",
    "margin",
    "norms",
    "rounding_margin",
]

# A sum of vectors [B], each with a factor.
Parts = Sequence[tuple[Tensor, float]]
# Of the left and the right factors of outer products: sums of squares, [B] each.
Sizes = Sequence[Tensor] | Tensor
# Errors that measuring and summing may leave together, in units of roundoff (half of eps).
MARGIN = 8.0


def norms(squared: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Norms [B] in ``dtype`` from the squared norms of at least one part, [B] or [parts, B]."""
    parts = squared[0] if len(squared) == 1 else torch.vstack(list(squared))
    return torch.atleast_2d(parts).sum(0, dtype=dtype).sqrt_()


def rounding_margin(squared: Sequence[Tensor], absolute: Parts, numbers: int) -> Tensor | float:
    """What a norm [B] is made larger by before a weight is computed from it; one number for all where that is enough.

    Args:
        squared: of every term of the norm, [B].
        absolute: `PerExampleGrads.absolute` [B] of every term that has one, in parts.
        numbers: at least as many as the terms' parameters have.
    """
    tiny = eps = 0.0
    for each in squared:
        tiny = max(tiny, torch.finfo(each.dtype).tiny)
    lost = numbers * tiny
    if not absolute:
        return math.sqrt(lost)
    whole, small, largest = list[Tensor](), list[Tensor](), 0.0
    for each, factor in absolute:
        eps = max(eps, torch.finfo(each.dtype).eps)
        if factor == 1.0:
            whole.append(each)
        else:  # the largest factor stands for all: they say what underflow hides, which is next to nothing
            small.append(each)
            largest = max(largest, factor)
    units, sums = MARGIN / 2 * eps, list[Tensor]()
    if whole:
        sums.append(torch.stack(whole).sum(0))
    if small:
        sums.append(torch.stack(small).sum(0).mul_(largest))
    return sum(sums[1:], sums[0]).add_(lost / units**2).sqrt_().mul_(units)


@functools.cache
def hidden(dtype: torch.dtype) -> float:
    """A part of `PerExampleGrads.absolute`: its margin covers one product that underflow takes from a squared norm."""
    return torch.finfo(dtype).tiny / (MARGIN / 2 * torch.finfo(dtype).eps) ** 2


def hidden_in_product(left: Tensor, lefts: int, right: Tensor, rights: int) -> Tensor:
    """What underflow may hide of ``left * right`` [B], which are sums of ``lefts`` and of ``rights`` squares."""
    unit = hidden(left.dtype)
    return torch.add(left * (rights * unit), right, alpha=lefts * unit)


def hidden_in_pairs(sizes: Sizes, widths: tuple[int, int], positions: int | Tensor) -> Tensor:
    """What underflow may hide of squared norms [B] that are formed of products of all pairs of positions, on two sides.

    An inner product of two rows of d numbers loses d of the smallest normal numbers at most. It is multiplied with one
    of the other side; these are at most ``T sum_t |row_t|^2`` together. T^2 products may be lost themselves.

    Args:
        sizes: ``sum_t |row_t|^2`` [B] of either side.
        widths: how many numbers its rows have.
        positions: T.
    """
    found = hidden_in_product(sizes[0], widths[0], sizes[1], widths[1])
    return found * positions + positions**2 * hidden(found.dtype)


def all_finite(*vectors: Tensor) -> bool:
    """Whether all numbers of vectors are finite; one look at the device.

    Sums are finite only where all that goes into them is; one that overflows costs a second look and no more.
    """
    first, *others = [vector.sum() for vector in vectors]
    return math.isfinite(sum(others, first))


@functools.cache
def margin(dtype: torch.dtype) -> float:
    """A factor just below 1 that rounding in a product of that precision can't undo."""
    return 1.0 - 8.0 * torch.finfo(dtype).eps
