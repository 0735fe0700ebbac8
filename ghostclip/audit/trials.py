"""An attack's scores, and how often it errs: the threshold is chosen on some trials and judged by the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ghostclip.audit.bounds import error_bound

__all__ = ["ErrorRates", "Trials", "log_ratios"]

CHOOSING = 0.2  # share of the trials on which the threshold is chosen
CANDIDATES = 200

# Upper bounds on false positives and false negatives, any shape -> what is to be made large.
Merit = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class ErrorRates:
    """How often an attack erred with one threshold, on trials that had no part in choosing it.

    Attributes:
        threshold: scores above it are guessed "in".
        trials_out, trials_in: how many trials of each kind were judged.
        false_positives, false_negatives: how many of them erred.
        false_positive_bound, false_negative_bound: upper bounds on the rates; both hold with the asked confidence.
    """

    threshold: float
    trials_out: int
    trials_in: int
    false_positives: int
    false_negatives: int
    false_positive_bound: float
    false_negative_bound: float

    @property
    def bounds(self) -> tuple[float, float]:
        """Those of false positives and of false negatives."""
        return self.false_positive_bound, self.false_negative_bound


@dataclass(frozen=True)
class Trials:
    """Independent trials of an attack.

    Attributes:
        scores: [N], larger where the canary seems to be in; float64.
        inside: [N], whether it was; bool.
    """

    scores: np.ndarray
    inside: np.ndarray

    def __len__(self) -> int:
        return len(self.scores)

    def first(self, count: int) -> Trials:
        """The first ``count`` trials."""
        return Trials(self.scores[:count], self.inside[:count])

    def error_rates(self, merit: Merit, failure: float) -> ErrorRates:
        """Error rates at the threshold that promises the most, both bounds failing with ``failure`` at most together.

        Args:
            merit: what the threshold is chosen for.
            failure: probability, half of it for each of the two bounds.
        """
        held = max(2, round(CHOOSING * len(self)))
        judging = Trials(self.scores[held:], self.inside[held:])
        return judging.error_rates_at(self.first(held).best_threshold(merit, failure), failure)

    def error_rates_at(self, threshold: float, failure: float) -> ErrorRates:
        """Error rates at a threshold that these trials had no part in choosing; ``failure`` as for `error_rates`."""
        out, within = self._split()
        # A score that is not a number errs, whichever the canary: it tells nothing.
        positives, negatives = int((~(out <= threshold)).sum()), int((~(within > threshold)).sum())
        return ErrorRates(
            threshold=threshold,
            trials_out=len(out),
            trials_in=len(within),
            false_positives=positives,
            false_negatives=negatives,
            false_positive_bound=float(error_bound(positives, len(out), failure / 2)),
            false_negative_bound=float(error_bound(negatives, len(within), failure / 2)),
        )

    def _split(self) -> tuple[np.ndarray, np.ndarray]:
        return self.scores[~self.inside], self.scores[self.inside]

    def best_threshold(self, merit: Merit, failure: float) -> float:
        """The threshold of the best merit, of some between the scores at evenly spaced ranks.

        It goes by bounds on the error rates, so that few trials don't mislead.
        """
        known = np.unique(self.scores)
        between = (known[1:] + known[:-1]) / 2
        ranks = np.unique(np.linspace(0, len(between) - 1, CANDIDATES).round().astype(int))
        candidates = between[ranks] if len(between) else known
        out, within = (np.sort(scores) for scores in self._split())
        positives = len(out) - np.searchsorted(out, candidates, side="right")
        negatives = np.searchsorted(within, candidates, side="right")
        merits = merit(error_bound(positives, len(out), failure / 2), error_bound(negatives, len(within), failure / 2))
        return float(candidates[int(np.argmax(merits))])


def log_ratios(seen: np.ndarray, sample_rate: float, noise_multiplier: float) -> np.ndarray:
    """The best scores: log-likelihood ratios of "in" over "out", of the same shape; independent releases' add up.

    "Out" is N(0, s^2) and "in" is (1 - q) N(0, s^2) + q N(1, s^2): no test is better than one on the ratio's sum
    (Neyman, Pearson 1933).

    Args:
        seen: released sums along the canary's direction, in units of the clipping bound.
        sample_rate: q, the probability of the canary to be in a release.
        noise_multiplier: s.
    """
    exponent = (2 * seen - 1) / (2 * noise_multiplier**2)
    return exponent if sample_rate == 1 else np.logaddexp(np.log1p(-sample_rate), np.log(sample_rate) + exponent)
