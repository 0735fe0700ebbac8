"""What happened, as plain data: the releases that are charged, read by accountants and ledgers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ghostclip.validate import fraction, nonnegative, one_of, whole

__all__ = ["RELATIONS", "SampledGaussian", "merged"]

RELATIONS = ("add_or_remove_one",)


@dataclass(frozen=True)
class SampledGaussian:
    """A sum over a Poisson sample, released with Gaussian noise (Abadi et al. 2016; Mironov et al. 2019).

    Attributes:
        sample_rate: the probability with which each example is in the sample, independently of the others; in (0, 1].
        noise_multiplier: standard deviation of the noise over the L2 sensitivity of the sum; 0 means no protection.
        count: how often it happened.
        relation: which data sets are neighbours; "add_or_remove_one": they differ by one example's presence.

    Raises:
        ValueError, TypeError: a field is out of range.
    """

    sample_rate: float
    noise_multiplier: float
    count: int = 1
    relation: str = "add_or_remove_one"

    def __post_init__(self) -> None:
        object.__setattr__(self, "sample_rate", fraction(sample_rate=self.sample_rate))
        object.__setattr__(self, "noise_multiplier", nonnegative(noise_multiplier=self.noise_multiplier))
        object.__setattr__(self, "count", whole(count=self.count))
        one_of(RELATIONS, relation=self.relation)


def merged(events: Iterable[SampledGaussian]) -> list[SampledGaussian]:
    """The same releases, one event for each distinct mechanism, counts added up; counts of zero are left out."""
    counts: dict[SampledGaussian, int] = {}
    for event in events:
        once = replace(event, count=1)
        counts[once] = counts.get(once, 0) + event.count
    return [replace(once, count=count) for once, count in counts.items() if count]
