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
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["all_finite", "margin", "norms", "rounding_margin"]

# Errors that measuring and summing may leave together, in units of roundoff (half of eps).
MARGIN = 8.0


def norms(squared: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Norms [B] in ``dtype`` from the squared norms of at least one part, [B] or [parts, B]."""
    parts = squared[0] if len(squared) == 1 else torch.vstack(list(squared))
    return torch.atleast_2d(parts).sum(0, dtype=dtype).sqrt_()


def rounding_margin(absolute: Sequence[Tensor]) -> Tensor:
    """What a norm [B] is made larger by before a weight is computed from it.

    Args:
        absolute: `PerExampleGrads.absolute` [B] of every term of the norm that has one; at least one.
    """
    eps = max([torch.finfo(each.dtype).eps for each in absolute])
    return torch.stack(list(absolute)).sum(0).sqrt_().mul_(MARGIN / 2 * eps)


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
