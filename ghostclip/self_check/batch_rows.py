"""A physical batch in which some rows stand in the place of others, or of which some rows are taken alone."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["BatchRows", "ExampleDims", "RaggedBatchRows"]


class ExampleDims:
    """In which dimension the tensors of a training's batches hold examples: by their places in a batch.

    It is one that was as long as there were examples in every batch so far. Unless that is dimension 0 of all tensors,
    batches of two sizes are waited for, since features may be as many as examples once. Batches of now more and now
    fewer tensors (a list with one for each example) have none.
    """

    def __init__(self) -> None:
        self._dims: list[set[int]] | None = None
        self._sizes: set[int] = set()

    def see(self, tensors: Sequence[Tensor], rows: int) -> list[list[int]]:
        """The dimensions that may be the examples', for each tensor, after a further batch."""
        self._sizes.add(rows)
        long = [{dim for dim, length in enumerate(tensor.shape) if length == rows} for tensor in tensors]
        before = long if self._dims is None else self._dims
        alike = len(before) == len(long)
        self._dims = [one & other for one, other in zip(before, long, strict=True)] if alike else []
        if not alike or (len(self._sizes) < 2 and not all(0 in dims for dims in self._dims)):
            return [[] for _ in tensors]
        return [sorted(dims) for dims in self._dims]


class BatchRows:
    """The rows of a physical batch: of its tensors, in any nesting, along the examples' dimension.

    Anything else stays as it is. Where a tensor has no row for each example (a table for all, the values of ragged
    examples), whole numbers stay too: they may be lengths or places in that tensor.

    Args:
        batch: a physical batch.
        rows: how many it has.
        known: of the training.

    Attributes:
        rows: as given.
        swappable: whether there is a tensor whose rows can be put in each other's places.
        divisible: whether it holds nothing else, so that some rows are a batch by themselves.
        choices: how many dimensions may be the examples' in the tensor that has the most of them.
    """

    def __init__(self, batch: Any, rows: int, known: ExampleDims) -> None:
        self._batch, self.rows = batch, rows
        self._own_kind = isinstance(batch, MutableMapping) and not isinstance(batch, dict)
        plain = dict(batch) if self._own_kind else batch
        self._leaves, self._structure = tree_flatten(plain, is_leaf=lambda node: isinstance(node, PackedSequence))
        dense = {place: leaf for place, leaf in enumerate(self._leaves) if _is_dense(leaf)}
        dims = known.see([*dense.values()], rows)
        floats = [leaf.is_floating_point() or leaf.is_complex() for leaf in dense.values()]
        found = zip(dense, dims, floats, strict=True)
        self._dims = {place: own for place, own, real in found if own and (all(dims) or real)}
        self.swappable = bool(self._dims)
        self.choices = max([len(own) for own in self._dims.values()], default=0)
        kept = [leaf for place, leaf in enumerate(self._leaves) if place not in self._dims]
        self.divisible = self.swappable and all(leaf is None for leaf in kept)

    def taken(self, index: Tensor, choice: int = 0) -> Any:
        """The batch with the rows ``index``, along one or another of the dimensions that may be the examples'."""
        leaves = list(self._leaves)
        for place, dims in self._dims.items():
            leaf = leaves[place].detach()
            leaves[place] = leaf.index_select(dims[min(choice, len(dims) - 1)], index.to(leaf.device))
        return self._rebuilt(leaves)

    def _rebuilt(self, leaves: list[Any]) -> Any:
        """A batch of the same kind with other leaves."""
        taken: Any = tree_unflatten(leaves, self._structure)
        if not self._own_kind:
            return taken
        batch = copy.copy(self._batch)
        batch.update(taken)
        return batch


class RaggedBatchRows(BatchRows):
    """The rows of ragged examples: of tensors of real numbers, by the index that has as many.

    Whole numbers stay, since they may be edges, lengths or places; and so does how many rows each example has. An
    object with an ``apply(function)``, as torch_geometric's Batch has one, stands for the tensors in it.

    Args:
        batch: a physical batch.
        rows: how many examples it has.
        batch_index: the example of each row, or a sequence of such tensors.
    """

    def __init__(self, batch: Any, rows: int, batch_index: Any) -> None:
        super().__init__(batch, rows, ExampleDims())
        given = batch_index if isinstance(batch_index, list | tuple) else [batch_index]
        self._indices = {len(index): index for index in [torch.arange(rows), *given]}
        self.choices, self.divisible, self.swappable = 1, False, False
        self.taken(torch.arange(rows))  # which notes whether there is something to swap

    def taken(self, index: Tensor, choice: int = 0) -> Any:
        """The batch with rows of the examples ``index`` in the places of the examples' own, again and again."""

        def swapped(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return copy.copy(leaf).apply(swapped) if hasattr(leaf, "apply") else leaf
            if not (_is_dense(leaf) and leaf.is_floating_point() and len(leaf) in self._indices):
                return leaf
            self.swappable = True
            owners = self._indices[len(leaf)].to(leaf.device)
            return leaf.detach()[_rows_of_others(owners, index.to(leaf.device))]

        return self._rebuilt([swapped(leaf) for leaf in self._leaves])


def _rows_of_others(owners: Tensor, index: Tensor) -> Tensor:
    """[R], the row in the place of each, for examples ``index`` in the places of examples; of one without rows, its
    own."""
    counts = torch.bincount(owners, minlength=len(index))
    order, starts = owners.argsort(stable=True), counts.cumsum(0) - counts
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device) - starts[owners[order]]
    others = index[owners]
    own = (others == owners) | (counts[others] == 0)
    picked = order[(starts[others] + place % counts[others].clamp(min=1)).clamp(max=max(len(order) - 1, 0))]
    return torch.where(own, torch.arange(len(order), device=order.device), picked)


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.dim() > 0
