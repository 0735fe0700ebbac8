"""From the arguments that all accounting functions share to the event they are about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ghostclip.events import RELATIONS, FixedSizeGaussian, SampledGaussian, SampledRelease, TruncatedGaussian
from ghostclip.validate import fraction, one_of, positive_int

__all__ = ["Setting"]

KINDS: dict[str, type[Any]] = {kind.sampling: kind for kind in (SampledGaussian, FixedSizeGaussian, TruncatedGaussian)}


@dataclass(frozen=True)
class Setting:
    """How the examples of each step are drawn, and which data sets are neighbours.

    Args:
        sample_rate: the expected size of a batch over that of the data set; in (0, 1].
        sampling: "poisson", "without_replacement" (batches of one size), or "truncated" (Poisson batches that are cut
            down to ``max_batch_size``).
        neighboring: "add_or_remove_one" or "replace_one".
        dataset_size, max_batch_size: with "truncated", and with nothing else; the batch is smaller than the data set.

    Raises:
        ValueError, TypeError: an argument is out of range; the message names it.
    """

    sample_rate: float
    sampling: str = "poisson"
    neighboring: str = "add_or_remove_one"
    dataset_size: int | None = None
    max_batch_size: int | None = None

    def __post_init__(self) -> None:
        fraction(sample_rate=self.sample_rate)
        one_of(tuple(KINDS), sampling=self.sampling)
        one_of(RELATIONS, neighboring=self.neighboring)
        for name in ("dataset_size", "max_batch_size"):
            value = getattr(self, name)
            if self.sampling == "truncated":
                if value is None:
                    raise ValueError(f'{name} must be given with sampling="truncated": a whole number >= 1; got None')
                positive_int(**{name: value})
            elif value is not None:
                raise ValueError(f'{name} must be left out unless sampling="truncated"; got {value!r}')

    def event(self, noise_multiplier: float, steps: int = 1) -> SampledRelease:
        """What so many steps are charged as."""
        truncated = self.sampling == "truncated"
        cut = {"dataset_size": self.dataset_size, "max_batch_size": self.max_batch_size} if truncated else {}
        return KINDS[self.sampling](self.sample_rate, noise_multiplier, steps, self.neighboring, **cut)
