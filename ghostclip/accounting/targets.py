"""What noise is calibrated to: an epsilon, or the advantage of a membership attack."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import TypeAlias

import numpy as np

from ghostclip.accounting.attacks import risk_of
from ghostclip.accounting.spent import ACCOUNTANTS, epsilon_of
from ghostclip.events import Event
from ghostclip.validate import one_of, open_fraction, positive

__all__ = ["AdvantageTarget", "EpsilonTarget", "Target", "excess_epsilon", "target_of"]

# Where the closed form still has numbers; the start need not be good.
MOST_TO_START_FROM = 1e4


class EpsilonTarget:
    """An epsilon that events must stay within.

    Args:
        target_epsilon: finite, > 0.
        delta, accountant: as for `epsilon`.

    Attributes:
        accountant: as given.
        given, where, raised: the target, where it holds and what to raise, for messages.

    Raises:
        ValueError, TypeError: an argument is out of range.
    """

    def __init__(self, target_epsilon: float, delta: float, accountant: str) -> None:
        self._epsilon, self._delta = positive(target_epsilon=target_epsilon), open_fraction(delta=delta)
        self.accountant = one_of(ACCOUNTANTS, accountant=accountant)
        self.given, self.where = f"target_epsilon={self._epsilon!r}", f" and delta={self._delta!r}"
        self.raised = "target_epsilon or delta"

    def __str__(self) -> str:
        return f"epsilon {self._epsilon:g} at delta {self._delta:g}"

    def excess(self, events: Sequence[Event], coarser: int) -> float:
        """Epsilon above the target, on a grid ``coarser`` times as wide."""
        return excess_epsilon(events, self._epsilon, self._delta, self.accountant, coarser)

    @property
    def mu(self) -> float:
        """Sensitivity over noise of the one Gaussian release that spends the target: a start (Dong et al. 2019)."""
        from dp_accounting import gaussian_mechanism

        # Where two logarithms are rounded to the same number, a difference of probabilities is 0 and its logarithm
        # -inf, which is on the right side of the root. Which sigma that happens at depends on the processor.
        with np.errstate(divide="ignore"):
            return 1.0 / gaussian_mechanism.get_sigma_gaussian(min(self._epsilon, MOST_TO_START_FROM), self._delta)


class AdvantageTarget:
    """The advantage of a membership attack that events must stay within, by PLD.

    Args:
        target_advantage: in (0, 1).

    Attributes: as of `EpsilonTarget`.

    Raises:
        ValueError, TypeError: it is out of range.
    """

    accountant, where, raised = "pld", "", "target_advantage"

    def __init__(self, target_advantage: float) -> None:
        self._advantage = open_fraction(target_advantage=target_advantage)
        self.given = f"target_advantage={self._advantage!r}"

    def __str__(self) -> str:
        return f"an advantage of {self._advantage:g}"

    def excess(self, events: Sequence[Event], coarser: int) -> float:
        """The advantage above the target, on a grid ``coarser`` times as wide."""
        return risk_of(events, coarser=coarser).advantage - self._advantage

    @property
    def mu(self) -> float:
        """Sensitivity over noise of the one Gaussian release of that advantage, which is 2 Phi(mu / 2) - 1."""
        return 2.0 * NormalDist().inv_cdf((1.0 + self._advantage) / 2.0)


Target: TypeAlias = EpsilonTarget | AdvantageTarget


def target_of(
    target_epsilon: float | None, target_advantage: float | None, delta: float | None, accountant: str
) -> Target:
    """The one target that is given.

    Raises:
        ValueError, TypeError: both or none are given, or an argument is out of range or doesn't belong to the target.
    """
    if (target_epsilon is None) == (target_advantage is None):
        raise ValueError(
            "target_epsilon must be given (with delta), or target_advantage in its place; got "
            + ("neither" if target_epsilon is None else "both")
        )
    if target_epsilon is not None:
        if delta is None:
            raise ValueError("delta must be given with target_epsilon: a number in (0, 1); got None")
        return EpsilonTarget(target_epsilon, delta, accountant)
    if delta is not None:
        raise ValueError(f"delta must be left out with target_advantage, which has none; got {delta!r}")
    if one_of(ACCOUNTANTS, accountant=accountant) != "pld":
        raise ValueError(f"accountant must be 'pld' with target_advantage; got {accountant!r}")
    assert target_advantage is not None
    return AdvantageTarget(target_advantage)


def excess_epsilon(events: Sequence[Event], target: float, delta: float, accountant: str, coarser: int = 1) -> float:
    """Epsilon above the target, finite so that a root finder can use it."""
    return min(epsilon_of(events, delta=delta, accountant=accountant, coarser=coarser) - target, 1e6)
