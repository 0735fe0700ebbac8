"""Partitions: which trained parameters are clipped together.

A partition maps each trained parameter, by name and number of entries, to the name of its group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate

from ghostclip.validate import positive_int

__all__ = ["Blocks", "ByLayer", "ByName", "ByParameter", "EqualSizes", "Partition", "Whole", "as_partition"]

EXAMPLE = 'such as {"encoder": ["encoder.*"], "head": ["head.*"]}'


class Partition(ABC):
    """Trained parameters -> groups."""

    @abstractmethod
    def groups(self, sizes: Mapping[str, int]) -> dict[str, str]:
        """The group of each trained parameter.

        Args:
            sizes: {parameter name: number of entries}, in the order of ``named_parameters()``.

        Returns:
            The group by the name of each parameter of ``sizes``.

        Raises:
            ValueError: the parameters can't be partitioned like this.
        """


@dataclass(frozen=True)
class Whole(Partition):
    """One group, "all": flat clipping."""

    def groups(self, sizes: Mapping[str, int]) -> dict[str, str]:
        """{parameter name: "all"}."""
        return dict.fromkeys(sizes, "all")


@dataclass(frozen=True)
class ByLayer(Partition):
    """A group for each layer: the module that owns a parameter by its first name; the model itself is ""."""

    def groups(self, sizes: Mapping[str, int]) -> dict[str, str]:
        """{parameter name: name of its layer}."""
        return {name: name.rpartition(".")[0] for name in sizes}


@dataclass(frozen=True)
class ByParameter(Partition):
    """A group for each parameter."""

    def groups(self, sizes: Mapping[str, int]) -> dict[str, str]:
        """{parameter name: parameter name}."""
        return {name: name for name in sizes}


@dataclass(frozen=True)
class ByName(Partition):
    """Groups of parameters by patterns.

    Args:
        patterns: {group: patterns}; a pattern with ``*``, ``?`` or ``[...]``, or a plain name, fits the name of a
            parameter or of the module that owns it. Every trained parameter must fall into exactly one group.

    Raises:
        TypeError, ValueError: ``patterns`` is no mapping to lists of patterns, or has none.
    """

    patterns: Mapping[str, Sequence[str]]

    def __post_init__(self) -> None:
        if not isinstance(self.patterns, Mapping):
            raise TypeError(f"groups must be {{group: [name patterns]}}, {EXAMPLE}; got {self.patterns!r}")
        for group, own in self.patterns.items():
            if isinstance(own, str) or not isinstance(own, Sequence):
                norm = ", which goes into thresholds={...}" if isinstance(own, int | float) else ""
                raise TypeError(f"groups must hold lists of name patterns, {EXAMPLE}; got {own!r} for {group!r}{norm}")
        if not self.patterns or not all(self.patterns.values()):
            raise ValueError(
                f"groups must name at least one pattern for each of at least one group; got {dict(self.patterns)!r}"
            )

    def groups(self, sizes: Mapping[str, int]) -> dict[str, str]:
        """{parameter name: the one group with a pattern for it}; raises ValueError, naming what is wrong."""
        found: dict[str, str] = {}
        fitted: set[tuple[str, str]] = set()
        for name in sizes:
            layer = name.rpartition(".")[0]
            fits = {(group, pattern) for group, own in self.patterns.items() for pattern in own
                    if fnmatchcase(name, pattern) or fnmatchcase(layer, pattern)}  # fmt: skip
            inside = sorted({group for group, _ in fits})
            if len(inside) != 1:
                where = f"in several: {', '.join(inside)}" if inside else f"in none of {', '.join(self.patterns)}"
                raise ValueError(f"each trained parameter must be in exactly one group; {name!r} is {where}")
            fitted |= fits
            found[name] = inside[0]
        idle = [f"{pattern!r} of {group!r}" for group, own in self.patterns.items() for pattern in own
                if (group, pattern) not in fitted]  # fmt: skip
        if idle and sizes:
            raise ValueError(
                f"every pattern must fit a trained parameter or its module; these fit none: {', '.join(idle)}"
            )
        return found


@dataclass(frozen=True)
class Blocks(Partition):
    """A group for each block of a network of numbered blocks, as transformers are; one more, "rest", for all others.

    A block is what one number stands for in the names of parameters: ``encoder.layers.3.linear1.weight`` belongs to
    ``encoder.layers.3``. Of several numbers in a name the first one counts.
    """

    def groups(self, sizes: Mapping[str, int]) -> dict[str, str]:
        """{parameter name: its block, or "rest"}."""
        return {name: _block_of(name) for name in sizes}


@dataclass(frozen=True)
class EqualSizes(Partition):
    """``count`` groups of consecutive parameters with about as many entries each, "1" to str(count).

    Each group ends at the parameter whose end lies nearest to its share of all entries, and has at least one.

    Raises:
        ValueError: in `groups`: there are fewer parameters than groups.
    """

    count: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", positive_int(count=self.count))

    def groups(self, sizes: Mapping[str, int]) -> dict[str, str]:
        """{parameter name: number of its group, as text}."""
        names, ends = list(sizes), list(accumulate(sizes.values()))
        if len(names) < self.count:
            raise ValueError(
                f"{self.count} groups need at least as many trained parameters; the model has {len(names)}"
            )
        found, start = {}, 0
        for group in range(1, self.count + 1):
            # At least one parameter for this group, and one for each that follows.
            possible = range(start + 1, len(names) - (self.count - group) + 1)
            share = ends[-1] * group / self.count
            stop = min(possible, key=lambda stop, share=share: abs(ends[stop - 1] - share))  # type: ignore[misc]
            stop = len(names) if group == self.count else stop
            found.update(dict.fromkeys(names[start:stop], str(group)))
            start = stop
        return found


def as_partition(groups: Partition | Mapping[str, Sequence[str]]) -> Partition:
    """A partition, or {group: patterns} as one; raises as `ByName`."""
    return groups if isinstance(groups, Partition) else ByName(groups)


def _block_of(name: str) -> str:
    parts = name.split(".")
    for place, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return "rest"
