"""The tensors of a batch, however nested, and how many examples it has."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

__all__ = ["leaves_of"]


def leaves_of(batch: Any) -> tuple[list[Tensor], Any, int] | None:
    """(tensors, structure, number of examples) of a batch; None unless all leaves are tensors with B in dimension 0."""
    if type(batch) in (tuple, list) and all(isinstance(part, Tensor) for part in batch):
        leaves, structure = list(batch), _flat_structure(isinstance(batch, tuple), len(batch))
    else:
        leaves, structure = tree_flatten(batch)
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        return None
    examples = {leaf.shape[0] for leaf in leaves}
    return (leaves, structure, examples.pop()) if len(examples) == 1 else None


@functools.cache
def _flat_structure(is_tuple: bool, count: int) -> Any:
    """What `tree_flatten` says of so many tensors in a tuple or a list; as a rule that is what a batch is."""
    return tree_flatten((tuple if is_tuple else list)(range(count)))[1]
