"""How well an attack can tell two neighbouring data sets apart, by the privacy loss distribution that epsilon is from.

An attack guesses from the trained model whether one example was among the data. Its false-positive rate is the
probability that it says yes where the example was not, its true-positive rate that it says yes where it was. The best
attack says yes where the privacy loss is above a threshold (Neyman and Pearson); all thresholds together give the
largest true-positive rate at each false-positive rate (Kulynych et al. 2024, "Attack-aware noise calibration for
differential privacy").

Three losses log 3, 0, -log 3 of mass 0.6, 0.2, 0.2 with the example have mass 0.2, 0.2, 0.6 without it. "Yes at log 3"
is a false-positive rate of 0.2 and a true-positive rate of 0.6: the advantage is 0.4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ghostclip.accounting.divergences import deltas_by_divergences
from ghostclip.accounting.losses import composed, grid_interval
from ghostclip.accounting.spent import LEAST_NOISE, Setting, epsilon_of, sampled_releases, selections
from ghostclip.events import Event, Selection
from ghostclip.validate import positive, probability, whole

__all__ = ["FALSE_POSITIVE_RATES", "Risk", "risk", "risk_of"]

FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)
"""Where reports say the largest true-positive rate."""
# False-positive rates are told apart from here on.
LEAST_RATE = 1e-9
# exp of more is no number.
LARGEST_LOSS = 700.0
# (false-positive rates, true-positive rates) of the best attacks, rising; an attack between two points draws lots.
Curve = tuple[np.ndarray, np.ndarray]
NO_ATTACK: Curve = (np.array([0.0, 1.0]), np.array([0.0, 1.0]))
ALWAYS_RIGHT: Curve = (np.array([0.0, 1.0]), np.array([1.0, 1.0]))


class Risk:
    """Upper bounds for attacks that guess whether one example (or user) was in the data; `risk` and `risk_of` make it.

    They hold for the worst data set, the worst example and the best attacker, who knows all other examples.

    Args:
        curves: one for each order of the two neighbours: the example is there or the other way round.
        delta, epsilon: see attributes.

    Attributes:
        advantage: the largest true-positive rate minus false-positive rate; in [0, 1]. A guess about an example that is
            there with probability 1/2 is right with probability at most (1 + advantage) / 2.
        epsilon: at ``delta``, by PLD; None where no delta was given.
        delta: as given. The other bounds don't depend on it.
    """

    def __init__(self, curves: Sequence[Curve], delta: float | None = None, epsilon: float | None = None) -> None:
        self._curves, self.delta, self.epsilon = tuple(curves), delta, epsilon
        self.advantage = min(1.0, max(float((right - wrong).max()) for wrong, right in self._curves))

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """The largest true-positive rate of an attack with that ``false_positive_rate``.

        Args:
            false_positive_rate: in [0, 1].

        Raises:
            ValueError, TypeError: it is out of range.
        """
        wrong = probability(false_positive_rate=false_positive_rate)
        return min(1.0, max(float(np.interp(wrong, *curve)) for curve in self._curves))

    def __str__(self) -> str:
        """The bounds in one line, with the true-positive rates at `FALSE_POSITIVE_RATES`."""
        *rates, last = (f"{self.true_positive_rate(rate):.3g}" for rate in FALSE_POSITIVE_RATES)
        *wrong, largest = (f"{rate:g}" for rate in FALSE_POSITIVE_RATES)
        return (
            f"advantage at most {self.advantage:.3g}, true-positive rate at most {', '.join(rates)} and {last} at "
            f"false-positive rates of {', '.join(wrong)} and {largest}"
        )

    def __repr__(self) -> str:
        return f"Risk({self})"


def risk(
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    sampling: str = "poisson",
    neighboring: str = "add_or_remove_one",
    dataset_size: int | None = None,
    max_batch_size: int | None = None,
    bands: int = 1,
) -> Risk:
    """How well membership attacks can do against ``steps`` releases of a noisy sum over a random sample (DP-SGD).

    Args:
        noise_multiplier, sample_rate, steps, sampling, neighboring, dataset_size, max_batch_size, bands: as for
            `epsilon`.

    Returns:
        Upper bounds, from the privacy loss distribution of `epsilon` (Kulynych et al. 2024, algorithm 1).

    Raises:
        ValueError, TypeError: an argument is out of range; the message names it.
    """
    positive(noise_multiplier=noise_multiplier)
    setting = Setting(sample_rate, sampling, neighboring, dataset_size, max_batch_size, bands)
    return risk_of([setting.event(noise_multiplier, whole(steps=steps))])


def risk_of(events: Iterable[Event], *, delta: float | None = None, coarser: int = 1) -> Risk:
    """How well membership attacks can do against several releases together.

    Args:
        events: as for `epsilon_of`.
        delta: where `Risk.epsilon` is; None: nowhere.
        coarser: as for `epsilon_of`.

    Returns:
        An advantage of 0 for no events, and of 1 if one of them had no noise.

    Raises:
        ValueError, TypeError: an argument is out of range, or the events are about different neighbours.
    """
    events = list(events)
    spent = None if delta is None else epsilon_of(events, delta=delta, coarser=coarser)
    return Risk(_curves(events, coarser), delta, spent)


def _curves(events: Sequence[Event], coarser: int) -> list[Curve]:
    """One for each order of the two neighbours, or one that holds for both."""
    if selections(events):
        return [_curve_by_divergences(events)]
    happened = sampled_releases(events)
    if not happened:
        return [NO_ATTACK]
    if any(event.noise_multiplier < LEAST_NOISE for event in happened):
        return [ALWAYS_RIGHT]
    try:
        loss = composed(happened, coarser * grid_interval(happened))
    except OverflowError:  # losses too large for floating point
        return [ALWAYS_RIGHT]
    orders = [loss._pmf_remove] if loss._symmetric else [loss._pmf_remove, loss._pmf_add]
    return [_curve(order) for order in orders]


def _curve_by_divergences(events: Sequence[Event]) -> Curve:
    """With a selection among the events, of which only Rényi divergences are known.

    Releases that are (epsilon, delta)-private allow true-positive rates up to delta + exp(epsilon) a and up to
    1 - exp(-epsilon) (1 - delta - a) at a false-positive rate a (Kairouz, Oh, Viswanath 2015, theorem 2.1). The least
    over epsilons is taken at the right end of each interval between false-positive rates.
    """
    if (largest := epsilon_of(events, delta=LEAST_RATE)) == math.inf:
        return ALWAYS_RIGHT
    epsilons, wrong = np.linspace(0.0, largest, 200), np.geomspace(LEAST_RATE, 1.0, 2000)
    releases = sampled_releases(event for event in events if not isinstance(event, Selection))
    deltas = deltas_by_divergences([*releases, *selections(events)], list(epsilons))[:, None]
    grown = np.exp(epsilons)[:, None]
    right = np.minimum(deltas + grown * wrong, 1.0 - (1.0 - deltas - wrong) / grown).min(0).clip(0.0, 1.0)
    return np.concatenate([[0.0], wrong[:-1], [1.0]]), np.concatenate([right, [1.0]])


def _curve(order: Any) -> Curve:
    """Both rates of the attacks that say yes where the loss is at least a threshold, from the largest threshold down.

    Losses without bound are always found out. A loss l has exp(-l) of its mass without the example.
    """
    dense = order.to_dense_pmf()
    losses = (dense._lower_loss + np.arange(len(dense._probs))) * dense._discretization
    with_it = np.maximum(dense._probs, 0.0)
    without_it = with_it * np.exp(np.clip(-losses, -LARGEST_LOSS, LARGEST_LOSS))
    right = dense._infinity_mass + np.cumsum(with_it[::-1])
    wrong = np.cumsum(without_it[::-1])
    return (
        np.concatenate([[0.0], np.minimum(wrong, 1.0), [1.0]]),
        np.concatenate([[dense._infinity_mass], np.minimum(right, 1.0), [1.0]]),
    )
