"""What noise is calibrated to: an epsilon, or the advantage of a membership attack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from ghostclip.accounting.attacks import risk_of
from ghostclip.accounting.spent import ACCOUNTANTS, epsilon_of
from ghostclip.events import Event
from ghostclip.validate import one_of, open_fraction, positive

__all__ = ["Target", "target_of"]

# Where the closed form still has numbers; the start need not be good.
MOST_TO_START_FROM = 1e4


@dataclass(frozen=True)
class Target:
    """An epsilon at ``delta`` that events must stay within; or an advantage of membership attacks, which has no delta.

    Attributes:
        most: that epsilon, or advantage.
        delta: where the epsilon is; None for an advantage.
        accountant: as for `epsilon`; "pld" for an advantage.
    """

    most: float
    delta: float | None = None
    accountant: str = "pld"

    def __str__(self) -> str:
        if self.delta is None:
            return f"an advantage of {self.most:g}"
        return f"epsilon {self.most:g} at delta {self.delta:g}"

    def excess(self, events: Sequence[Event], coarser: int = 1) -> float:
        """How far events are above it, on a grid ``coarser`` times as wide; finite, as a root finder needs it."""
        return _excess(self, tuple(events), coarser)

    @property
    def mu(self) -> float:
        """Sensitivity over noise of the one Gaussian release that spends it: a start (Dong et al. 2019)."""
        if self.delta is None:  # the advantage of that release is 2 Phi(mu / 2) - 1
            return 2.0 * NormalDist().inv_cdf((1.0 + self.most) / 2.0)
        from dp_accounting import gaussian_mechanism

        # Where two logarithms are rounded to the same number, a difference of probabilities is 0 and its logarithm
        # -inf, which is on the right side of the root. Which sigma that happens at depends on the processor.
        with np.errstate(divide="ignore"):
            return 1.0 / gaussian_mechanism.get_sigma_gaussian(min(self.most, MOST_TO_START_FROM), self.delta)

    def unreachable(self, steps: int, sample_rate: float) -> ValueError:
        """An error that says that no noise is enough for so many steps."""
        name = "target_advantage" if self.delta is None else "target_epsilon"
        where, raised = ("", name) if self.delta is None else (f" and delta={self.delta!r}", f"{name} or delta")
        return ValueError(
            f"{name}={self.most!r} can't be reached: {self.accountant!r} gives more for steps={steps} at "
            f"sample_rate={sample_rate!r}{where}, however large the noise; raise {raised}, or take fewer steps"
        )


@lru_cache(maxsize=256)
def _excess(target: Target, events: tuple[Event, ...], coarser: int) -> float:
    """`Target.excess`, which a search asks for twice, and a training that is set up again asks for again."""
    if target.delta is None:
        return risk_of(events, coarser=coarser).advantage - target.most
    found = epsilon_of(events, delta=target.delta, accountant=target.accountant, coarser=coarser)
    return min(found - target.most, 1e6)


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
        accountant = one_of(ACCOUNTANTS, accountant=accountant)
        return Target(positive(target_epsilon=target_epsilon), open_fraction(delta=delta), accountant)
    if delta is not None:
        raise ValueError(f"delta must be left out with target_advantage, which has none; got {delta!r}")
    if one_of(ACCOUNTANTS, accountant=accountant) != "pld":
        raise ValueError(f"accountant must be 'pld' with target_advantage; got {accountant!r}")
    return Target(open_fraction(target_advantage=target_advantage))
