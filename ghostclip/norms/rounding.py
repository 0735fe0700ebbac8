"""The rounding margin of norms: where positions cancel, the gradient that is summed may pass the one measured.

The gradient of an example is a sum over positions, ``G = sum_t left_t (x) right_t``. Measured and summed it goes
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

from collections.abc import Sequence

import torch
from torch import Tensor

from .term import squared_norms

__all__ = ["product_of_sizes", "rounding_margin", "squared_sizes"]

# Errors that measuring and summing may leave together, in units of roundoff (half of eps).
MARGIN = 8.0


def product_of_sizes(left: Tensor, right: Tensor) -> Tensor:
    """``|left[i]|^2 |right[i]|^2`` [B] over all other axes: at least S^2, by Cauchy and Schwarz."""
    return squared_sizes(left) * squared_sizes(right)


def squared_sizes(side: Tensor) -> Tensor:
    """``|side[i]|^2`` [B] over all other axes, read as they lie in memory."""
    if side.dim() == 3 and not side.is_contiguous() and side.transpose(0, 1).is_contiguous():
        rows = squared_norms(side.transpose(0, 1).flatten(0, 1))
        return rows.view(side.shape[1], side.shape[0]).sum(0)
    return squared_norms(side)


def rounding_margin(absolute: Sequence[Tensor]) -> Tensor:
    """What a norm [B] is made larger by before a weight is computed from it.

    Args:
        absolute: `PerExampleGrads.absolute` [B] of every term of the norm that has one; at least one.
    """
    eps = max(torch.finfo(each.dtype).eps for each in absolute)
    total = absolute[0] if len(absolute) == 1 else torch.stack(list(absolute)).sum(0)
    return total.sqrt().mul_(MARGIN / 2 * eps)
