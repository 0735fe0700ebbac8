"""What correct guesses about many canaries in one training run prove (Steinke, Nasr, Jagielski 2023)."""

from __future__ import annotations

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit
from scipy.stats import binom

from ghostclip.validate import nonnegative, open_fraction, positive_int, whole

__all__ = ["one_run_epsilon", "one_run_p_value"]


def one_run_p_value(*, canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """The probability of so many correct guesses, at most, if the training is (epsilon, delta)-private.

    Each canary was included by a fair coin. With W ~ Binomial(r, e^epsilon / (1 + e^epsilon)):

        p = P[W >= v] + 2 m delta max over i = 1 ... v of P[v > W >= v - i] / i

    (Steinke, Nasr, Jagielski 2023, corollary 5.4, from theorem 5.2).

    Args:
        canaries: m, those guessed about and those abstained from.
        guesses: r <= m.
        correct: v <= r.
        epsilon: finite, >= 0.
        delta: in [0, 1].

    Raises:
        ValueError, TypeError: an argument is out of range.
    """
    m, r, v = positive_int(canaries=canaries), whole(guesses=guesses), whole(correct=correct)
    if not v <= r <= m:
        raise ValueError(f"expected correct <= guesses <= canaries; got {v}, {r} and {m}")
    if not 0 <= delta <= 1:
        raise ValueError(f"delta must be a number in [0, 1]; got {delta!r}")
    accuracy = expit(nonnegative(epsilon=epsilon))
    survival = float(binom.sf(v - 1, r, accuracy))
    if v == 0:
        return 1.0
    below = np.cumsum(binom.pmf(np.arange(v - 1, -1, -1), r, accuracy))
    return min(1.0, survival + 2 * m * delta * float((below / np.arange(1, v + 1)).max()))


def one_run_epsilon(*, canaries: int, guesses: int, correct: int, delta: float, confidence: float) -> float:
    """The lower bound on epsilon at ``delta``: the largest that so many correct guesses refute; 0 when none.

    Args as in `one_run_p_value`; ``confidence`` is in (0, 1).

    Raises:
        ValueError, TypeError: an argument is out of range.
    """
    failure = 1.0 - open_fraction(confidence=confidence)

    def excess(epsilon: float) -> float:
        value = one_run_p_value(canaries=canaries, guesses=guesses, correct=correct, epsilon=epsilon, delta=delta)
        return value - failure

    if excess(0.0) >= 0:
        return 0.0
    high = 1.0
    while excess(high) < 0:
        high *= 2
    root = brentq(excess, 0.0, high, xtol=1e-9)
    return max(0.0, root - 1e-8)
