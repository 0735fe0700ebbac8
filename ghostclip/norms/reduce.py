"""From squared norms of parts to norms of groups, and on to the weights that clip them."""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from ghostclip.native import affine as native

__all__ = ["all_finite", "bounded_weights", "group_norms", "margin", "norms"]


def norms(squared: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Norms [B] in ``dtype`` from the squared norms of at least one part, [B] or [parts, B]."""
    found = group_norms([squared], dtype)
    return found.view(found.shape[1])


def group_norms(squared: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> Tensor:
    """The same for several groups of parts, [groups, B]."""
    found = native.group_norms(squared, dtype)
    return torch.stack([_added_up(group, dtype) for group in squared]) if found is None else found


def _added_up(squared: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    rows = [part.to(dtype) for part in squared]
    if all(part.dim() == 1 for part in rows):
        return torch.stack(rows).sum(0).sqrt_()
    return torch.cat([part if part.dim() == 2 else part.unsqueeze(0) for part in rows]).sum(0).sqrt_()


def all_finite(*vectors: Tensor) -> bool:
    """Whether all numbers of vectors of one shape are finite; one look at the device."""
    found = native.all_finite(vectors)
    if found is not None:
        return found
    # Sums are finite only where all that goes into them is; one that overflows costs a second look and no more.
    total = vectors[0].sum()
    for vector in vectors[1:]:
        total = total + vector.sum()
    return math.isfinite(total.item())


@functools.cache
def margin(dtype: torch.dtype) -> float:
    """A factor just below 1 that rounding in a product of that precision can't undo."""
    return 1.0 - 8.0 * torch.finfo(dtype).eps


def bounded_weights(norms: Tensor, bounds: Sequence[float]) -> Tensor:
    """``min(1, bound / norm)``, a few units in the last place low; 1 for a norm of zero.

    Args:
        norms: [B], or [groups, B].
        bounds: one for each group.
    """
    limits = array("d", [bound * margin(norms.dtype) for bound in bounds])
    found = native.bounded_weights(norms, limits)
    if found is not None:
        return found
    if norms.dim() == 1:
        return (limits[0] / norms).clamp_(max=1.0)
    return torch.stack([(limit / row).clamp_(max=1.0) for limit, row in zip(limits, norms.unbind(), strict=True)])
