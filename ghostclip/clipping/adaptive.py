"""A clipping norm that follows a quantile of the gradients' norms, seen through a noisy count alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ghostclip.clipping.policies import flat_weights
from ghostclip.clipping.thresholds import COUNT_NOISE_SHARE, counted, followed
from ghostclip.validate import open_fraction, positive

__all__ = ["Adaptive"]


@dataclass(eq=False)
class Adaptive:
    """Flat clipping with a ``max_norm`` that follows a quantile of the gradient norms.

    Each step of a `PrivacyEngine` also releases a noisy count of the examples with norms of at most ``max_norm``: the
    sum of +1/2 for each such example and -1/2 for each other one, with Gaussian noise of standard deviation
    ``count_noise``. One example changes the sum by at most 1/2. With b = sum / ``batch_size`` + 1/2 the update is
    ``max_norm <- max_norm * exp(-learning_rate * (b - target_quantile))`` (Andrew et al. 2021, "Differentially private
    learning with adaptive clipping", algorithm 1). The engine charges count and gradient as one joint release. So a
    step costs more than one of fixed clipping with the same ``noise_multiplier``. With ``target_epsilon`` the noise is
    calibrated for both.

    A `GhostClipper` never changes ``max_norm``, since a count without noise isn't private.

    Args:
        max_norm: the initial value. An engine has a copy of its own, which begins there, at ``engine.clipping``; the
            copy's attribute has the current value. A policy that an engine moved, or whose state was loaded, begins
            anew in another engine: what it learnt is of the first one's data.
        target_quantile: the share of examples whose norms shall be at most ``max_norm``; in (0, 1).
        learning_rate: of the update.
        count_noise: standard deviation of the noise on the count, in examples; None: a twentieth of the engine's
            ``batch_size``.

    Raises:
        ValueError, TypeError: an argument is out of range.
    """

    max_norm: float
    target_quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise: float | None = None

    def __post_init__(self) -> None:
        self.max_norm = positive(max_norm=self.max_norm)
        self.target_quantile = open_fraction(target_quantile=self.target_quantile)
        self.learning_rate = positive(learning_rate=self.learning_rate)
        self.count_noise = None if self.count_noise is None else positive(count_noise=self.count_noise)
        self._begun, self._moved = self.max_norm, False

    def anew(self) -> Adaptive:
        """A copy that has learnt nothing yet: what one engine's data moved is for that engine alone."""
        return replace(self, max_norm=self._begun if self._moved else self.max_norm)

    @property
    def sensitivity(self) -> float:
        """``max_norm``."""
        return self.max_norm

    def weights(self, norms: Tensor) -> Tensor:
        """``min(1, max_norm / norms)``, [B]."""
        return flat_weights(norms, self.max_norm)

    def count_noise_for(self, batch_size: int) -> float:
        """The standard deviation of the noise on the count, for an expected batch size."""
        return COUNT_NOISE_SHARE * batch_size if self.count_noise is None else self.count_noise

    @property
    def counted(self) -> int:
        """How many counts each step releases."""
        return 1

    def counts(self, norms: Tensor) -> Tensor:
        """[1], float64: the sum of +1/2 for norms [B] of at most ``max_norm`` and -1/2 for others (or NaN); private."""
        return counted(norms, self.max_norm).view(1)

    def update(self, shares: Sequence[float]) -> None:
        """Moves ``max_norm``, given a noisy share of norms of at most ``max_norm``."""
        (share,) = shares
        self._moved = True
        self.max_norm = followed(self.max_norm, self._begun, self.learning_rate * (share - self.target_quantile))

    def state_dict(self) -> dict[str, Any]:
        """What training changes: ``max_norm``."""
        return {"max_norm": self.max_norm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a `state_dict` back; raises ValueError or TypeError when it holds no norm."""
        self.max_norm = positive(max_norm=state.get("max_norm"))
        self._moved = True
