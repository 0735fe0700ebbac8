"""Sampling by turns: each unit is in one group for good, and step t draws from group t mod (the number of groups).

So steps in which a unit takes part are at least that many steps apart, as correlated noise needs it. Who is in which
group is drawn independently of the data, once for a training. For example, with 3 groups a unit of group 1 can be in
the batches of steps 1, 4, 7 and no others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ghostclip.events import CyclicGaussian, CyclicPoissonGaussian, SampledRelease
from ghostclip.sampling.schemes import Poisson

__all__ = ["Cyclic", "CyclicPoisson", "drawn_groups"]


@dataclass(frozen=True)
class CyclicPoisson(Poisson):
    """In its turn each unit of a group is in the batch with probability ``separation * batch_size / population``.

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
    """A group for each unit, int32 [population]: independent and uniform, or of equal sizes.

    Args:
        scheme: says how many groups, and of what sizes.
        generator: as for `Scheme.draw`; it has ``binomial`` and ``choice`` only.
    """
    found, rest = np.empty(scheme.population, np.int32), np.arange(scheme.population)
    for group in range(scheme.separation):
        left = scheme.separation - group
        count = -(-len(rest) // left) if scheme.equal else int(generator.binomial(len(rest), 1.0 / left))
        chosen = generator.choice(len(rest), count, replace=False, shuffle=False)
        found[rest[chosen]] = group
        rest = np.delete(rest, chosen)
    return found
