"""Rows of a batch in other company: loaded again through data set and collate function, or cut out of the batch.

A batch of the rows 5, 9, 2 and 7 may be loaded again as 5, 9: what its collate function computes over the rows of a
batch (the longest length, a count of tokens, a mean) is then another, and what belongs to row 5 alone is not.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ghostclip.clipper.cutting import cut, length_of, tensors_of
from ghostclip.clipper.random_states import drawing_from, random_states
from ghostclip.clipper.trial import trying

__all__ = ["CutRows", "Loaded", "LoadedRows", "Rows", "Widened"]


class Loaded(NamedTuple):
    """A batch of rows.

    Attributes:
        batch: as the loss function gets it.
        random_states: after its collate function ran.
        drew: whether this drew random numbers.
        lengths: of each row's example, a count of what it holds; None where examples are not read one by one.
    """

    batch: Any
    random_states: tuple[Any, ...] = ()
    drew: bool = False
    lengths: list[int] | None = None


class Rows(Protocol):
    """Rows of which batches can be made: numbers 0 to ``len() - 1``."""

    def __len__(self) -> int: ...

    def load(self, index: Sequence[int]) -> Loaded:
        """The batch of the rows ``index``, in this order; a row may come several times."""


class LoadedRows:
    """Rows of a data set, each read once, under a seed of its own, so that its random augmentations come again.

    Args:
        dataset: has the rows, as a DataLoader reads them: by ``__getitems__`` where there is one.
        collate: a list of examples -> a batch.
        rows: their numbers in the data set.
        transform: what else happens to a batch before the loss function, a move to a device for instance.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any], rows: Sequence[int], transform: Callable[[Any], Any]
    ) -> None:
        self._dataset, self._collate, self._rows, self._transform = dataset, collate, rows, transform
        self._seed = random.SystemRandom().getrandbits(32)
        self._read: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def some(self, places: Sequence[int]) -> LoadedRows:
        """Those in some of the places, under the same seeds."""
        found = LoadedRows(self._dataset, self._collate, [self._rows[place] for place in places], self._transform)
        found._seed, found._read = self._seed, self._read
        return found

    def load(self, index: Sequence[int]) -> Loaded:
        """See `Rows`."""
        with trying(), drawing_from(random_states()):
            examples = self._fetch([self._rows[place] for place in index])
            one_by_one = isinstance(examples, list) and len(examples) == len(index)
            lengths = [length_of(example) for example in examples] if one_by_one else None
            _set_seed(self._seed)
            before = random_states()
            batch = self._transform(self._collate(examples))
            after = random_states()
        return Loaded(batch, after, after != before, lengths)

    def _fetch(self, rows: list[int]) -> Any:
        """The examples; at once where the data set reads several at once and draws no random numbers for it."""
        several = getattr(self._dataset, "__getitems__", None)
        if several:
            _set_seed(self._seed)
            before = random_states()
            examples = several(rows)
            if random_states() == before:
                return examples
        return [self._example(row) for row in rows]

    def _example(self, row: int) -> Any:
        """One example, read once: reading may take long, and a collate function may change what it gets."""
        if row not in self._read:
            _set_seed(hash((self._seed, row)) % 2**32)
            several = getattr(self._dataset, "__getitems__", None)
            self._read[row] = several([row])[0] if several else self._dataset[row]
        try:
            return _copied(self._read[row])
        except Exception:  # what can't be copied is read each time
            return self._read.pop(row)


def _copied(example: Any) -> Any:
    """A copy of an example; of a tensor that is a part of a large one, a copy of that part."""
    if isinstance(example, Tensor):
        return example.clone()
    if type(example) in (list, tuple):
        return type(example)(_copied(part) for part in example)
    if type(example) is dict:
        return {name: _copied(part) for name, part in example.items()}
    # A copy of a part of a large tensor would have all of it.
    return copy.deepcopy(example, {id(tensor): tensor.clone() for _, tensor in tensors_of(example, 0)})


class CutRows:
    """The rows of a batch that is there, see `ghostclip.clipper.cutting.cut`.

    Args:
        batch: tensors and lists with an entry for each example, in any nesting.
        examples: how many it has.
    """

    def __init__(self, batch: Any, examples: int) -> None:
        self._batch, self._examples = batch, examples

    def __len__(self) -> int:
        return self._examples

    def load(self, index: Sequence[int]) -> Loaded:
        """See `Rows`."""
        return Loaded(cut(self._batch, self._examples, index))


class Widened:
    """Rows whose batches have float64 in the place of float32.

    Args:
        rows: as they are.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def load(self, index: Sequence[int]) -> Loaded:
        """See `Rows`."""
        loaded = self._rows.load(index)
        wide = tree_map(lambda leaf: leaf.double() if _is_float32(leaf) else leaf, loaded.batch)
        return loaded._replace(batch=wide)


def _is_float32(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == torch.float32


def _set_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 2 ms where there is no GPU
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed)
    random.seed(seed)
