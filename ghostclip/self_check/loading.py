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
    """What one call of a data set gave for some rows, and the random states after it.

    ``drew``: whether it drew random numbers. ``single``: whether ``examples`` is a list of one example for each row.
    """

    examples: Any
    states: tuple[Any, ...]
    drew: bool
    single: bool

    @property
    def needs_single_reads(self) -> bool:
        """Whether losses need these rows read by themselves: here a row's random numbers follow those before it."""
        return self.drew and self.single


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
            read = self.read_together(index) if self.reads_several else None
            if read is None or read.needs_single_reads:
                read = ReadRows([self._example(self.rows[place]) for place in index], (), drew=False, single=True)
            lengths = [length_of(example) for example in read.examples] if read.single else []
            before = _seeded(self.seed)
            batch = self.transform(self.collate(read.examples))
            after = random_states()
        return Loaded(batch, lengths, after, read.drew or after != before)

    @property
    def reads_several(self) -> bool:
        """Whether the data set reads several rows by one call."""
        return bool(getattr(self.dataset, "__getitems__", None))

    def read_together(self, index: Sequence[int]) -> ReadRows:
        """The rows in these places, read by one call of the data set under the seed."""
        with trying(), drawing_from(random_states()):
            before = _seeded(self.seed)
            examples = self.dataset.__getitems__([self.rows[place] for place in index])
            states = random_states()
        return ReadRows(examples, states, states != before, isinstance(examples, list) and len(examples) == len(index))

    def _example(self, row: int) -> Any:
        """One example, read once: reading may take long, and a collate function may change what it gets."""
        if row not in self.read:
            _seeded(hash((self.seed, row)) % 2**32)
            self.read[row] = self.dataset.__getitems__([row])[0] if self.reads_several else self.dataset[row]
        example = self.read[row]
        try:
            # A copy of a part of a large tensor would have all of it.
            return copy.deepcopy(example, {id(tensor): tensor.clone() for _, tensor in tensors_of(example, 0)})
        except Exception:  # what can't be copied is read each time
            return self.read.pop(row)


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
