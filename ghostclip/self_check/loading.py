"""Rows of a batch in other company: loaded again through data set and collate function.

A batch of the rows 5, 9, 2 and 7 may be loaded again as 5, 9: what its collate function computes over the rows of a
batch (the longest length, a count of tokens, a mean) is then another, and what belongs to row 5 alone is not.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ghostclip.clipper.cutting import cut, length_of, tensors_of
from ghostclip.clipper.random_states import drawing_from, random_states
from ghostclip.clipper.trial import trying

__all__ = ["Loaded", "LoadedRows", "rows_of"]


class Loaded(NamedTuple):
    """A batch, and the random states after its collate function ran.

    ``lengths`` count what each row's example holds; [] where examples are not read one by one. ``drew``: whether the
    collate function drew random numbers, or the data set for all rows together.
    """

    batch: Any
    lengths: list[int]
    states: tuple[Any, ...]
    drew: bool


class ReadRows(NamedTuple):
    """Examples that were read by one call, and the random states after it."""

    rows: list[Any]
    states: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class LoadedRows:
    """Rows of a data set, each read once, under a seed of its own, so that its random augmentations come again.

    ``transform`` is what else happens to a batch before the loss function, a move to a device for instance. A unit of
    privacy has ``each`` rows side by side: 1, or those of a user.
    """

    dataset: Any
    collate: Callable[[Any], Any]
    rows: Sequence[int]
    transform: Callable[[Any], Any]
    each: int = 1
    seed: int = field(default_factory=functools.partial(random.SystemRandom().getrandbits, 32))
    read: dict[int, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def units(self) -> int:
        """How many units of privacy have the rows."""
        return len(self.rows) // self.each

    def places(self, units: Iterable[int]) -> list[int]:
        """The places of all rows of these units, one unit after another."""
        return [unit * self.each + row for unit in units for row in range(self.each)]

    def some(self, units: Iterable[int]) -> LoadedRows:
        """The rows of these units, under the same seeds."""
        return replace(self, rows=[self.rows[place] for place in self.places(sorted(units))])

    def load(self, index: Sequence[int]) -> Loaded:
        """The batch of the rows in the places ``index``, in this order; a row may come several times."""
        with trying(), drawing_from(random_states()):
            examples, drew = self._fetch([self.rows[place] for place in index])
            lengths = [length_of(example) for example in examples] if _are_single(examples, index) else []
            before = _seeded(self.seed)
            batch = self.transform(self.collate(examples))
            after = random_states()
        return Loaded(batch, lengths, after, drew or after != before)

    def read_together(self, index: Sequence[int]) -> ReadRows | None:
        """The examples in these places, read by one call of the data set under the seed.

        None where it reads rows one by one, draws no random numbers for several, or gives them as one batch.
        """
        if (several := getattr(self.dataset, "__getitems__", None)) is None:
            return None
        with trying(), drawing_from(random_states()):
            before = _seeded(self.seed)
            examples = several([self.rows[place] for place in index])
            read = ReadRows(examples, random_states())
            return read if read.states != before and _are_single(examples, index) else None

    def _fetch(self, rows: list[int]) -> tuple[Any, bool]:
        """The examples, and whether random numbers were drawn for all of them together.

        A data set that reads several rows at once does so here, if it draws no random numbers for it. It does so too if
        it gives the rows as one batch.
        """
        if several := getattr(self.dataset, "__getitems__", None):
            before = _seeded(self.seed)
            examples, drew = several(rows), random_states() != before
            if not drew or not _are_single(examples, rows):
                return examples, drew
        return [self._example(row) for row in rows], False

    def _example(self, row: int) -> Any:
        """One example, read once: reading may take long, and a collate function may change what it gets."""
        if row not in self.read:
            _seeded(hash((self.seed, row)) % 2**32)
            several = getattr(self.dataset, "__getitems__", None)
            self.read[row] = several([row])[0] if several else self.dataset[row]
        example = self.read[row]
        try:
            # A copy of a part of a large tensor would have all of it.
            return copy.deepcopy(example, {id(tensor): tensor.clone() for _, tensor in tensors_of(example, 0)})
        except Exception:  # what can't be copied is read each time
            return self.read.pop(row)


def _are_single(examples: Any, rows: Sequence[int]) -> bool:
    """Whether what a data set gave for some rows is a list of one example for each."""
    return isinstance(examples, list) and len(examples) == len(rows)


def rows_of(batch: Any, examples: int) -> LoadedRows:
    """The rows of a batch that is there, see `ghostclip.clipper.cutting.cut`."""
    return LoadedRows(range(examples), functools.partial(cut, batch, examples), range(examples), lambda found: found)


def _seeded(seed: int) -> tuple[Any, ...]:
    """The random states after all generators were given this seed."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 2 ms where there is no GPU
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed)
    random.seed(seed)
    return random_states()
