"""An alarm in batches whose ownership isn't measured: do their gradient norms follow marks?

In one of 16 such batches, drawn at random, the first backward starts from marks, 2 ** -15 to 1 in random order, in
place of ones, and norms are divided by them. Where every row belongs to the example that it is taken to belong to, that
changes nothing. Where rows are mixed, examples with small marks inherit from those with large ones: their norms come
out too large. So ranks of norms and marks are compared, and the largest norm with the largest that was ever measured.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ghostclip.graph.marks import MarkScheme

__all__ = ["ALARM", "CERTAIN", "SUSPICIOUS", "figures", "rings"]

ALARM = MarkScheme(levels=16, lowest=-15)
# By how many standard deviations ranks of norms and marks may be correlated by chance: once in a million honest
# batches where the batch can be tried again, and once in a billion where it is refused.
SUSPICIOUS, CERTAIN = 4.75, 6.0
# A norm this many times the largest one that was measured is suspicious.
LARGE = 16.0


def figures(norms: Tensor, marks: Tensor | None) -> Tensor:
    """What `rings` is given, [3]: the largest norm, and both sides of the correlation of ranks of norms and marks.

    Args:
        norms: [B].
        marks: [B]; None where the backward started from ones.
    """
    if marks is None:
        return torch.stack([norms.max(), *norms.new_zeros(2)])
    order = norms.argsort()
    rising = _centred_ranks(len(norms), norms.device)
    levels = marks.log2()[order].to(rising.dtype)
    levels = levels - levels.mean()
    return torch.stack([norms.max().to(rising.dtype), (rising * levels).sum(), levels.norm()])


def rings(found: Sequence[float], examples: int, largest: float, again: bool) -> bool:
    """Whether norms follow marks.

    Args:
        found: `figures`.
        examples: B.
        largest: norm of an example that was measured in a graph like this; 0 where there is none.
        again: whether the batch can be tried again; else an alarm refuses it.
    """
    top, correlated, spread = found
    if not math.isfinite(top) or not spread:  # an example that isn't finite has no rank
        return False
    deviations = -correlated / spread * math.sqrt(examples - 1)
    return deviations > (SUSPICIOUS if again else CERTAIN) or (again and 0 < LARGE * largest < top)


@functools.lru_cache(maxsize=64)
def _centred_ranks(count: int, device: torch.device) -> Tensor:
    """0 to count - 1, minus their mean, of length one."""
    ranks = torch.arange(count, dtype=torch.float32, device=device)
    ranks = ranks - ranks.mean()
    return ranks / ranks.norm().clamp(min=1e-30)
