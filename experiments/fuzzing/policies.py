"""Clipping policies with formulas of their own, independent of the package's, for what weights must be."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ghostclip.clipping import Adaptive, Automatic, Custom, Flat, Grouped, PerLayer

__all__ = ["KINDS", "Expected", "draw_policy"]

KINDS = ("flat", "per layer", "grouped", "automatic", "custom", "custom groups", "adaptive")
Norms = dict[str, Tensor]


@dataclass(frozen=True)
class Expected:
    """A policy, and what it must do.

    Attributes:
        kind: of KINDS.
        policy: for GhostClip.
        group_of: {parameter: group}; "" for all where there is one.
        weights: {group: norms [B]} -> {group: weights [B]}, each of which falls as norms grow.
        bound: the sensitivity.
    """

    kind: str
    policy: Any
    group_of: dict[str, str]
    weights: Callable[[Norms], Norms]
    bound: float


def draw_policy(choose: random.Random, kind: str, names: Sequence[str], bound: float) -> Expected:
    """A policy of that kind for trained parameters of those names."""
    one = dict.fromkeys(names, "")
    if kind == "flat":
        policy = bound if choose.random() < 0.5 else Flat(bound)
        return Expected(kind, policy, one, lambda n: {g: _least(bound / v) for g, v in n.items()}, bound)
    if kind == "adaptive":
        policy = Adaptive(bound, count_noise=10.0)
        return Expected(kind, policy, one, lambda n: {g: _least(bound / v) for g, v in n.items()}, bound)
    if kind == "automatic":
        gamma = choose.choice([0.01, 1e-4, 1.0])
        return Expected(
            kind, Automatic(bound, gamma), one, lambda n: {g: bound / (v + gamma) for g, v in n.items()}, bound
        )
    if kind == "custom":
        function = lambda n: 1e2 / (1e-3 + n).sqrt()  # noqa: E731
        return Expected(
            kind, Custom(function, bound), one,
            lambda n: {g: torch.minimum(function(v), bound / v) for g, v in n.items()}, bound,
        )  # fmt: skip
    groups = _layers(names) if kind == "per layer" else _drawn_groups(choose, names)
    if kind == "custom groups":
        return _custom_groups(groups, bound)
    policy, bounds = _thresholds(choose, kind, groups, bound)
    return Expected(
        kind, policy, groups, lambda n: {g: _least(bounds[g] / v) for g, v in n.items()}, math.hypot(*bounds.values())
    )


def _thresholds(choose: random.Random, kind: str, groups: dict[str, str], bound: float) -> tuple[Any, dict[str, float]]:
    names = list(dict.fromkeys(groups.values()))
    patterns = {group: [name for name, own in groups.items() if own == group] for group in names}
    if choose.random() < 0.5:
        bounds = {name: bound * 10 ** choose.uniform(-1, 1) for name in names}
        if kind == "per layer":
            return PerLayer(thresholds=bounds), bounds
        return Grouped(patterns, thresholds=bounds), bounds
    shares = dict.fromkeys(names, bound / math.sqrt(max(1, len(names))))
    return PerLayer(bound) if kind == "per layer" else Grouped(patterns, max_norm=bound), shares


def _custom_groups(groups: dict[str, str], bound: float) -> Expected:
    patterns: dict[str, list[str]] = {}
    for name, group in groups.items():
        patterns.setdefault(group, []).append(name)

    def function(norms: Norms) -> Norms:
        return {group: 3.0 / (0.1 + norm) for group, norm in norms.items()}

    def weights(norms: Norms) -> Norms:
        free = function(norms)
        whole = torch.stack([free[group] * norm for group, norm in norms.items()]).norm(dim=0)
        factor = _least(bound / whole)
        return {group: weight * factor for group, weight in free.items()}

    return Expected("custom groups", Custom(function, bound, groups=patterns), groups, weights, bound)


def _least(weights: Tensor) -> Tensor:
    """min(1, weights), 1 where a norm of zero made them inf or NaN."""
    return weights.nan_to_num(nan=1.0).clamp(max=1.0)


def _layers(names: Sequence[str]) -> dict[str, str]:
    return {name: name.rpartition(".")[0] for name in names}


def _drawn_groups(choose: random.Random, names: Sequence[str]) -> dict[str, str]:
    count = choose.choice([1, 2, 2, 3])
    return {name: f"group {choose.randrange(count)}" for name in names}
