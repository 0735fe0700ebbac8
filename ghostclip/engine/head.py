"""The first examples of a large batch, on which the self-check compares gradients without holding the whole graph."""

from __future__ import annotations

from typing import Any

from torch.utils._pytree import tree_unflatten

from ghostclip.clipper.replay import leaves_of

__all__ = ["head_of_large"]

# Examples of the smallest batch that counts as large, and bytes of its tensors.
LEAST, LEAST_DATA = 64, 1 << 16


def head_of_large(batch: Any, count: int) -> Any | None:
    """The first ``count`` examples of a batch so large that its graph may matter in memory; None of another."""
    found = leaves_of(batch)
    if found is None or found[2] < LEAST or sum([leaf.nbytes for leaf in found[0]]) < LEAST_DATA:
        return None
    leaves, structure, _ = found
    return tree_unflatten([leaf[:count] for leaf in leaves], structure)
