"""Room for rounding in squared norms: where positions cancel, what is summed may be larger than what was measured.

The gradient of an example is a sum over positions, ``G = sum_t left_t (x) right_t``. Measured and summed it goes
through different kernels, in different orders, once unweighted and once weighted: both come out as G and an error of
some ``u * S`` in L2 norm, for the unit roundoff u and ``S = sum_t |left_t| |right_t|``. Where positions point in all
directions, S is about sqrt(T) times the norm and the errors don't count; but where positions cancel (constant inputs
below a normalization over positions), all that is left of G may be these errors.

How many u: a partial sum P adds an error of at most u |P|, in effect random, so that T additions leave
``u / sqrt(3) * sqrt(sum_t |P_t|^2)`` (Higham & Mary 2019, probabilistic rounding error analysis). Where everything
cancels, no partial sum is beyond S / 2, and that is at most ``sqrt(T) / 6 * u S``; kernels add up in registers some 256
positions and then those sums, which keeps it below 3 u S up to T = 65,536; positions in no particular order leave 0.4.
So each of the two is given ROOM / 2 = 4 u, and a norm is made larger by ROOM u S: where nothing cancels, by a share of
5e-7 sqrt(T) in float32. The worst case of all roundings, T u S, has no room; it takes T errors of one sign.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dense import squared_norms

__all__ = ["product_of_sizes", "squared_sizes", "with_room"]

# Errors that measuring and summing may leave together, in units of roundoff (half of eps).
ROOM = 8.0


def product_of_sizes(left: Tensor, right: Tensor) -> Tensor:
    """``|left[i]|^2 |right[i]|^2`` [B] over all other axes: at least S^2, by Cauchy and Schwarz."""
    return squared_sizes(left) * squared_sizes(right)


def squared_sizes(side: Tensor) -> Tensor:
    """``|side[i]|^2`` [B] over all other axes, read as they lie in memory."""
    if side.dim() == 3 and not side.is_contiguous() and side.transpose(0, 1).is_contiguous():
        rows = squared_norms(side.transpose(0, 1).flatten(0, 1))
        return rows.view(side.shape[1], side.shape[0]).sum(0)
    return squared_norms(side)


def with_room(squared: Sequence[Tensor], absolute: Sequence[Tensor]) -> Tensor:
    """Squared norms of several terms, each [B], with room for rounding, [terms, B].

    Args:
        squared: as they were measured.
        absolute: `Term.absolute` of the same terms.
    """
    room = ROOM / 2 * max(torch.finfo(each.dtype).eps for each in squared)
    return torch.stack(list(squared)).sqrt_().add_(torch.stack(list(absolute)).sqrt_(), alpha=room).square_()
