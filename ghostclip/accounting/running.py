"""Epsilon by privacy loss distributions, asked again and again while steps of one kind are added.

Composing a distribution with itself anew takes a quarter of a second. Here the discrete Fourier transform of the
composed distribution is kept, and a further step multiplies it by that of one step (Koskela et al. 2020): a few
milliseconds. The distributions of single steps are those of `ghostclip.accounting.losses`. Masses that the transform's
finite length would wrap around count as losses without bound, and the result is rounded up, so that it is an upper
bound, as `ghostclip.accounting.epsilon_of` is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import scipy

from ghostclip.accounting.losses import (
    PLD_INTERVAL,
    composed,
    grid_interval,
    is_gaussian,
    lost_in_transforms,
    of_one_release,
)
from ghostclip.accounting.spent import epsilon_of, sampled_releases, selections
from ghostclip.events import Event, SampledRelease

__all__ = ["RunningEpsilon"]

# The most entries of a transform; a distribution that is wider gets a coarser grid.
MOST_ENTRIES = 2**17
# Losses whose exponential is no number any more, and a grid on which they would lie.
LARGEST, COARSEST = 600.0, 5e-3
# What may be left out at either end of a distribution, counted as lost without bound.
TAIL = 1e-15
# Orders of the moments that bound it, over the losses' spread.
ORDERS = np.concatenate([np.arange(0.25, 5, 0.25), np.arange(5, 41)])
# So many steps are planned for at first.
FURTHER = 3_000
# By which results are rounded up: transforms are precise to about 1e-12.
ROUNDING = 1e-6


class RunningEpsilon:
    """Computes `epsilon_of` by PLD again and again while training goes on, in milliseconds a call.

    That is for calls between which only the count of one event grows. The first two, and those after another change,
    take up to twice the time of `epsilon_of`. Results are at most a relative 1e-3 above those of `epsilon_of`, and
    below them by rounding alone: 2e-6 at a delta of 1e-9, 1e-4 at 1e-11 (discrete Fourier transform, Koskela et al.
    2020).
    """

    def __init__(self) -> None:
        self._delta, self._counts, self._found = 0.0, dict[SampledRelease, int](), 0.0
        self._growing: Growing | None = None

    def epsilon(self, events: Iterable[Event], delta: float) -> float:
        """Epsilon at ``delta`` of several releases together.

        Args:
            events, delta: as for `epsilon_of`.

        Raises:
            ValueError, TypeError: as `epsilon_of`.
        """
        events = list(events)
        if selections(events):
            return epsilon_of(events, delta=delta)  # by Rényi divergences, in milliseconds
        releases = sampled_releases(events)
        counts = {replace(release, count=1): release.count for release in releases}
        if delta == self._delta and counts == self._counts:
            return self._found
        more = self._more(counts) if delta == self._delta and math.isfinite(self._found) else None
        by_formula = all(map(is_gaussian, releases))
        self._growing = None if more is None or by_formula else self._growing_by(more, counts, delta)
        if self._growing is not None and self._growing.usable:
            found = self._growing.epsilon(counts[self._growing.event])
        else:
            found = epsilon_of(releases, delta=delta)
        self._delta, self._counts, self._found = delta, counts, found
        return found

    def _more(self, counts: dict[SampledRelease, int]) -> SampledRelease | None:
        """The one event that happened more often than at the last call, and nothing else changed."""
        if counts.keys() != self._counts.keys():
            return None
        changed = [event for event, count in counts.items() if count != self._counts[event]]
        return changed[0] if len(changed) == 1 and counts[changed[0]] > self._counts[changed[0]] else None

    def _growing_by(self, more: SampledRelease, counts: dict[SampledRelease, int], delta: float) -> Growing:
        """The distributions at hand, where they are of that event and have room for it; else new ones."""
        known = self._growing
        if known is not None and known.event == more and counts[more] <= known.most:
            return known
        before = [replace(event, count=own) for event, own in counts.items() if event != more]
        return Growing(before, more, max(FURTHER, 2 * counts[more]), delta)


class Growing:
    """Epsilon at ``delta`` of ``before`` and of any number of releases like ``event``, up to ``most``.

    Args:
        before: other events, each with noise, with their counts.
        event: of count 1.
        most: how many of ``event`` there will be at most.

    Attributes:
        event, most: as given.
        usable: whether the losses are small enough for it; epsilon is in the hundreds otherwise.
    """

    def __init__(self, before: Sequence[SampledRelease], event: SampledRelease, most: int, delta: float) -> None:
        self.event, self.most, self._delta = event, most, delta
        self._others = sum(other.count for other in before)
        interval = max(PLD_INTERVAL, grid_interval([*before, replace(event, count=most)]))
        self._directions = _directions(before, event, most, interval) if interval < COARSEST else []
        longest = max([each.length for each in self._directions], default=0)
        if longest > MOST_ENTRIES:
            # A multiple of the fine grid: the coarser distribution then dominates the finer one.
            interval *= math.ceil(longest / MOST_ENTRIES)
            self._directions = _directions(before, event, most, interval)
        self.usable = bool(self._directions) and all(each.largest < LARGEST for each in self._directions)

    def epsilon(self, count: int) -> float:
        """With ``count`` of the event, from 1 to ``most``."""
        delta = self._delta - lost_in_transforms(self._others + count)
        return max(each.epsilon(count, delta) for each in self._directions) * (1.0 + ROUNDING)


def _directions(
    before: Sequence[SampledRelease], event: SampledRelease, most: int, interval: float
) -> list[_Direction]:
    """One for the neighbour with an example less, and one for that with an example more, where they differ."""
    one, rest = of_one_release(event, interval), composed(before, interval) if before else None
    names = ["_pmf_remove"] if one._symmetric and (rest is None or rest._symmetric) else ["_pmf_remove", "_pmf_add"]
    return [_Direction(getattr(one, name), rest and getattr(rest, name), most, interval) for name in names]


class _Direction:
    """The composed distribution of one order of the two neighbours.

    Attributes:
        length: entries of the transform.
        largest: of the losses.
    """

    def __init__(self, one: Any, rest: Any, most: int, interval: float) -> None:
        one, rest = one.to_dense_pmf(), rest and rest.to_dense_pmf()
        low, high = _range(one, most)
        if rest is not None:
            low, high = low + rest._lower_loss, high + rest._lower_loss + len(rest._probs)
        # Never shorter than what is put into it.
        low = min(low, one._lower_loss, 0)
        high = max(high, one._lower_loss + len(one._probs))
        self.length = int(scipy.fft.next_fast_len(high - low + 1, real=True))
        self._low, self.largest = low, (low + self.length) * interval
        self._kept = 1.0 - one._infinity_mass, 1.0 - (rest._infinity_mass if rest is not None else 0.0)
        self._one = self._transform(one)
        self._start = np.ones_like(self._one) if rest is None else self._transform(rest)
        self._count, self._whole = 0, self._start
        self._losses = np.arange(max(low, 0), low + self.length) * interval
        self._shrunk = np.exp(-self._losses)

    def _transform(self, pmf: Any) -> Any:
        """Of a distribution whose loss l stands at l modulo the length."""
        placed = np.zeros(self.length)
        placed[(pmf._lower_loss + np.arange(len(pmf._probs))) % self.length] = pmf._probs
        return scipy.fft.rfft(placed)

    def epsilon(self, count: int, delta: float) -> float:
        """The least epsilon >= 0 at which the hockey-stick divergence is at most ``delta``; inf for none."""
        if count < self._count:
            self._count, self._whole = 0, self._start
        self._whole = self._whole * _power(self._one, count - self._count)
        self._count = count
        probs = np.roll(scipy.fft.irfft(self._whole, self.length), -(self._low % self.length))[-len(self._losses) :]
        np.maximum(probs, 0.0, out=probs)
        lost = 1.0 - self._kept[0] ** count * self._kept[1] + 4 * TAIL
        # Of losses from the k-th on: their mass, and their mass times exp(-loss).
        mass, shrunk = np.cumsum(probs[::-1])[::-1], np.cumsum((probs * self._shrunk)[::-1])[::-1]
        # Divergence at the k-th loss, to which that loss itself adds nothing.
        divergence = lost + mass - shrunk / self._shrunk
        if divergence[0] <= delta:
            return 0.0
        if lost >= delta:
            return math.inf
        after = int(np.argmax(divergence <= delta)) or len(probs) - 1
        return math.log((lost + mass[after] - delta) / shrunk[after])


def _range(pmf: Any, most: int) -> tuple[int, int]:
    """Losses, on the grid, between which the sum of up to ``most`` lies but for `TAIL` (Chernoff's bound).

    A sum of fewer is within the upper end too: the mean of a privacy loss is not negative, nor the logarithm of any of
    its moments. Where it passes the lower end it is wrapped around to the upper one, and counts as more than it is.
    """
    places = pmf._lower_loss + np.arange(len(pmf._probs))
    spread = math.sqrt(max(float(pmf._probs @ places.astype(float) ** 2), 1.0))
    orders = ORDERS[:, None] / max(spread * math.sqrt(most), len(places) / 40)
    need = math.log(2 / TAIL)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        up, down = (np.log(np.exp(sign * orders * places) @ pmf._probs) for sign in (1, -1))
        high = np.nanmin(np.where(np.isfinite(up), (most * up + need) / orders[:, 0], np.inf))
        low = -np.nanmin(np.where(np.isfinite(down), (np.maximum(most * down, down) + need) / orders[:, 0], np.inf))
    ends = most * places[0], most * places[-1]
    return int(max(math.floor(low), min(ends[0], places[0]))), int(min(math.ceil(high), max(ends[1], places[-1])))


def _power(base: Any, exponent: int) -> Any:
    """By repeated squaring, which takes a twentieth of numpy's time for complex numbers."""
    found = np.ones_like(base) if exponent % 2 == 0 else base
    while exponent := exponent // 2:
        base = base * base
        if exponent % 2:
            found = found * base
    return found
