"""Policies for the whole gradient: from per-example norms to weights, and the sensitivity those weights guarantee."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ghostclip.norms.reduce import margin
from ghostclip.validate import nonnegative, positive

__all__ = ["Automatic", "Custom", "Flat", "Policy", "checked_weights", "clamped", "flat_weights"]


@runtime_checkable
class Policy(Protocol):
    """Maps norms [B] to weights [B] such that ``weights * norms <= sensitivity`` for every example.

    ``sensitivity`` is the same for all physical batches of a logical one. One that may change from step to step is for
    the engine's own adaptive policies: see `ghostclip.clipping.choice.adapts`, and ``schedule`` of `PrivacyEngine`.
    """

    @property
    def sensitivity(self) -> float:
        """The L2 bound on one example's weighted gradient."""

    def weights(self, norms: Tensor) -> Tensor:
        """The factor [B] each example's gradient is multiplied with."""


def flat_weights(norms: Tensor, max_norm: float) -> Tensor:
    """``min(1, max_norm / norms)``, [B], a few units in the last place low; 1 for a norm of zero."""
    return (max_norm * margin(norms.dtype) / norms).clamp_(max=1.0)


@dataclass(frozen=True)
class Flat:
    """Flat clipping: one bound for the whole gradient, ``v_i = min(1, max_norm / ||g_i||)`` (Lee & Kifer 2020, eq. 2).

    A norm of zero gives weight 1. The quotient is rounded down by a few units in the last place, so that the weighted
    norm never exceeds ``max_norm``.
    """

    max_norm: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_norm", positive(max_norm=self.max_norm))

    @property
    def sensitivity(self) -> float:
        """``max_norm``."""
        return self.max_norm

    def weights(self, norms: Tensor) -> Tensor:
        """``min(1, max_norm / norms)``, [B]."""
        return flat_weights(norms, self.max_norm)


@dataclass(frozen=True)
class Automatic:
    """AUTO-S: ``v_i = max_norm / (||g_i|| + gamma)``, which scales every example (Bu et al. 2023)."""

    max_norm: float
    gamma: float = 0.01

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_norm", positive(max_norm=self.max_norm))
        object.__setattr__(self, "gamma", positive(gamma=self.gamma))

    @property
    def sensitivity(self) -> float:
        """``max_norm``."""
        return self.max_norm

    def weights(self, norms: Tensor) -> Tensor:
        """``max_norm / (norms + gamma)``, [B]."""
        return (self.max_norm * margin(norms.dtype)) / (norms + self.gamma)


@dataclass(frozen=True)
class Custom:
    """Weights by a function of yours (norms [B] -> weights [B]), clamped so that ``weights * norms <= sensitivity``.

    With ``groups`` ({group: name patterns}, as for `Grouped`) the function maps {group: norms} to {group: weights}. The
    clamp then bounds the root of the sum over groups of (weight * norm)^2.
    """

    function: Callable[[Any], Any]
    sensitivity: float
    groups: Mapping[str, Sequence[str]] | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"function must map norms [B] to weights [B]; got {self.function!r}")
        object.__setattr__(self, "sensitivity", nonnegative(sensitivity=self.sensitivity))

    def weights(self, norms: Tensor) -> Tensor:
        """The function's weights, clamped to ``sensitivity / norms``; raises ValueError on another shape."""
        return clamped(self.function(norms.clone()), norms, self.sensitivity)


def clamped(found: Any, norms: Tensor, sensitivity: float) -> Tensor:
    """The weights ``found`` [B], clamped to ``sensitivity / norms`` on both sides; ValueError on another shape."""
    found = checked_weights(found, norms, ", one per example")
    bound = (sensitivity * margin(norms.dtype)) / norms.clamp_min(torch.finfo(norms.dtype).tiny)
    return torch.minimum(torch.maximum(found, -bound), bound)


def checked_weights(found: Any, norms: Tensor, of: str) -> Tensor:
    """What a user's function returned for ``norms``, zero where it is NaN; ValueError for another shape than theirs."""
    if not isinstance(found, Tensor) or found.shape != norms.shape:
        shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"function must return weights of shape {list(norms.shape)}{of}; got {shape}")
    return torch.nan_to_num(found.to(norms.dtype), nan=0.0)
