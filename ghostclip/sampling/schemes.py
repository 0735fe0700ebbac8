"""How a logical batch is drawn, and what a release over it is charged as: one class for both, so that they agree."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ghostclip.events import (
    RELATIONS,
    SAMPLINGS,
    CyclicGaussian,
    CyclicPoissonGaussian,
    FixedSizeGaussian,
    SampledGaussian,
    SampledRelease,
    TruncatedGaussian,
)
from ghostclip.validate import one_of, positive_int

__all__ = [
    "Cyclic",
    "CyclicPoisson",
    "Poisson",
    "Scheme",
    "Truncated",
    "WithoutReplacement",
    "drawn_groups",
    "scheme_named",
]


@dataclass(frozen=True)
class Scheme(ABC):
    """A way to draw batches of units (examples, or users with all examples of theirs).

    Args:
        population: how many units there are.
        batch_size: the expected number in a batch.
        relation: which data sets are neighbours, among `ghostclip.events.RELATIONS`.
        unit: what a unit is, among `ghostclip.events.UNITS`.

    Attributes:
        kind: of the events.
        described: what `words` says, a format of the scheme.
    """

    kind: ClassVar[type[SampledRelease]]
    described: ClassVar[str]
    population: int
    batch_size: int
    relation: str = "add_or_remove_one"
    unit: str = "example"

    @property
    def sample_rate(self) -> float:
        """The expected share of the units in a batch, before a cut."""
        return self.batch_size / self.population

    @abstractmethod
    def count(self, generator: np.random.Generator) -> int:
        """How many distinct units the next batch has; given their number, all sets of them are equally likely."""

    @property
    def largest(self) -> int:
        """About the most units in a batch: by chance it is hardly ever six standard deviations above ``batch_size``."""
        return min(self.population, self.batch_size + 6 * math.isqrt(self.batch_size) + 6)

    @property
    def words(self) -> str:
        """The way's name and who is in a batch, to go into a sentence."""
        return self.described.format(self)

    def draw(self, generator: np.random.Generator, step: int = 0) -> list[int]:
        """The batch of a step: numbers of distinct units, ascending."""
        chosen = generator.choice(self.population, self.count(generator), replace=False, shuffle=False)
        return np.sort(chosen).tolist()

    def event(self, noise_multiplier: float) -> SampledRelease:
        """What a noisy sum over one batch is to be charged as."""
        return self.kind(self.sample_rate, noise_multiplier, relation=self.relation, unit=self.unit, **self._cut)

    @property
    def _cut(self) -> dict[str, Any]:
        """What the event says of batches that are cut down."""
        return {}


@dataclass(frozen=True)
class Poisson(Scheme):
    """Each unit is in a batch with probability ``batch_size / population``, independently of the others."""

    kind: ClassVar[type[SampledRelease]] = SampledGaussian
    described = "Poisson sampling (each {0.unit} is in a batch with probability {0.sample_rate:.6g}; sizes vary)"

    def count(self, generator: np.random.Generator) -> int:
        """A binomial number: that of independent coins, one for each unit."""
        return int(generator.binomial(self.population, self.sample_rate))


@dataclass(frozen=True)
class WithoutReplacement(Scheme):
    """Exactly ``batch_size`` units, every set of them equally likely, drawn anew for every batch."""

    kind = FixedSizeGaussian
    described = "sampling without replacement ({0.batch_size} different {0.unit}s, drawn anew for each batch)"

    def count(self, generator: np.random.Generator) -> int:
        """``batch_size``."""
        return self.batch_size

    @property
    def largest(self) -> int:
        """``batch_size``."""
        return self.batch_size


@dataclass(frozen=True)
class Truncated(Poisson):
    """A Poisson sample, of which ``max_batch_size`` units are kept, drawn uniformly, where it has more."""

    kind = TruncatedGaussian
    described = (
        "truncated Poisson sampling (each {0.unit} is in a batch with probability {0.sample_rate:.6g}, before batches "
        "of more than {0.max_batch_size} are cut down)"
    )
    max_batch_size: int = 0

    def count(self, generator: np.random.Generator) -> int:
        """A binomial number, at most ``max_batch_size``."""
        return min(super().count(generator), self.max_batch_size)

    @property
    def largest(self) -> int:
        """See `Scheme.largest`."""
        return min(super().largest, self.max_batch_size)

    @property
    def _cut(self) -> dict[str, Any]:
        larger = self.population + (self.relation == "add_or_remove_one")  # of two neighbours
        return {"dataset_size": larger, "max_batch_size": self.max_batch_size}


@dataclass(frozen=True)
class CyclicPoisson(Poisson):
    """Each unit is in one group for good; step t draws from group t mod ``separation``, at that many times the rate.

    So steps in which a unit takes part are at least ``separation`` steps apart, as correlated noise needs it. With 3
    groups a unit of group 1 can be in the batches of steps 1, 4, 7 and no others.

    Args:
        separation: the number of groups.
        groups: of each unit its group, [population]; None: not drawn yet. They are drawn independently of the data, so
            that one unit more or less leaves the others' groups as they are.

    Raises:
        ValueError: the probability would be above 1.
    """

    kind: ClassVar[type[CyclicPoissonGaussian]] = CyclicPoissonGaussian
    described = (
        "cyclic Poisson sampling (each {0.unit} is in one of {0.separation} groups for good, and in a batch of its "
        "group with probability {0.turn_rate:.6g})"
    )
    equal: ClassVar[bool] = False  # whether groups have equal sizes
    separation: int = 1
    groups: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.separation * self.batch_size > self.population:
            raise ValueError(
                f"bands * batch_size / population, the sampling rate within one of {self.separation} groups, must be "
                f"at most 1; got {self.separation} * {self.batch_size} / {self.population}. Take at most "
                f"{self.population // self.batch_size} bands, or smaller batches"
            )

    @property
    def turn_rate(self) -> float:
        """The probability with which a unit is in a batch of its group."""
        return self.separation * self.batch_size / self.population

    def draw(self, generator: Any, step: int = 0) -> list[int]:
        """See `Scheme.draw`."""
        members = self._members(step)
        count = int(generator.binomial(len(members), self.turn_rate))
        return members[np.sort(generator.choice(len(members), count, replace=False, shuffle=False))].tolist()

    def _members(self, step: int) -> np.ndarray:
        """The units whose turn it is, ascending."""
        return np.flatnonzero(self.groups == step % self.separation)

    def event(self, noise_multiplier: float) -> SampledRelease:
        """See `Scheme.event`."""
        return self.kind(
            self.turn_rate, noise_multiplier, relation=self.relation, unit=self.unit, separation=self.separation
        )


@dataclass(frozen=True)
class Cyclic(CyclicPoisson):
    """Each unit is in one batch of every epoch, the same in each; batches are of about one size."""

    kind = CyclicGaussian
    described = "cyclic batches (each {0.unit} once in {0.separation} steps, in an order drawn once)"
    equal = True

    def __post_init__(self) -> None:
        """Any batch size will do."""

    @property
    def turn_rate(self) -> float:
        """1."""
        return 1.0

    @property
    def largest(self) -> int:
        """The largest group."""
        return -(-self.population // self.separation)

    def draw(self, generator: Any, step: int = 0) -> list[int]:
        """See `Scheme.draw`; nothing is random."""
        return self._members(step).tolist()


def drawn_groups(scheme: CyclicPoisson, generator: Any) -> np.ndarray:
    """A group for each unit, int32 [population]: independent and uniform, or of equal sizes."""
    found, rest = np.empty(scheme.population, np.int32), np.arange(scheme.population)
    for group in range(scheme.separation):
        left = scheme.separation - group
        count = -(-len(rest) // left) if scheme.equal else int(generator.binomial(len(rest), 1.0 / left))
        chosen = generator.choice(len(rest), count, replace=False, shuffle=False)
        found[rest[chosen]] = group
        rest = np.delete(rest, chosen)
    return found


def scheme_named(
    sampling: str,
    population: int,
    batch_size: int,
    *,
    neighboring: str = "add_or_remove_one",
    unit: str = "example",
    max_batch_size: int | None = None,
    bands: int = 1,
) -> Scheme:
    """The scheme for the engine's arguments; with one band cyclic Poisson sampling is Poisson sampling.

    Raises:
        ValueError, TypeError: an argument is out of range, or given where it has no meaning.
    """
    one_of(SAMPLINGS, sampling=sampling)
    relation = one_of(RELATIONS, neighboring=neighboring)
    if sampling == "truncated":
        if max_batch_size is None:
            raise ValueError(
                'max_batch_size must be given with sampling="truncated" (max_physical_batch_size is the default): '
                "the most examples in a batch; got None"
            )
        if positive_int(max_batch_size=max_batch_size) < batch_size:
            raise ValueError(
                f"max_batch_size must be at least batch_size = {batch_size}, the expected number before a cut; got "
                f"{max_batch_size!r}"
            )
        return Truncated(population, batch_size, relation, unit, positive_int(max_batch_size=max_batch_size))
    if max_batch_size is not None:
        raise ValueError(f'max_batch_size must be left out unless sampling="truncated"; got {max_batch_size!r}')
    if sampling == "cyclic":
        return Cyclic(population, batch_size, relation, unit, max(1, round(population / batch_size)))
    if sampling == "cyclic_poisson" and bands > 1:
        return CyclicPoisson(population, batch_size, relation, unit, bands)
    kind = WithoutReplacement if sampling == "without_replacement" else Poisson
    return kind(population, batch_size, relation, unit)
