"""How a logical batch is drawn, and what a release over it is charged as: one class for both, so that they agree."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ghostclip.events import (
    FixedSizeGaussian,
    SampledGaussian,
    SampledRelease,
    TruncatedGaussian,
)

__all__ = ["Poisson", "Scheme", "Truncated", "WithoutReplacement"]


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
        return {"dataset_size": self.population, "max_batch_size": self.max_batch_size}
