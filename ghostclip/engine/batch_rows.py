"""A physical batch with rows taken in another way: some in the place of others, or some alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["BatchRows", "ExampleDims"]


class ExampleDims:
    """In which dimension the tensors of a training's batches hold examples: by their places in a batch.

    It is one that was as long as there were examples in every batch so far. Another than dimension 0 is believed after
    batches of two sizes only, since features may be as many as examples once.
    """

    def __init__(self) -> None:
        self._structure: Any = None
        self._dims: dict[int, set[int]] = {}
        self._sizes: set[int] = set()

    def see(self, leaves: Sequence[Any], structure: Any, rows: int) -> dict[int, list[int]]:
        """{place of a dense tensor: its dimensions that may be the examples'}, after a further batch."""
        if structure != self._structure:
            self._structure, self._dims, self._sizes = structure, {}, set()
        self._sizes.add(rows)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.dim() > 0:
                long = {dim for dim, length in enumerate(leaf.shape) if length == rows}
                self._dims[place] = self._dims.get(place, long) & long
        sure = len(self._sizes) > 1
        return {place: sorted(dims) if sure or 0 in dims else [] for place, dims in self._dims.items()}


class BatchRows:
    """The rows of a physical batch: of its tensors, in any nesting, along the examples' dimension.

    Anything else stays as it is. Where a tensor has no row for each example (a table for all, the values of ragged
    examples), whole numbers stay too: they may be lengths or places in that tensor.

    Args:
        batch: a physical batch.
        rows: how many it has.
        known: of the training.

    Attributes:
        swappable: whether there is a tensor whose rows can be put in each other's places.
        divisible: whether it holds nothing else, so that some rows are a batch by themselves.
        choices: how many dimensions may be the examples' in the tensor that has the most of them.
    """

    def __init__(self, batch: Any, rows: int, known: ExampleDims) -> None:
        self._batch = batch
        self._own_kind = isinstance(batch, MutableMapping) and not isinstance(batch, dict)
        plain = dict(batch) if self._own_kind else batch
        self._leaves, self._structure = tree_flatten(plain, is_leaf=lambda node: isinstance(node, PackedSequence))
        dims = known.see(self._leaves, self._structure, rows)
        whole = all(dims.values())
        self._dims = {p: d for p, d in dims.items() if d and (whole or self._leaves[p].is_floating_point())}
        self.swappable = bool(self._dims)
        self.choices = max([len(dims) for dims in self._dims.values()], default=0)
        others = [leaf for place, leaf in enumerate(self._leaves) if place not in self._dims]
        self.divisible = self.swappable and all(leaf is None for leaf in others)

    def taken(self, index: Tensor, choice: int = 0) -> Any:
        """The batch with the rows ``index``, along one or another of the dimensions that may be the examples'."""
        leaves = list(self._leaves)
        for place, dims in self._dims.items():
            leaf = leaves[place].detach()
            leaves[place] = leaf.index_select(dims[min(choice, len(dims) - 1)], index.to(leaf.device))
        taken = tree_unflatten(leaves, self._structure)
        if not self._own_kind:
            return taken
        assert isinstance(taken, Mapping)
        batch = copy.copy(self._batch)
        batch.update(taken)
        return batch
