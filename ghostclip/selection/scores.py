"""Scores that were computed on private data: they get noise, which every run is charged for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from ghostclip.errors import PrivacyError
from ghostclip.noise import Noise, noise_source
from ghostclip.validate import positive

__all__ = ["NoisyScore", "asking", "is_asking"]

# What a search asks now, ``train`` or ``score``; None outside of searches.
_asked: ContextVar[Any] = ContextVar("asked by a search", default=None)


@contextmanager
def asking(function: Any) -> Iterator[None]:
    """Inside, ``function`` may be asked where it is a `NoisyScore`: the search is charged for it; no other may."""
    token = _asked.set(function)
    try:
        yield
    finally:
        _asked.reset(token)


def is_asking() -> bool:
    """Whether this is called by a search's ``train`` or ``score``."""
    return _asked.get() is not None


@dataclass(frozen=True)
class NoisyScore:
    """A score computed on private data, to which `ghostclip.select` adds Gaussian noise.

    The noise has standard deviation ``noise_multiplier * sensitivity``, and each run is charged for it as for one more
    release over all examples. Outside of ``select(score=...)`` nothing is charged, so it can't be asked there.

    Args:
        function: result -> float, larger is better. One example's presence must move it by at most ``sensitivity``:
            a number of correct answers by 1. The size of the data is public, so divide by it afterwards if at all.
        noise_multiplier: finite, > 0.
        sensitivity: finite, > 0.

    Raises:
        ValueError, TypeError: an argument is out of range.
    """

    function: Callable[[Any], float]
    noise_multiplier: float
    sensitivity: float = 1.0

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"function must be callable: result -> float; got {self.function!r}")
        positive(noise_multiplier=self.noise_multiplier)
        positive(sensitivity=self.sensitivity)

    def __call__(self, result: Any) -> float:
        """The noisy score of a result; NaN counts as 0 before the noise, so that it shows nothing.

        Raises:
            PrivacyError: nobody is charged for it: it is asked outside of ``select(score=...)``.
        """
        if _asked.get() is not self:
            raise PrivacyError(
                "a NoisyScore was asked outside of select(score=...), where nothing is charged for it; give "
                "select(score=...) the NoisyScore itself, and ask it nowhere else: not in train, not in another score, "
                "and not after the search, whose best.score it is"
            )
        exact = torch.tensor([float(self.function(result))], dtype=torch.float64, device="cpu").nan_to_num(nan=0.0)
        source: Noise = noise_source()
        (noisy,) = source.release([exact], self.noise_multiplier * self.sensitivity)
        return float(noisy)
