"""Threshold rules: the norm C_k to which each group's gradients are clipped.

The sensitivity of separate thresholds is the root of the sum of their squares.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from ghostclip.clipping.allocation import same_groups
from ghostclip.validate import nonnegative, open_fraction, positive

__all__ = [
    "COUNT_NOISE_SHARE",
    "ByDimension",
    "EqualShare",
    "Fixed",
    "JointBound",
    "Quantiles",
    "ThresholdRule",
    "counted",
    "followed",
]

# Thresholds that follow noisy counts stay within this factor of where they began, so that noise alone can't carry them
# out of floating point.
MOST_CHANGE = 1e12
# The default noise on the counts is that share of the expected batch size (Andrew et al. 2021, section 3).
COUNT_NOISE_SHARE = 0.05


def counted(norms: Tensor, threshold: float) -> Tensor:
    """[], float64: the sum of +1/2 for norms [B] up to the threshold and -1/2 for others (or NaN); private."""
    return torch.where(norms <= threshold, 0.5, -0.5).sum(dtype=torch.float64)


def followed(threshold: float, begun: float, step: float) -> float:
    """``threshold * exp(-step)``, within MOST_CHANGE of where it began (Andrew et al. 2021, algorithm 1)."""
    least, most = math.log(begun / MOST_CHANGE), math.log(begun * MOST_CHANGE)
    return math.exp(min(max(math.log(threshold) - step, least), most))


class ThresholdRule(ABC):
    """{group: number of entries} -> {group: threshold}."""

    @abstractmethod
    def thresholds(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """{group: C_k > 0} for the groups of a partition.

        Args:
            sizes: {group: number of entries}.

        Raises:
            ValueError: the rule is about other groups.
        """


@dataclass(frozen=True)
class Fixed(ThresholdRule):
    """Thresholds of the user's: one number for each group, or the same number for all.

    Args:
        norm: {group: norm > 0} for exactly the groups of the partition, or one norm. A name with ``*``, ``?`` or
            ``[...]`` is a pattern: each group whose name it fits has that norm, unless the group's own name is there.
    """

    norm: Mapping[str, float] | float

    def __post_init__(self) -> None:
        given = self.norm
        if isinstance(given, Mapping):
            if not given:
                raise ValueError("norm must be a number or {group: number} with at least one group; got {}")
            checked = {group: positive(**{f"norm[{group!r}]": value}) for group, value in given.items()}
            object.__setattr__(self, "norm", checked)
        else:
            object.__setattr__(self, "norm", positive(norm=given))

    def thresholds(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """{group: norm}."""
        if not isinstance(self.norm, Mapping):
            return dict.fromkeys(sizes, self.norm)
        fits = {group: _names_for(group, self.norm) for group in sizes}
        same_groups("thresholds", {name for group in sizes for name in fits[group] or [group]}, set(self.norm))
        for group, names in fits.items():
            if len(names) > 1:
                raise ValueError(f"thresholds must fit each group once; {group!r} fits {', '.join(map(repr, names))}")
        return {group: self.norm[names[0]] for group, names in fits.items()}


def _names_for(group: str, names: Mapping[str, float]) -> list[str]:
    """The group's own name where it is among ``names``, else the patterns that fit it."""
    return [group] if group in names else [name for name in names if fnmatchcase(group, name)]


@dataclass(frozen=True)
class EqualShare(ThresholdRule):
    """``max_norm / sqrt(K)`` for each of K groups, so that the sensitivity is ``max_norm`` (McMahan et al. 2018)."""

    max_norm: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_norm", positive(max_norm=self.max_norm))

    def thresholds(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """{group: max_norm / sqrt(K)}."""
        return dict.fromkeys(sizes, self.max_norm / math.sqrt(max(1, len(sizes))))


@dataclass(frozen=True)
class ByDimension(ThresholdRule):
    """``max_norm * sqrt(d_k / sum_j d_j)`` for a group of d_k entries, so that the sensitivity is ``max_norm``."""

    max_norm: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_norm", positive(max_norm=self.max_norm))

    def thresholds(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """{group: max_norm * sqrt(d_k / sum_j d_j)}."""
        total = sum(sizes.values())
        return {group: self.max_norm * math.sqrt(size / total) for group, size in sizes.items()}


@dataclass(frozen=True)
class JointBound(ThresholdRule):
    """Weights of all groups by one function of all their norms, with one bound for the whole gradient.

    Args:
        function: {group: norms [B]} -> {group: weights [B]}; where the root of the sum over groups of
            (weight * norm)^2 passes ``max_norm`` for an example, all its weights are scaled down to it.
        max_norm: the sensitivity.
    """

    function: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
    max_norm: float

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"function must map {{group: norms [B]}} to {{group: weights [B]}}; got {self.function!r}")
        object.__setattr__(self, "max_norm", positive(max_norm=self.max_norm))

    def thresholds(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """{group: max_norm}: one group may have all of it."""
        return dict.fromkeys(sizes, self.max_norm)


class Quantiles(ThresholdRule):
    """Each group's threshold follows a quantile of its norms, seen through noisy counts (He et al. 2023).

    With each step the engine releases, for each group, the sum of +1/2 for each norm of at most C_k and -1/2 for each
    other one, with Gaussian noise of standard deviation ``count_noise``. One example moves K counts by 1/2 each, so
    they add ``K / (4 count_noise^2)`` to the square of (sensitivity / standard deviation) of the step, and are charged
    together with the gradients as one release. With b_k the share of the expected batch size that count k makes, plus
    1/2, ``C_k <- C_k * exp(-learning_rate * (b_k - target_quantile))`` (Andrew et al. 2021, algorithm 1, per group).

    Args:
        start: the thresholds to begin with, a rule; a number C is ``EqualShare(C)``.
        target_quantile: the share of norms that are to be at most C_k; in (0, 1).
        learning_rate: how fast thresholds move.
        count_noise: standard deviation of the noise on each count, in examples; None: ``0.05 * batch_size * sqrt(K)``.
        floor: no threshold falls below it; 0: no floor.
        max_norm: the thresholds are the quantiles' estimates multiplied by the number for which the sensitivity is
            ``max_norm``; counts are about the estimates. None: thresholds are the estimates themselves, and the
            sensitivity moves with them.

    Raises:
        ValueError, TypeError: an argument is out of range, or both ``floor`` and ``max_norm`` are given.
    """

    def __init__(
        self,
        start: ThresholdRule | float = 1.0,
        target_quantile: float = 0.5,
        learning_rate: float = 0.2,
        count_noise: float | None = None,
        floor: float = 0.0,
        max_norm: float | None = None,
    ) -> None:
        self.start = start if isinstance(start, ThresholdRule) else EqualShare(positive(start=start))
        self.target_quantile = open_fraction(target_quantile=target_quantile)
        self.learning_rate = positive(learning_rate=learning_rate)
        self.count_noise = None if count_noise is None else positive(count_noise=count_noise)
        self.floor = nonnegative(floor=floor)
        self.max_norm = None if max_norm is None else positive(max_norm=max_norm)
        if self.floor and self.max_norm is not None:
            raise ValueError("floor and max_norm exclude each other: scaling to max_norm would undercut the floor")
        self._begun: dict[str, float] = {}
        self._now: dict[str, float] = {}  # {group: estimate of the quantile of its norms}

    def __repr__(self) -> str:
        options = ("start", "target_quantile", "learning_rate", "count_noise", "floor", "max_norm")
        return f"Quantiles({', '.join(f'{name}={getattr(self, name)!r}' for name in options)})"

    def anew(self) -> Quantiles:
        """A copy that has learnt nothing yet."""
        found = copy.copy(self)
        found._begun, found._now = {}, {}
        return found

    def thresholds(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """{group: C_k} as they are now."""
        if not self._now:
            self._begun = self.start.thresholds(sizes)
            self._now = self._floored(self._begun)
        same_groups("the thresholds that were adapted", set(sizes), set(self._now))
        if self.max_norm is None:
            return dict(self._now)
        scale = self.max_norm / math.hypot(*self._now.values())
        return {group: norm * scale for group, norm in self._now.items()}

    def count_noise_for(self, batch_size: int, groups: int) -> float:
        """The standard deviation of the noise on each count, for an expected batch size and K groups."""
        if self.count_noise is not None:
            return self.count_noise
        return COUNT_NOISE_SHARE * batch_size * math.sqrt(groups)

    def counts(self, norms: Mapping[str, Tensor]) -> Tensor:
        """[K], float64: for each group the sum of +1/2 for norms [B] up to its estimate, -1/2 for others; private."""
        return torch.stack([counted(norms[group], norm) for group, norm in self._now.items()])

    def update(self, shares: Sequence[float]) -> None:
        """Moves the estimates, given each group's noisy share of norms of at most its own."""
        for group, share in zip(list(self._now), shares, strict=True):
            step = self.learning_rate * (share - self.target_quantile)
            self._now[group] = followed(self._now[group], self._begun[group], step)
        self._now = self._floored(self._now)

    def _floored(self, estimates: Mapping[str, float]) -> dict[str, float]:
        return {group: max(norm, self.floor) for group, norm in estimates.items()}

    def state_dict(self) -> dict[str, Any]:
        """What training changes: the quantiles' estimates, and where they began."""
        return {"thresholds": dict(self._now), "begun": dict(self._begun)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a `state_dict` back; raises ValueError or TypeError when it holds no thresholds."""
        for name in ("thresholds", "begun"):
            if not isinstance(state.get(name), Mapping):
                raise TypeError(f"the state must hold {name} as {{group: norm}}; got {state.get(name)!r}")
        now = {group: positive(threshold=norm) for group, norm in state["thresholds"].items()}
        begun = {group: positive(threshold=norm) for group, norm in state["begun"].items()}
        same_groups("the thresholds stored", set(now), set(begun))
        self._now, self._begun = now, begun
