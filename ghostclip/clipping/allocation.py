"""Noise allocations: the standard deviation s_k of the noise in each group's sum, for separate thresholds C_k.

One example changes the sum of group k by at most C_k. A release with noise s_k in group k is a Gaussian mechanism of
noise multiplier sigma, whatever the s_k, where ``sum_k (C_k / s_k)^2 = 1 / sigma^2``: divide each group by its s_k,
and the sensitivity is the root of that sum. Every allocation here satisfies the equation exactly.

| allocation | s_k |
| --- | --- |
| `GlobalNoise` | sigma sqrt(sum_j C_j^2), alike in all groups |
| `EqualNoise` | sigma sqrt(K) C_k: each group spends the same |
| `OptimalNoise` | s_k^2 = sigma^2 (C_k / sqrt(d_k)) sum_j C_j sqrt(d_j), for d_k entries: least sum_k d_k s_k^2 |
| `ProportionalNoise` | proportional to numbers of the user's |
| `GivenNoise` | the user's own, checked |
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from ghostclip.validate import positive

__all__ = ["EqualNoise", "GivenNoise", "GlobalNoise", "NoiseAllocation", "OptimalNoise", "ProportionalNoise"]

# Relative error of 1 / sigma^2 that rounding of given numbers may make.
TOLERANCE = 1e-9


class NoiseAllocation(ABC):
    """{group: standard deviation of the noise in its sum}."""

    @abstractmethod
    def proportions(self, thresholds: Mapping[str, float], sizes: Mapping[str, int]) -> dict[str, float]:
        """{group: a number > 0 that s_k is proportional to}.

        Args:
            thresholds: {group: C_k}.
            sizes: {group: number of entries d_k}.
        """

    def stds(self, sigma: float, thresholds: Mapping[str, float], sizes: Mapping[str, int]) -> dict[str, float]:
        """{group: s_k} with ``sum_k (C_k / s_k)^2 = 1 / sigma^2``; zeros for a sigma of 0.

        Args:
            sigma: the noise multiplier.
            thresholds: {group: C_k}, each > 0.
            sizes: {group: number of entries d_k}.

        Raises:
            ValueError: the allocation names other groups.
        """
        shares = self.proportions(thresholds, sizes)
        scale = sigma * math.hypot(*(thresholds[group] / share for group, share in shares.items()))
        return {group: scale * share for group, share in shares.items()}

    def stds_of_joint_bound(self, sigma: float, max_norm: float, sizes: Mapping[str, int]) -> dict[str, float]:
        """{group: s_k} with ``min_k s_k = sigma * max_norm``, for one bound on all groups together.

        One example may put all of its share into the group with the least noise.
        """
        shares = self.proportions(dict.fromkeys(sizes, max_norm), sizes)
        scale = sigma * max_norm / min(shares.values())
        return {group: scale * share for group, share in shares.items()}


@dataclass(frozen=True)
class GlobalNoise(NoiseAllocation):
    """The same noise in every entry of every group."""

    def proportions(self, thresholds: Mapping[str, float], sizes: Mapping[str, int]) -> dict[str, float]:
        """{group: 1}."""
        return dict.fromkeys(thresholds, 1.0)


@dataclass(frozen=True)
class EqualNoise(NoiseAllocation):
    """Noise in proportion to the thresholds: each group spends the same share of the budget."""

    def proportions(self, thresholds: Mapping[str, float], sizes: Mapping[str, int]) -> dict[str, float]:
        """{group: C_k}."""
        return dict(thresholds)


@dataclass(frozen=True)
class OptimalNoise(NoiseAllocation):
    """The least expected squared norm of all noise, ``sum_k d_k s_k^2``, for the given sigma and thresholds."""

    def proportions(self, thresholds: Mapping[str, float], sizes: Mapping[str, int]) -> dict[str, float]:
        """{group: sqrt(C_k / sqrt(d_k))}."""
        return {group: math.sqrt(bound / math.sqrt(sizes[group])) for group, bound in thresholds.items()}


@dataclass(frozen=True)
class ProportionalNoise(NoiseAllocation):
    """Noise in proportion to numbers of the user's.

    Args:
        of: {group: a number > 0}, for exactly the groups of the partition.
    """

    of: Mapping[str, float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "of", _positive_numbers("of", self.of))

    def proportions(self, thresholds: Mapping[str, float], sizes: Mapping[str, int]) -> dict[str, float]:
        """The numbers given."""
        same_groups("the noise allocation", set(thresholds), set(self.of))
        return {group: self.of[group] for group in thresholds}


@dataclass(frozen=True)
class GivenNoise(NoiseAllocation):
    """Standard deviations of the user's own, which must satisfy the equation for the noise multiplier in use.

    Args:
        std: {group: s_k > 0}, for exactly the groups of the partition.

    Raises:
        ValueError: in `stds`: they give another noise multiplier, which the message states.
    """

    std: Mapping[str, float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "std", _positive_numbers("std", self.std))

    def proportions(self, thresholds: Mapping[str, float], sizes: Mapping[str, int]) -> dict[str, float]:
        """The standard deviations given."""
        same_groups("the noise allocation", set(thresholds), set(self.std))
        return {group: self.std[group] for group in thresholds}

    def stds(self, sigma: float, thresholds: Mapping[str, float], sizes: Mapping[str, int]) -> dict[str, float]:
        """The standard deviations given; zeros for a sigma of 0."""
        given = self.proportions(thresholds, sizes)
        found = 1.0 / math.hypot(*(thresholds[group] / std for group, std in given.items()))
        return self._checked(sigma, found, given)

    def stds_of_joint_bound(self, sigma: float, max_norm: float, sizes: Mapping[str, int]) -> dict[str, float]:
        """The standard deviations given; zeros for a sigma of 0."""
        given = self.proportions(dict.fromkeys(sizes, max_norm), sizes)
        return self._checked(sigma, min(given.values()) / max_norm, given)

    def _checked(self, sigma: float, found: float, given: dict[str, float]) -> dict[str, float]:
        """``given``, whose noise multiplier is ``found``."""
        if not sigma:
            return dict.fromkeys(given, 0.0)
        if not math.isclose(found, sigma, rel_tol=TOLERANCE):
            raise ValueError(
                f"the standard deviations given make a noise multiplier of {found!r} with these thresholds, and the "
                f"step has {sigma!r}; multiply each by {sigma / found!r}, or use ProportionalNoise, which does that"
            )
        return given


def same_groups(kind: str, needed: set[str], given: set[str]) -> None:
    """Raises ValueError unless the groups given are those needed."""
    if needed != given:
        missing, unknown = sorted(needed - given), sorted(given - needed)
        begins = [name for name in unknown if any(group.startswith(f"{name}.") for group in missing)]
        hint = f"; {begins[0]}.* stands for all that begin so" if begins and kind == "thresholds" else ""
        if not missing:
            hint = "; a group whose parameters are all frozen is none: build a policy and an engine for what is trained"
        raise ValueError(
            f"{kind} must name each group once; missing: {missing or 'none'}, unknown: {unknown or 'none'}{hint}"
        )


def _positive_numbers(name: str, given: object) -> dict[str, float]:
    if not isinstance(given, Mapping) or not given:
        raise TypeError(f"{name} must be {{group: number > 0}}; got {given!r}")
    return {group: positive(**{f"{name}[{group!r}]": value}) for group, value in given.items()}
