"""How many correct guesses about canaries a trade-off curve allows (Mahloujifar, Melis and Chaudhuri 2025).

Each of m canaries is in the data by a fair coin, r of them are guessed about, and p_j is the probability of j correct
guesses. Let x(y) be the least rate of false guesses with which a test guesses right at rate y. A guess about a canary
that is right, with c or more right in all, is wrong once its coin is turned, with c - 1 or more right in all. Since x
is convex, the mean over canaries and coins gives ("Auditing f-differential privacy in one run", ICML 2025)

    sum over j >= c - 1 of (r - j) p_j / m  >=  x(sum over j >= c of j p_j / m),    c = 1 ... r.

If P[j >= v] were t, the distributions that fulfil this with the least total are found from v downwards: all of t stands
at v, and each p_j after it is the least that its inequality asks for. A total above 1 refutes that P[j >= v] is t or
more. (For any other such distribution sum over i >= c of (i - j) p_i is at least as large, for all c <= v and j < c: by
induction over c. For j to minus infinity that is the total.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ghostclip.audit.bounds import composed_false_negatives, largest_noise

__all__ = ["noise_from_guesses", "refutes"]


def refutes(
    least_false: Callable[[float], float], *, canaries: int, guesses: int, correct: int, failure: float
) -> bool:
    """Whether so many correct guesses have a probability below ``failure`` under a trade-off curve.

    Args:
        least_false: x above: rate of right guesses in [0, 1] -> a lower bound on the rate of false ones; convex and
            rising. For a symmetric trade-off curve f that is f(1 - y).
        canaries, guesses, correct: m, r and v; r is chosen before the training.
        failure: t, in (0, 1).
    """
    m, r, v = canaries, guesses, correct
    right, false = failure * v / m, failure * (r - v) / m  # the two sums, from c = v on
    for j in range(v - 1, -1, -1):
        needed = least_false(min(right, 1.0))
        if needed <= false:
            return False  # the sums grow no more, and the total is failure * r / m or what it was
        right += j / (r - j) * (needed - false)
        false = needed
        if right + false > r / m:
            return True
    return False


def noise_from_guesses(
    *, canaries: int, guesses: int, correct: int, sample_rate: float, steps: int, failure: float
) -> float:
    """The least noise multiplier that is refuted: that of a training with so many correct guesses is smaller.

    The training is taken for ``steps`` Poisson-sampled Gaussian releases at this rate, whose trade-off curves are lower
    bounds by PLD. With more noise the curve is higher, so more is refuted.

    Args:
        canaries, guesses, correct, failure: as for `refutes`.
        sample_rate, steps: of the training.

    Returns:
        A noise multiplier, a relative 0.2% above the least one at most; inf where nothing is refuted, 0 where all is.
    """

    def explains(noise: float) -> bool:
        curve = partial(_least_false, noise=noise, sample_rate=sample_rate, steps=steps)
        return not refutes(curve, canaries=canaries, guesses=guesses, correct=correct, failure=failure)

    return largest_noise(explains)


def _least_false(right: float, noise: float, sample_rate: float, steps: int) -> float:
    """x(y) of sampled Gaussian releases, for guesses of either kind."""
    return composed_false_negatives(1.0 - right, noise, sample_rate, steps)
