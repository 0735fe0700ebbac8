"""Scalings: from an example's norm in a group and the group's threshold to the weight of its gradient there.

Each is a function of norms n [B] (or [groups, B]) and a threshold C > 0 (a number, or [groups, 1]). The weighted norm
``weight * n`` is at most C for every n >= 0; `ghostclip.clipping.Composed` enforces that for a scaling of the user's.

| scaling | weight | at n = 0 | source |
| --- | --- | --- | --- |
| `Clip` | min(1, C / n) | 1 | Abadi et al. 2016 |
| `AutoS` | C / (n + gamma) | C / gamma | Bu et al. 2023, AUTO-S; normalised SGD of Yang et al. 2022 |
| `AutoV` | C / n | 0 | Bu et al. 2023, AUTO-V |
| `Psac` | C / (n + r / (n + r)) | C | Xia et al. 2023, DP-PSAC |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ghostclip.validate import positive

__all__ = ["AutoS", "AutoV", "Clip", "NormScaling", "Psac"]


class NormScaling(Protocol):
    """(norms, threshold) -> weights."""

    def __call__(self, norms: Tensor, threshold: Tensor, /) -> Tensor:
        """Weights of the shape of ``norms``; ``threshold`` broadcasts against it."""


@dataclass(frozen=True)
class Clip:
    """``min(1, C / n)``."""

    def __call__(self, norms: Tensor, threshold: Tensor, /) -> Tensor:
        """Weights of the shape of ``norms``."""
        return (threshold / norms).clamp_(max=1.0)


@dataclass(frozen=True)
class AutoS:
    """``C / (n + gamma)``, gamma > 0."""

    gamma: float = 0.01

    def __post_init__(self) -> None:
        object.__setattr__(self, "gamma", positive(gamma=self.gamma))

    def __call__(self, norms: Tensor, threshold: Tensor, /) -> Tensor:
        """Weights of the shape of ``norms``."""
        return threshold / (norms + self.gamma)


@dataclass(frozen=True)
class AutoV:
    """``C / n``: every gradient gets the norm C; 0 for norms so near zero that the quotient overflows."""

    def __call__(self, norms: Tensor, threshold: Tensor, /) -> Tensor:
        """Weights of the shape of ``norms``."""
        found = threshold / norms
        return found.masked_fill(torch.isinf(found), 0.0)


@dataclass(frozen=True)
class Psac:
    """``C / (n + r / (n + r))``, r > 0: small gradients are scaled up by C at most, where AUTO-S has C / gamma."""

    r: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "r", positive(r=self.r))

    def __call__(self, norms: Tensor, threshold: Tensor, /) -> Tensor:
        """Weights of the shape of ``norms``."""
        return threshold / (norms + self.r / (norms + self.r))
