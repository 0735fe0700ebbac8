"""Group-wise policies: each group of parameters is clipped on its own (McMahan et al. 2018, section 3; He et al. 2023).

With one threshold c_k a group, one example's contribution is at most ``sqrt(sum_k c_k^2)`` in all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ghostclip.clipping.allocation import same_groups
from ghostclip.clipping.partitions import ByLayer, ByName, Partition, as_partition
from ghostclip.clipping.policies import checked_weights, flat_weights
from ghostclip.errors import PrivacyError
from ghostclip.norms.reduce import margin
from ghostclip.validate import positive

__all__ = ["CustomGroups", "Grouped", "Groupwise", "PerLayer", "Thresholds", "joint_weights"]


class Groupwise(ABC):
    """A policy that gives each group of parameters weights of its own."""

    @property
    @abstractmethod
    def sensitivity(self) -> float:
        """The L2 bound on one example's whole weighted gradient."""

    @abstractmethod
    def partition(self, sizes: Mapping[str, int]) -> dict[str, str]:
        """{parameter name: group} for {parameter name: number of entries} of the trained parameters.

        Raises ValueError where that isn't possible.
        """

    @abstractmethod
    def weights(self, norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """{group: [B]} from {group: [B]}, for all groups of a partition at once."""


class Thresholds(Groupwise):
    """Clips each group by its own norm: example i's gradient in group k is weighed by ``min(1, c_k / ||g_i,k||)``.

    Either ``thresholds`` are the c_k, or each of the groups has an equal share of ``max_norm``.
    """

    max_norm: Any
    thresholds: Mapping[str, float] | None

    @property
    def sensitivity(self) -> float:
        """``max_norm``, or the root of the sum of the squared thresholds."""
        return self.max_norm if self.thresholds is None else math.hypot(*self.thresholds.values())

    def bounds(self, groups: Collection[str]) -> Mapping[str, float]:
        """{group: c_k} for all groups of a partition."""
        if self.thresholds is not None:
            return self.thresholds
        return dict.fromkeys(groups, self.max_norm / math.sqrt(max(1, len(groups))))

    def weights(self, norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """{group: [B]} from {group: [B]}, for all groups of a partition."""
        bounds = self.bounds(norms)
        return {group: flat_weights(norm, bounds[group]) for group, norm in norms.items()}

    def _check(self) -> None:
        """Checks max_norm and thresholds, of which one may be given; 1.0 is the max_norm without both."""
        if self.thresholds is None:
            given = 1.0 if self.max_norm is None else self.max_norm
            if isinstance(given, Mapping):
                raise TypeError("max_norm must be a number; give {name: norm} as thresholds")
            object.__setattr__(self, "max_norm", positive(max_norm=given))
            return
        if self.max_norm is not None:
            raise ValueError(
                "max_norm and thresholds exclude each other: thresholds bound one group each, max_norm all"
            )
        if not isinstance(self.thresholds, Mapping) or not self.thresholds:
            raise TypeError(f"thresholds must be {{name: norm}}; got {self.thresholds!r}")
        checked = {name: positive(**{f"thresholds[{name!r}]": value}) for name, value in self.thresholds.items()}
        object.__setattr__(self, "thresholds", checked)


@dataclass(frozen=True)
class PerLayer(Thresholds):
    """Per-layer clipping. A layer is the module that owns a parameter by its first name.

    Args:
        max_norm: the sensitivity of the whole gradient. Each of m trained layers gets the threshold
            max_norm / sqrt(m). A dict is taken as ``thresholds``.
        thresholds: {layer: norm} with every trained layer, in place of ``max_norm``. The model itself is "". A name
            with ``*``, ``?`` or ``[...]`` is a pattern, as in `Fixed`: each layer that it fits is clipped to that norm.

    Raises:
        ValueError: both are given, or a number is out of range; in `partition` also: layers and thresholds differ.
        PrivacyError: in `sensitivity`: it depends on the model, since there are patterns.
    """

    max_norm: float | Mapping[str, float] | None = None
    thresholds: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.max_norm, Mapping) and self.thresholds is None:
            object.__setattr__(self, "thresholds", self.max_norm)
            object.__setattr__(self, "max_norm", None)
        self._check()

    @property
    def has_patterns(self) -> bool:
        """Whether a threshold is for all layers that a pattern fits."""
        return any(mark in name for name in self.thresholds or () for mark in "*?[")

    @property
    def sensitivity(self) -> float:
        """``max_norm``, or the root of the sum of the squared thresholds."""
        if self.has_patterns:
            raise PrivacyError("the layers that a pattern fits are known once PerLayer is given to a model")
        return super().sensitivity

    def partition(self, sizes: Mapping[str, int]) -> dict[str, str]:
        """{parameter name: name of its layer}."""
        found = ByLayer().groups(sizes)
        if self.thresholds is not None:
            same_groups("thresholds", set(found.values()), set(self.thresholds))
        return found


@dataclass(frozen=True)
class Grouped(Thresholds):
    """Clipping group by group, with groups of parameters by name.

    Args:
        groups: {group: patterns}. A pattern is a name, or has ``*``, ``?`` or ``[...]``. It is matched with the name of
            a parameter and of the module that owns it. Every trained parameter must be in exactly one group.
        thresholds: {group: norm} with every group; or
        max_norm: the sensitivity of the whole gradient. Each of k groups gets the threshold max_norm / sqrt(k).
            Default 1.0.

    Raises:
        ValueError: a number is out of range, names don't agree; in `partition`: a parameter in no group or in several.
        TypeError: ``groups`` is not a mapping to lists of patterns.
    """

    groups: Mapping[str, Sequence[str]]
    thresholds: Mapping[str, float] | None = None
    max_norm: float | None = None

    def __post_init__(self) -> None:
        ByName(self.groups)
        self._check()
        if self.thresholds is not None:
            same_groups("thresholds", set(self.groups), set(self.thresholds))

    def partition(self, sizes: Mapping[str, int]) -> dict[str, str]:
        """{parameter name: group}."""
        return as_partition(self.groups).groups(sizes)


@dataclass(frozen=True)
class CustomGroups(Groupwise):
    """``Custom(function, sensitivity, groups=...)``: weights of all groups from the norms of all groups.

    Args:
        function: {group: norms [B]} -> {group: weights [B]}; where the root of the sum over groups of
            (weight * norm)^2 passes ``bound`` for an example, all its weights are scaled down to it.
        bound: the sensitivity; both are checked by `Custom`.
        groups: as for `Grouped`, or a partition.
    """

    function: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
    bound: float
    groups: Partition | Mapping[str, Sequence[str]]

    def __post_init__(self) -> None:
        as_partition(self.groups)

    @property
    def sensitivity(self) -> float:
        """The L2 bound on one example's whole weighted gradient."""
        return self.bound

    def partition(self, sizes: Mapping[str, int]) -> dict[str, str]:
        """{parameter name: group}."""
        return as_partition(self.groups).groups(sizes)

    def weights(self, norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The function's weights, scaled down together; raises ValueError for other groups or shapes."""
        return joint_weights(self.function, self.bound, norms)


def joint_weights(
    function: Callable[[dict[str, Tensor]], Mapping[str, Tensor]], bound: float, norms: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The function's weights, scaled down where the whole weighted gradient passes ``bound``; see `CustomGroups`."""
    given = function({group: norm.clone() for group, norm in norms.items()})
    if not isinstance(given, Mapping) or set(given) != set(norms):
        got = sorted(given) if isinstance(given, Mapping) else type(given).__name__
        raise ValueError(f"function must return weights for the groups {sorted(norms)}; got {got}")
    found = {group: checked_weights(given[group], norm, f" for {group!r}") for group, norm in norms.items()}
    # In float64: the products of large weights and norms must not overflow to inf, nor small factors to zero.
    parts = torch.stack([found[group].double() * norm.double() for group, norm in norms.items()])
    whole = torch.linalg.vector_norm(parts, dim=0).clamp_min(torch.finfo(torch.float64).tiny)
    factor = ((bound * margin(next(iter(found.values())).dtype)) / whole).clamp(max=1.0)
    return {group: (weights.double() * factor).to(weights.dtype) for group, weights in found.items()}
