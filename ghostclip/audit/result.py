"""What an audit found, beside what was claimed, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ghostclip.audit.one_run import OneRun
from ghostclip.audit.trials import ErrorRates
from ghostclip.audit.white_box import SampledShare

__all__ = ["Audit", "Bound", "CurvePoint", "WhiteBox"]


@dataclass(frozen=True)
class Bound:
    """One lower bound on epsilon, beside the claimed epsilon.

    Attributes:
        method: "clopper-pearson", "gaussian", "one-run", "one-run f-DP" or "one-run Gaussian".
        about: "trial" (the releases one white-box trial saw) or "training" (all of it).
        epsilon: spent at least, with the audit's confidence (all its bounds hold together with it).
        claimed: what accounting says is spent at most.
    """

    method: str
    about: str
    epsilon: float
    claimed: float

    @property
    def violated(self) -> bool:
        """Whether more is spent than was claimed."""
        return self.epsilon > self.claimed


@dataclass(frozen=True)
class CurvePoint:
    """The white-box bounds from the first so many releases, each by itself with the stated confidence."""

    releases: int
    clopper_pearson: float
    gaussian: float
    training: float


@dataclass(frozen=True)
class WhiteBox:
    """The white-box trials' figures.

    Attributes:
        releases, trials: real engine steps, and how many trials they make.
        steps_per_trial, sample_rate: of a trial: its releases, and the probability of the canary to be in each.
        clopper_pearson, gaussian: error rates at each bound's threshold.
        noise_multiplier: the largest that explains the Gaussian bound's error rates; inf when any does.
        sampled: the count of sampled examples.
        sample_rate_bound: the training's sampling rate is at least this.
        curve: bounds over the number of releases.
    """

    releases: int
    trials: int
    steps_per_trial: int
    sample_rate: float
    clopper_pearson: ErrorRates
    gaussian: ErrorRates
    noise_multiplier: float
    sampled: SampledShare
    sample_rate_bound: float
    curve: Sequence[CurvePoint] = field(default_factory=list)


@dataclass(frozen=True)
class Audit:
    """The result of `ghostclip.audit.audit`.

    Attributes:
        claimed: epsilon of the whole training at ``delta``, by accounting.
        delta: of the guarantee.
        confidence: with which all lower bounds hold together.
        bounds: every lower bound beside its claim.
        white_box, one_run: their figures; None when left out.
        seconds: wall time.
    """

    claimed: float
    delta: float
    confidence: float
    bounds: Sequence[Bound]
    white_box: WhiteBox | None
    one_run: OneRun | None
    seconds: float

    def __repr__(self) -> str:
        return f"Audit({self.verdict})"

    @property
    def audited(self) -> float:
        """The best lower bound on the epsilon of the whole training."""
        return max((bound.epsilon for bound in self.bounds if bound.about == "training"), default=0.0)

    @property
    def violated(self) -> bool:
        """Whether any bound is above its claim."""
        return any(bound.violated for bound in self.bounds)

    @property
    def verdict(self) -> str:
        """One sentence."""
        sure = f"at confidence {self.confidence:.8g}"
        if not self.violated:
            share = f", {self.audited / self.claimed:.0%} of it" if math.isfinite(self.claimed) else ""
            return (
                f"consistent: {sure} the audit found epsilon >= {self.audited:.4g}, and {self.claimed:.4g} is "
                f"claimed{share}"
            )
        # Bounds about the whole training first, then the one furthest above its claim.
        violated = (bound for bound in self.bounds if bound.violated)
        worst = max(violated, key=lambda bound: (bound.about == "training", bound.epsilon - bound.claimed))
        what = "of the training" if worst.about == "training" else "of a white-box trial"
        return (
            f"VIOLATED: the audit found epsilon >= {worst.epsilon:.4g} {what} {sure}, above the claimed "
            f"{worst.claimed:.4g} ({worst.method})"
        )

    def figures(self) -> dict[str, Any]:
        """All of it as plain values."""
        found = asdict(self)
        for bound, row in zip(self.bounds, found["bounds"], strict=True):
            row["violated"] = bound.violated
        told = {"verdict": self.verdict, "violated": self.violated}
        return {**told, "claimed_epsilon": found.pop("claimed"), "audited_epsilon": self.audited, **found}
