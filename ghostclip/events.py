"""What happened, as plain data: the releases that are charged, read by accountants and ledgers.

Fields are strings and numbers, and a tuple of events in `JointGaussian` and `Selection`; ``EVENTS`` has every kind by
its name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias, TypeVar

from ghostclip.validate import at_least_one, fraction, nonnegative, one_of, positive, positive_int, whole

__all__ = [
    "DISTRIBUTIONS",
    "EVENTS",
    "RELATIONS",
    "SAMPLINGS",
    "UNITS",
    "CyclicGaussian",
    "CyclicPoissonGaussian",
    "Event",
    "FixedSizeGaussian",
    "JointGaussian",
    "SampledGaussian",
    "SampledRelease",
    "Selection",
    "TruncatedGaussian",
    "mechanism_of",
    "merged",
    "within",
]

RELATIONS = ("add_or_remove_one", "replace_one")
SAMPLINGS = ("poisson", "without_replacement", "truncated", "cyclic_poisson", "cyclic")
UNITS = ("example", "user")
DISTRIBUTIONS = ("poisson", "geometric", "logarithmic")


@dataclass(frozen=True)
class SampledRelease:
    """A sum over a random sample of the data, released with Gaussian noise; the kinds differ in how it is drawn.

    Attributes:
        sampling: the kind's name among ``SAMPLINGS``.
        sample_rate: the probability with which each unit is in the sample; in (0, 1].
        noise_multiplier: standard deviation of the noise over the bound on one unit's term; 0 means no protection.
        count: how often it happened.
        relation: which data sets are neighbours: they differ by one unit's presence ("add_or_remove_one"), or in what
            one unit's data are ("replace_one", where the sum moves by up to twice the bound).
        unit: whose presence that is: one "example", or one "user" with all examples of theirs.

    Raises:
        ValueError, TypeError: a field is out of range.
    """

    sampling: ClassVar[str]
    sample_rate: float
    noise_multiplier: float
    count: int = 1
    relation: str = "add_or_remove_one"
    unit: str = "example"

    def __post_init__(self) -> None:
        _set(self, sample_rate=fraction(sample_rate=self.sample_rate))
        _set(self, noise_multiplier=nonnegative(noise_multiplier=self.noise_multiplier))
        _set(self, count=whole(count=self.count))
        one_of(RELATIONS, relation=self.relation)
        one_of(UNITS, unit=self.unit)


@dataclass(frozen=True)
class SampledGaussian(SampledRelease):
    """A sum over a Poisson sample: every unit is in it independently of the others (Abadi et al. 2016)."""

    sampling: ClassVar[str] = "poisson"


@dataclass(frozen=True)
class FixedSizeGaussian(SampledRelease):
    """A sum over a sample of fixed size, drawn uniformly and without replacement, anew each time.

    ``sample_rate`` is the size of the sample over that of the data set (the larger one of two neighbours).
    """

    sampling: ClassVar[str] = "without_replacement"


@dataclass(frozen=True)
class TruncatedGaussian(SampledRelease):
    """A sum over a Poisson sample that is cut down, uniformly at random, to ``max_batch_size`` where it is larger.

    Attributes:
        dataset_size: the most units that the data set (the larger one of two neighbours) has.
        max_batch_size: the most units in a sample.
    """

    sampling: ClassVar[str] = "truncated"
    dataset_size: int = field(kw_only=True)
    max_batch_size: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _set(self, dataset_size=positive_int(dataset_size=self.dataset_size))
        _set(self, max_batch_size=positive_int(max_batch_size=self.max_batch_size))


@dataclass(frozen=True)
class CyclicPoissonGaussian(SampledRelease):
    """Sums over Poisson samples of one group of the data after the other: each unit is in one group for good.

    ``count`` steps of one mechanism give each unit at most ceil(count / separation) turns. Noise may be correlated over
    steps by a matrix C with columns of norm 1, whose columns ``separation`` steps apart share no row; so a unit's turns
    are as many Poisson-sampled Gaussian releases (Choquette-Choo et al. 2023, "(Amplified) Banded Matrix
    Factorization", theorem 4). For example, 9 steps with a separation of 8 count as 2 releases.

    ``sample_rate`` is the probability with which a unit whose turn it is is in the sample.

    Attributes:
        separation: the number of groups: a unit's turns are so many steps apart.
        mechanism: a random name. Steps add up to turns within one mechanism only: another run, or one that lost its
            history of noise, starts another. Events with the name "" are a mechanism each.
        correlation: of the noise, in words; "" where steps have independent noise.
        sensitivity: k turns of a unit move C x by at most this times sqrt(k); above 1 where columns share rows.
    """

    sampling: ClassVar[str] = "cyclic_poisson"
    separation: int = field(kw_only=True)
    mechanism: str = field(default="", kw_only=True)
    correlation: str = field(default="", kw_only=True)
    sensitivity: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _set(self, separation=positive_int(separation=self.separation))
        _set(self, sensitivity=positive(sensitivity=self.sensitivity))

    @property
    def turns(self) -> SampledGaussian:
        """The turns of one unit, as releases over Poisson samples."""
        noise = self.noise_multiplier / self.sensitivity
        return SampledGaussian(self.sample_rate, noise, self._most_turns, self.relation, self.unit)

    @property
    def _most_turns(self) -> int:
        """The most turns that a unit had: every ``separation``-th step, from the first one on."""
        return -(-self.count // self.separation)


@dataclass(frozen=True)
class CyclicGaussian(CyclicPoissonGaussian):
    """Sums over one part of the data after the other in a fixed order, each unit once in ``separation`` steps.

    Nothing is random, so ``sample_rate`` is 1.
    """

    sampling: ClassVar[str] = "cyclic"

    @property
    def turns(self) -> SampledGaussian:
        """The turns of one unit as one release: k turns move C x by at most sqrt(k) times the bound of one turn."""
        turns = self._most_turns
        noise = self.noise_multiplier / self.sensitivity / math.sqrt(max(1, turns))
        return SampledGaussian(1.0, noise, min(1, turns), self.relation, self.unit)


class _Several:
    """Events made of others, which are about the same neighbours."""

    events: tuple[SampledRelease, ...]

    @property
    def relation(self) -> str:
        """Which data sets are neighbours."""
        return self.events[0].relation

    @property
    def unit(self) -> str:
        """Whose presence that is about."""
        return self.events[0].unit


@dataclass(frozen=True)
class JointGaussian(_Several):
    """Several sums over ONE sample, each with noise of its own, as adaptive clipping releases them.

    Seen together they are one Gaussian release, of noise multiplier (sum of z_k^-2)^-1/2 (McMahan et al. 2018, "A
    general approach to adding differential privacy to iterative training procedures", section 3).

    Attributes:
        events: of one kind, alike in all but their noise multipliers, each with a count of 1.
        count: how often all of them happened.

    Raises:
        ValueError, TypeError: the events are not alike, or a count is out of range.
    """

    events: tuple[SampledRelease, ...]
    count: int = 1

    def __post_init__(self) -> None:
        _set(self, events=tuple(self.events), count=whole(count=self.count))
        if len({replace(event, noise_multiplier=1.0) for event in self.events}) != 1 or self.events[0].count != 1:
            raise ValueError(
                "events must be one or more releases over the same sample, alike in all but noise_multiplier, each "
                f"with count 1; got {self.events!r}"
            )

    @property
    def together(self) -> SampledRelease:
        """The one release that tells as much, with this one's count."""
        return replace(self.events[0], noise_multiplier=self.noise_multiplier, count=self.count)

    @property
    def noise_multiplier(self) -> float:
        """Of the releases together; 0 as soon as one has no noise."""
        if any(event.noise_multiplier == 0 for event in self.events):
            return 0.0
        return 1.0 / math.hypot(*(1.0 / event.noise_multiplier for event in self.events))

    @property
    def sample_rate(self) -> float:
        """Of the one sample."""
        return self.events[0].sample_rate


@dataclass(frozen=True)
class Selection(_Several):
    """The best of a random number of runs over the same data; nothing else of them is released.

    The number is drawn from a distribution that is fixed beforehand and independently of the data (Papernot and Steinke
    2022, "Hyperparameter tuning with Rényi differential privacy", definitions 1 and 5).

    Attributes:
        events: the releases of one run, with their counts; Poisson samples, where Rényi divergences are known.
        expected_runs: mean of the distribution; finite, >= 1.
        distribution: of the number of runs: "poisson", "geometric", "logarithmic", or the shape > 0 of a truncated
            negative binomial distribution (1 is geometric, and towards 0 it is logarithmic).
        count: how often a best one was selected.

    Raises:
        ValueError, TypeError: a field is out of range, or the events are about different neighbours.
    """

    events: tuple[SampledGaussian, ...]
    expected_runs: float
    distribution: str | float = "poisson"
    count: int = 1

    def __post_init__(self) -> None:
        _set(self, events=tuple(self.events), count=whole(count=self.count))
        _set(self, expected_runs=at_least_one(expected_runs=self.expected_runs))
        if isinstance(self.distribution, str):
            one_of(DISTRIBUTIONS, distribution=self.distribution)
        else:
            _set(self, distribution=positive(distribution=self.distribution))
        if any(type(event) is not SampledGaussian or event.relation != RELATIONS[0] for event in self.events):
            raise ValueError(
                f"events of a selection must be SampledGaussian about {RELATIONS[0]}, whose divergences are known; "
                f"got {self.events!r}"
            )
        if len({event.unit for event in self.events}) != 1:
            raise ValueError(f"events of a selection must be about the same unit of privacy; got {self.events!r}")

    @property
    def noise_multiplier(self) -> float:
        """The least of a run's releases."""
        return min(event.noise_multiplier for event in self.events)

    @property
    def sample_rate(self) -> float:
        """The largest of a run's releases."""
        return max(event.sample_rate for event in self.events)


Event: TypeAlias = SampledRelease | JointGaussian | Selection
E = TypeVar("E", bound=Event)
EVENTS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        SampledGaussian,
        FixedSizeGaussian,
        TruncatedGaussian,
        CyclicPoissonGaussian,
        CyclicGaussian,
        JointGaussian,
        Selection,
    )
}


def merged(events: Iterable[E]) -> list[E]:
    """The same releases, one event for each distinct mechanism, counts added up; counts of zero are left out."""
    counts: dict[E, int] = {}
    for event in events:
        once = replace(event, count=1)
        counts[once] = counts.get(once, 0) + event.count
    return [replace(once, count=count) for once, count in counts.items() if count]


def mechanism_of(event: Event) -> str | None:
    """The name of the mechanism that it is a step of; None where steps don't add up to turns."""
    once = event.events[0] if isinstance(event, JointGaussian) else event
    return once.mechanism if isinstance(once, CyclicPoissonGaussian) else None


def within(event: E, mechanism: str, **fields: Any) -> E:
    """The event as one of a named mechanism; as it is, where steps don't add up to turns.

    Args:
        event: of one step.
        mechanism: a random name.
        fields: others of `CyclicPoissonGaussian`.
    """
    if isinstance(event, JointGaussian):
        return replace(event, events=tuple(within(part, mechanism, **fields) for part in event.events))
    if isinstance(event, CyclicPoissonGaussian):
        return replace(event, mechanism=mechanism, **fields)
    return event


def _set(event: Any, **values: Any) -> None:
    """Stores what a check made of a frozen field."""
    for name, value in values.items():
        object.__setattr__(event, name, value)
