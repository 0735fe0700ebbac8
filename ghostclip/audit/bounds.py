"""From how often an attack errs to what a mechanism must spend: lower bounds that hold with a stated confidence."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit
from scipy.stats import beta, binom, norm

from ghostclip.validate import nonnegative, open_fraction, positive_int, whole

__all__ = [
    "composed_false_negatives",
    "epsilon_from_rates",
    "error_bound",
    "gaussian_mu",
    "largest_noise",
    "noise_from_rates",
    "one_run_epsilon",
    "one_run_p_value",
]

LEAST_NOISE, MOST_NOISE, TOLERANCE = 0.05, 1e4, 2e-3
INTERVAL = 4e-3  # of privacy losses; the trade-off curve stays a lower bound
GRID = np.concatenate([np.linspace(0.0, 4.0, 401), np.linspace(4.05, 40.0, 720)])


def error_bound(errors: np.ndarray | float, trials: int, failure: float) -> np.ndarray:
    """The one-sided Clopper-Pearson upper bound on an error rate (Clopper, Pearson 1934).

    Args:
        errors: how many of the trials erred, any shape; 1 without trials.
        trials: independent ones.
        failure: the probability with which the bound may fail, at most.
    """
    errors = np.asarray(errors, dtype=float)
    with np.errstate(invalid="ignore"):
        bound = beta.ppf(1.0 - failure, errors + 1.0, trials - errors)
    return np.where(errors >= trials, 1.0, bound)


def epsilon_from_rates(false_positives: np.ndarray, false_negatives: np.ndarray, delta: float) -> np.ndarray:
    """The least epsilon of a mechanism against which a test errs no more than so often; 0 where that shows nothing.

    Any (epsilon, delta)-private mechanism has a + e^epsilon b >= 1 - delta for both orders of the error rates a and b
    (Kairouz, Oh, Viswanath 2015, theorem 2.1). No assumption is made about the mechanism.

    Args:
        false_positives: upper bounds on the probability of "in" when the canary is out, any shape.
        false_negatives: the same of "out" when it is in.
        delta: of the guarantee.
    """
    a, b = np.asarray(false_positives, dtype=float), np.asarray(false_negatives, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        both = np.stack([np.log((1.0 - delta - b) / a), np.log((1.0 - delta - a) / b)])
    return np.maximum(np.nan_to_num(both, nan=0.0, posinf=np.inf, neginf=0.0).max(0), 0.0)


def gaussian_mu(false_positives: np.ndarray, false_negatives: np.ndarray, sample_rate: float = 1.0) -> np.ndarray:
    """The least distance mu, in standard deviations, of a sampled Gaussian that a test errs against no more than so.

    The canary is in the sum with probability q, so that a test with false positives a has at least
    (1 - q)(1 - a) + q Phi(Phi^-1(1 - a) - mu) false negatives (Dong, Roth, Su 2019, theorem 4.2; with q = 1 it is
    their equation 6, mu-Gaussian differential privacy).

    Returns:
        mu >= 0; inf where no mu explains so few errors at this rate.
    """
    a, b = np.asarray(false_positives, dtype=float), np.asarray(false_negatives, dtype=float)
    missed = (b - (1.0 - sample_rate) * (1.0 - a)) / sample_rate
    with np.errstate(invalid="ignore"):
        mu = norm.ppf(1.0 - a) - norm.ppf(np.clip(missed, 0.0, 1.0))
    return np.maximum(np.nan_to_num(mu, nan=0.0, posinf=np.inf, neginf=0.0), 0.0)


def noise_from_rates(false_positives: float, false_negatives: float, sample_rate: float, steps: int) -> float:
    """The largest noise multiplier of ``steps`` sampled Gaussian releases that allows so few errors.

    Closed forms for one release and for full batches; otherwise the trade-off curve by PLD, which bounds both
    directions at once and so gives away a little.

    The error rates are upper bounds, of one test on all ``steps`` releases together.

    Returns:
        inf where any noise allows them; 0 where none does at this rate.
    """
    if steps == 1 or sample_rate == 1.0:
        mu = float(gaussian_mu(np.asarray(false_positives), np.asarray(false_negatives), sample_rate))
        return math.inf if mu == 0.0 else math.sqrt(steps) / mu

    return largest_noise(
        lambda noise: composed_false_negatives(false_positives, noise, sample_rate, steps) <= false_negatives
    )


def largest_noise(explains: Callable[[float], bool]) -> float:
    """The largest noise multiplier that ``explains`` what was seen, a relative 0.2% above it at most.

    Returns:
        inf where any noise does, 0 where none does.
    """
    # From much noise downwards: curves of little noise take long to compute.
    above = MOST_NOISE
    if explains(above):
        return math.inf
    while not explains(below := above / 2):
        above = below
        if above < LEAST_NOISE:
            return 0.0
    while above > (1 + TOLERANCE) * below:
        middle = math.sqrt(above * below)
        above, below = (above, middle) if explains(middle) else (middle, below)
    return above


def composed_false_negatives(false_positives: float, noise: float, sample_rate: float, steps: int) -> float:
    """The least false negative rate of any test with that false positive rate, as a lower bound by PLD.

    f(a) = max over epsilon of max(1 - delta - e^epsilon a, e^-epsilon (1 - delta - a)), 0 at least, with
    delta = delta(epsilon) of the mechanism (Wasserman, Zhou 2010; Dong, Roth, Su 2019, proposition 2.12).

    ``noise`` and ``sample_rate`` are of each of the ``steps`` releases that the test sees.
    """
    deltas = _deltas(noise, sample_rate, steps)
    one = 1.0 - deltas - np.exp(GRID) * false_positives
    other = np.exp(-GRID) * (1.0 - deltas - false_positives)
    return float(max(one.max(), other.max(), 0.0))


@lru_cache(maxsize=64)
def _deltas(noise: float, sample_rate: float, steps: int) -> np.ndarray:
    """delta(epsilon) on the grid: upper bounds, for both directions."""
    from dp_accounting.pld import privacy_loss_distribution

    once = privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=sample_rate, value_discretization_interval=INTERVAL
    )
    return np.asarray(once.self_compose(steps).get_delta_for_epsilon(GRID))


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
