"""Some examples cut out of a batch of any structure, and the sizes of its tensors."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence
from torch.utils._pytree import tree_flatten

__all__ = ["Sizes", "cut", "leaves_of", "length_of", "sizes_of", "take_rows", "tensors_of"]

# Objects within objects of a batch that are looked into.
DEPTH = 8


def cut(batch: Any, examples: int, index: Sequence[int]) -> Any:
    """The batch of the examples ``index``, in this order.

    Tensors with ``examples`` in dimension 0, and lists and tuples of as many entries, have an entry for each example;
    so have nested tensors and packed sequences of as many parts. Dicts, dataclasses and other objects hold such values.
    Anything else is shared by all examples and stays.
    """
    if isinstance(batch, Tensor):
        return _cut_tensor(batch, examples, index)
    if isinstance(batch, np.ndarray):
        return batch[list(index)] if batch.ndim and len(batch) == examples else batch
    if isinstance(batch, PackedSequence):
        parts = unpack_sequence(batch)
        if len(parts) != examples:
            return batch
        return pack_sequence([parts[place] for place in index], enforce_sorted=False)
    if isinstance(batch, Mapping):
        if len(batch) == examples > 1 and not any(_is_batched(entry, examples) for entry in batch.values()):
            names = list(batch)
            return {place: batch[names[row]] for place, row in enumerate(index)}
        return _like(batch, {name: cut(value, examples, index) for name, value in batch.items()})
    if isinstance(batch, list | tuple):
        if len(batch) == examples and not any(_is_batched(entry, examples) for entry in batch):
            found: Any = [batch[place] for place in index]
        else:
            found = [cut(entry, examples, index) for entry in batch]
        if hasattr(batch, "_fields"):
            return type(batch)(*found)
        return found if type(batch) is list else type(batch)(found)
    if hasattr(batch, "from_data_list") and hasattr(batch, "to_data_list"):  # graphs of torch_geometric
        graphs = batch.to_data_list()
        if len(graphs) != examples:
            return batch
        return type(batch).from_data_list([graphs[place] for place in index])
    return _cut_object(batch, examples, index)


def _cut_tensor(tensor: Tensor, examples: int, index: Sequence[int]) -> Tensor:
    if tensor.is_nested:
        if tensor.size(0) != examples:
            return tensor
        return _rows_of_nested(tensor.detach(), index)
    if tensor.dim() == 0 or len(tensor) != examples or tensor.layout != torch.strided:
        return tensor
    return tensor.detach()[torch.tensor(index, device=tensor.device)]


def take_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Some rows of a tensor [B, ...], in this order: ``tensor[rows]``, which nested tensors don't have.

    Args:
        tensor: strided or jagged, where it is nested.
        rows: numbers of rows, [n] with n >= 1.

    Raises:
        TypeError: the tensor is jagged and has lengths of its own, not those between its offsets.
    """
    if not tensor.is_nested:
        return tensor[rows.to(tensor.device)]
    if tensor.layout == torch.jagged and tensor.lengths() is not None:  # type: ignore[attr-defined]
        raise TypeError("it holds a jagged tensor with lengths of its own, and not those between its offsets")
    return _rows_of_nested(tensor, rows.tolist())


def _rows_of_nested(tensor: Any, index: Sequence[int]) -> Tensor:
    parts = tensor.unbind()
    chosen = [parts[place] for place in index]
    if tensor.layout != torch.jagged:
        return torch.nested.as_nested_tensor(chosen)
    dim = tensor._ragged_idx - 1
    sizes = torch.tensor([0, *(part.shape[dim] for part in chosen)], device=tensor.device)
    return torch.nested.nested_tensor_from_jagged(torch.cat(chosen, dim), sizes.cumsum(0), jagged_dim=dim + 1)


def leaves_of(batch: Any) -> tuple[list[Tensor], Any, int] | None:
    """(tensors, structure, B) of a batch; None unless all leaves are dense tensors with B in dimension 0."""
    leaves, structure = tree_flatten(batch)
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() and _is_dense(leaf) for leaf in leaves):
        return None
    examples = {len(leaf) for leaf in leaves}
    return (leaves, structure, examples.pop()) if len(examples) == 1 else None


def _is_dense(leaf: Tensor) -> bool:
    return leaf.layout is torch.strided and not leaf.is_nested


def _is_batched(entry: Any, examples: int) -> bool:
    """Whether one entry of a list holds all examples, as inputs and targets in ``[inputs, targets]`` do."""
    if isinstance(entry, Tensor):
        return entry.dim() > 0 and entry.size(0) == examples
    if isinstance(entry, np.ndarray):
        return entry.ndim > 0 and len(entry) == examples
    return isinstance(entry, list | tuple | Mapping) and len(entry) == examples


def _like(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """A mapping of the same kind, with other values."""
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return values
    found = copy.copy(batch)
    found.update(values)
    return found


def _cut_object(batch: Any, examples: int, index: Sequence[int]) -> Any:
    """An object with attributes: a copy of which these are cut."""
    attributes = attributes_of(batch)
    if not attributes:
        return batch
    found = copy.copy(batch)
    for name, value in attributes.items():
        object.__setattr__(found, name, cut(value, examples, index))  # a dataclass may be frozen
    return found


def attributes_of(batch: Any) -> dict[str, Any]:
    """{name: value} of a dataclass or another object of a user's; {} for numbers, strings, functions and classes."""
    if isinstance(batch, type) or callable(batch):
        return {}
    if dataclasses.is_dataclass(batch):
        fields = [field.name for field in dataclasses.fields(batch)]
        return {name: getattr(batch, name) for name in fields if hasattr(batch, name)}
    slots = [name for kind in type(batch).__mro__ for name in getattr(kind, "__slots__", ())]
    return {name: getattr(batch, name) for name in slots if hasattr(batch, name)} | dict(getattr(batch, "__dict__", {}))


def length_of(example: Any, depth: int = DEPTH) -> int:
    """How much an example holds: elements of its tensors, characters of its strings, entries of its lists."""
    if isinstance(example, str | bytes):
        return len(example)
    if isinstance(example, Tensor):
        return example.numel()
    if isinstance(example, Mapping | list | tuple) and depth:
        parts = example.values() if isinstance(example, Mapping) else example
        return sum(length_of(part, depth - 1) for part in parts)
    size = getattr(example, "size", 1)  # of an array of numpy
    return size if isinstance(size, int) else 1


def tensors_of(batch: Any, rows: int) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all tensors in a batch, see `_leaves_of`."""
    return ((name, leaf) for name, leaf in _leaves_of(batch, rows) if isinstance(leaf, Tensor))


def _leaves_of(batch: Any, rows: int, name: str = "", depth: int = DEPTH) -> Iterator[tuple[str, Any]]:
    """(name, leaf) of all tensors, arrays, strings and lists of numbers in a batch.

    The entries of a list, or of a dict, with one for each row have one name.
    """
    if isinstance(batch, Tensor | np.ndarray | str | bytes):
        yield name, batch
        return
    if not depth or isinstance(batch, int | float):
        return
    each = False
    if isinstance(batch, Mapping):
        parts = list(batch.items())
        each = len(parts) == rows and not any(_is_batched(entry, rows) for _, entry in parts)
    elif isinstance(batch, list | tuple):
        parts = list(enumerate(batch))
        each = len(batch) == rows and not any(_is_batched(entry, rows) for entry in batch)
        if batch and isinstance(batch[0], int | float):
            yield name, batch
            return
    else:
        parts = list(attributes_of(batch).items())
    for own, value in parts:
        below = f"{name}.{'*' if each else own}"
        if isinstance(value, Tensor):
            yield below, value
        else:
            yield from _leaves_of(value, rows, below, depth - 1)


class Sizes:
    """The largest size of each dimension of the tensors of batches, beside the number of rows.

    After ``[32, 12]`` for 32 rows, ``[30, 10]`` for 30 is within them, and ``[30, 240]`` isn't.
    """

    def __init__(self) -> None:
        self._largest: dict[tuple[str, int], list[int]] = {}

    def add(self, batch: Any, rows: int) -> None:
        """Takes the sizes of a batch for known."""
        for key, sizes in sizes_of(batch, rows).items():
            self._largest[key] = [*map(max, self._largest.get(key, sizes), sizes)]

    def hold(self, batch: Any, rows: int) -> bool:
        """Whether no size of a batch is larger than the known ones."""
        for key, sizes in sizes_of(batch, rows).items():
            if key not in self._largest or any(map(operator.gt, sizes, self._largest[key])):
                return False
        return True


def sizes_of(batch: Any, rows: int) -> dict[tuple[str, int], list[int]]:
    """{(name, number of sizes): the largest of each, without the number of rows} of what a batch holds."""
    found: dict[tuple[str, int], list[int]] = {}
    for name, leaf in _leaves_of(batch, rows):
        if isinstance(leaf, Tensor) and leaf.is_nested:
            shape = [rows, max((len(part) for part in leaf.unbind() if part.dim()), default=0)]
        else:
            shape = list(leaf.shape) if isinstance(leaf, Tensor | np.ndarray) else [len(leaf)]
        sizes = shape[1:] if shape and shape[0] == rows else shape
        key = name, len(sizes)
        found[key] = [*map(max, found[key], sizes)] if key in found else sizes
    return found
