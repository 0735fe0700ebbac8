"""Comparisons seed by seed: intervals, hypotheses and what the data say of them, plots of all values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

from scipy import stats

__all__ = ["MARGIN", "RULE", "Hypothesis", "Interval", "boxes", "differences", "interval"]

# "As good" allows for so much less accuracy: one point.
MARGIN = 0.01
RULE = (
    'A hypothesis "better" is supported where the paired 95% interval lies above zero, opposite where it lies below '
    f'zero, and not supported otherwise; "worse" the other way round. "As good" is supported where the interval lies '
    f"above {-100 * MARGIN:g} points, opposite where it lies below zero, and not supported otherwise."
)


class Interval(NamedTuple):
    """A mean and its 95% interval by Student's t."""

    mean: float
    low: float
    high: float

    def percent(self) -> str:
        """As a level: 91.2 (90.8 to 91.6)."""
        return f"{100 * self.mean:.1f} ({100 * self.low:.1f} to {100 * self.high:.1f})"

    def points(self) -> str:
        """As a difference: +0.31 (-0.05 to +0.67)."""
        return f"{100 * self.mean:+.2f} ({100 * self.low:+.2f} to {100 * self.high:+.2f})"


def interval(values: Sequence[float]) -> Interval:
    """The interval of the mean of at least two values."""
    if len(set(values)) == 1:  # no spread: Student's t has no interval
        return Interval(values[0], values[0], values[0])
    low, high = stats.t.interval(0.95, len(values) - 1, mean(values), stats.sem(values))
    return Interval(mean(values), float(low), float(high))


def differences(values: Sequence[float], other: Sequence[float]) -> list[float]:
    """Seed by seed."""
    return [a - b for a, b in zip(values, other, strict=True)]


class Hypothesis(NamedTuple):
    """What is expected of one method beside another.

    Attributes:
        method, other: names.
        claim: "better", "worse" or "as good": the method, compared with the other.
        source: who states it, and where.
    """

    method: str
    other: str
    claim: str
    source: str

    def outcome(self, found: Interval) -> str:
        """What the interval of the method minus the other says: see RULE."""
        if self.claim == "as good":
            return "opposite" if found.high < 0 else "supported" if found.low > -MARGIN else "not supported"
        low, high = (found.low, found.high) if self.claim == "better" else (-found.high, -found.low)
        return "supported" if low > 0 else "opposite" if high < 0 else "not supported"

    def row(self, values: Mapping[str, Sequence[float]]) -> list[str]:
        """Cells of a table: the hypothesis, its source, the paired difference, the outcome."""
        found = interval(differences(values[self.method], values[self.other]))
        said = f"{self.method} is {self.claim} {'as' if self.claim == 'as good' else 'than'} {self.other}"
        return [said, self.source, found.points(), self.outcome(found)]


HEAD = ("hypothesis", "source", "points, paired (95% interval)", "outcome")


def boxes(values: Mapping[str, Sequence[float]], ylabel: str, title: str, pyplot: Any) -> Any:
    """A figure: for each name a box of its values in percent, and each value as a point."""
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    percent = [[100 * value for value in row] for row in values.values()]
    axes.boxplot(percent, tick_labels=list(values), showfliers=False, medianprops={"color": "#d55e00"})
    for place, row in enumerate(percent, 1):
        shifts = [0.03 * (number % 7 - 3) for number in range(len(row))]
        axes.plot([place + shift for shift in shifts], row, ".", color="#0072b2", alpha=0.6, markersize=5)
    axes.set(ylabel=ylabel, title=title)
    axes.grid(axis="y", linewidth=0.4)
    return figure
