"""Epsilon: of a setting, of what happened, and over time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ghostclip.accounting.divergences import epsilon_by_divergences
from ghostclip.accounting.losses import epsilon_by_losses
from ghostclip.events import (
    RELATIONS,
    CyclicGaussian,
    CyclicPoissonGaussian,
    Event,
    FixedSizeGaussian,
    JointGaussian,
    SampledGaussian,
    SampledRelease,
    Selection,
    TruncatedGaussian,
    mechanism_of,
    merged,
)
from ghostclip.validate import fraction, one_of, open_fraction, positive, positive_int, whole

__all__ = [
    "ACCOUNTANTS",
    "Setting",
    "accountants_for",
    "epsilon",
    "epsilon_of",
    "epsilon_over_time",
    "epsilons_of",
    "sampled_releases",
    "selections",
    "used_for",
]

ACCOUNTANTS = ("pld", "rdp")
"""The values of ``accountant=``: privacy loss distributions and Rényi differential privacy."""
# What floating point can square: less noise protects nothing, and more counts as this much.
LEAST_NOISE, MOST_NOISE = 1e-6, 1e12
# Of a rate that is a quotient times a number of bands; decimal places of the steps of an epoch.
ROUNDING, HALF_STEPS = 1e-12, 9
KINDS: dict[str, type[Any]] = {
    kind.sampling: kind
    for kind in (SampledGaussian, FixedSizeGaussian, TruncatedGaussian, CyclicPoissonGaussian, CyclicGaussian)
}
CYCLIC = (CyclicPoissonGaussian.sampling, CyclicGaussian.sampling)


@dataclass(frozen=True)
class Setting:
    """How each step draws its examples, and how neighbouring data sets differ.

    Args:
        sample_rate: the expected size of a batch over that of the data set; in (0, 1].
        sampling: "poisson", "without_replacement" (batches of one size), "truncated" (Poisson samples that are cut
            down to ``max_batch_size``), "cyclic_poisson" or "cyclic", as for `epsilon`.
        neighboring: "add_or_remove_one" or "replace_one", as for `epsilon`.
        dataset_size, max_batch_size: numbers of examples; given with "truncated" only. Under "add_or_remove_one" a
            neighbour has one example more than ``dataset_size``.
        bands: of correlated noise; other than 1 with "cyclic_poisson" and "cyclic" only.

    Raises:
        ValueError, TypeError: an argument is out of range; the message names it.
    """

    sample_rate: float
    sampling: str = "poisson"
    neighboring: str = "add_or_remove_one"
    dataset_size: int | None = None
    max_batch_size: int | None = None
    bands: int = 1

    def __post_init__(self) -> None:
        fraction(sample_rate=self.sample_rate)
        one_of(tuple(KINDS), sampling=self.sampling)
        one_of(RELATIONS, neighboring=self.neighboring)
        self._check_bands()
        for name in ("dataset_size", "max_batch_size"):
            value = getattr(self, name)
            if self.sampling == "truncated":
                if value is None:
                    raise ValueError(f'{name} must be given with sampling="truncated": a whole number >= 1; got None')
                positive_int(**{name: value})
            elif value is not None:
                raise ValueError(f'{name} must be left out unless sampling="truncated"; got {value!r}')

    def _check_bands(self) -> None:
        """Raises ValueError where ``bands`` don't go with the rest."""
        if positive_int(bands=self.bands) > 1 and self.sampling not in CYCLIC:
            raise ValueError(
                f'bands must be 1 unless sampling="cyclic_poisson" or "cyclic"; got {self.bands!r}: there is no bound '
                f"for correlated noise with {self.sampling!r}"
            )
        if self.sampling == "cyclic_poisson" and self.bands * self.sample_rate > 1 + ROUNDING:
            raise ValueError(
                f"bands * sample_rate, the rate within one of {self.bands} groups, must be at most 1; got "
                f"{self.bands * self.sample_rate:.6g}. Take at most {int(1 / self.sample_rate)} bands, or a smaller "
                "sample_rate"
            )

    def event(self, noise_multiplier: float, steps: int = 1) -> SampledRelease:
        """The event that ``steps`` steps are charged as, for `epsilon_of`; of one step also for `Account.charge`."""
        if self.sampling in CYCLIC:
            return self._cyclic_event(noise_multiplier, steps)
        cut = {}
        if self.dataset_size is not None:
            larger = self.dataset_size + (self.neighboring == "add_or_remove_one")  # of two neighbours
            cut = {"dataset_size": larger, "max_batch_size": self.max_batch_size}
        return KINDS[self.sampling](self.sample_rate, noise_multiplier, steps, self.neighboring, **cut)

    def _cyclic_event(self, noise_multiplier: float, steps: int) -> SampledRelease:
        """One mechanism of so many steps; with one band cyclic Poisson sampling is Poisson sampling."""
        if self.sampling == "cyclic":
            # As of len(data) / batch_size, half steps too: 1 / (2 / 49) is a little above 24.5.
            epoch = max(1, round(round(1 / self.sample_rate, HALF_STEPS)))
            # Of columns that are an epoch apart so many meet in a row, each of norm 1.
            meeting = 2 * -(-self.bands // epoch) - 1
            return CyclicGaussian(
                1.0, noise_multiplier, steps, self.neighboring, separation=epoch, sensitivity=math.sqrt(meeting)
            )
        if self.bands == 1:
            return SampledGaussian(self.sample_rate, noise_multiplier, steps, self.neighboring)
        rate = min(1.0, self.bands * self.sample_rate)
        return CyclicPoissonGaussian(rate, noise_multiplier, steps, self.neighboring, separation=self.bands)


def epsilon(
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    delta: float,
    accountant: str = "pld",
    sampling: str = "poisson",
    neighboring: str = "add_or_remove_one",
    dataset_size: int | None = None,
    max_batch_size: int | None = None,
    bands: int = 1,
) -> float:
    """Epsilon at ``delta`` of ``steps`` releases of a noisy sum over a random sample (DP-SGD, Abadi et al. 2016).

    Args:
        noise_multiplier: standard deviation of the noise over the bound on one example's contribution; finite, > 0.
        sample_rate: the expected size of a batch over that of the data set; in (0, 1].
        steps: a whole number >= 0; zero steps cost nothing.
        delta: in (0, 1).
        accountant: "pld": privacy loss distributions, composed numerically (Koskela et al. 2020; Doroshenko et al.
            2022), the tighter bound. "rdp": Rényi divergences (Mironov 2017; Mironov et al. 2019), the faster one.
        sampling: how a batch is drawn. "poisson": each example joins independently. "without_replacement": a fixed
            number of examples. "truncated": Poisson; a larger sample is cut down at random to ``max_batch_size``.
            "cyclic_poisson": each example is in one of ``bands`` groups for good, and step t draws from group
            t mod bands at rate ``bands * sample_rate``: ceil(steps / bands) Poisson samples (Choquette-Choo et al.
            2023, theorem 4). "cyclic": a fixed order, each example once in 1 / sample_rate steps, without
            amplification.
        neighboring: how neighbouring data sets differ. "add_or_remove_one": by the presence of one example.
            "replace_one": in the content of one example.
        dataset_size, max_batch_size: numbers of examples; with ``sampling="truncated"`` only.
        bands: diagonals of the matrix by which noise is correlated (`ghostclip.noise.BandedToeplitz`), with
            "cyclic_poisson" and "cyclic". With "cyclic" it makes no difference up to an epoch's steps.

    Returns:
        An upper bound on epsilon; inf if the accountant has none (PLD for a delta below 1e-15 or 2.3e-16 * steps).

    Raises:
        ValueError, TypeError: an argument is out of range, or the accountant has no bound; the message names it.
    """
    positive(noise_multiplier=noise_multiplier)
    setting = Setting(sample_rate, sampling, neighboring, dataset_size, max_batch_size, bands)
    event = setting.event(noise_multiplier, whole(steps=steps))
    return epsilon_of([event], delta=delta, accountant=accountant)


def epsilon_over_time(
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    delta: float,
    accountant: str = "pld",
    sampling: str = "poisson",
    neighboring: str = "add_or_remove_one",
    dataset_size: int | None = None,
    max_batch_size: int | None = None,
    bands: int = 1,
    points: int = 25,
) -> tuple[list[int], list[float]]:
    """Epsilon after 0 steps, after 1 step, and after evenly spaced numbers of steps up to ``steps``.

    Args:
        points: the number of evenly spaced numbers, >= 1. Each takes a quarter of a second by PLD.

    Other arguments are those of `epsilon`.

    Returns:
        (numbers of steps, the epsilon after each).

    Raises:
        ValueError, TypeError: as `epsilon`.
    """
    positive(noise_multiplier=noise_multiplier)
    steps, points = whole(steps=steps), positive_int(points=points)
    setting = Setting(sample_rate, sampling, neighboring, dataset_size, max_batch_size, bands)
    # Most of what a long run spends may be due to its first step.
    marks = sorted({min(1, steps), *(round(steps * part / points) for part in range(points + 1))})
    return marks, epsilons_of([], setting.event(noise_multiplier), marks, delta=delta, accountant=accountant)


def epsilons_of(
    before: Iterable[Event], event: Event, marks: Sequence[int], *, delta: float, accountant: str = "pld"
) -> list[float]:
    """Epsilon of ``before`` followed by a number of steps, for each of several numbers.

    Args:
        before: the events so far.
        event: one step.
        marks: numbers of such steps, >= 0.
        delta, accountant: as for `epsilon`.

    Returns:
        One epsilon for each number in ``marks``.

    Raises:
        ValueError, TypeError: as `epsilon_of`.
    """
    before = list(before)
    return [
        epsilon_of([*before, replace(event, count=whole(marks=mark))], delta=delta, accountant=accountant)
        for mark in marks
    ]


def epsilon_of(events: Iterable[Event], *, delta: float, accountant: str = "pld", coarser: int = 1) -> float:
    """Epsilon at ``delta`` of several releases together.

    Args:
        events: the releases, such as `PrivacyEngine.events`, `Ledger.events` or results of `Setting.event`.
        delta: in (0, 1).
        accountant: "pld" or "rdp", as for `epsilon`. With a `ghostclip.events.Selection` among them it is "rdp".
        coarser: factor on the width of PLD's grid of losses, >= 1. A larger one is faster and gives a larger bound.

    Returns:
        An upper bound: 0 for no events, inf if one of them had no noise.

    Raises:
        ValueError, TypeError: an argument is out of range, the accountant has no bound for an event, or the events have
            different ``neighboring`` or units of privacy, so that no single guarantee covers them.
    """
    open_fraction(delta=delta)
    one_of(ACCOUNTANTS, accountant=accountant)
    happened = list(events)
    _check_alike(happened)
    selected = selections(happened)
    releases = sampled_releases(event for event in happened if not isinstance(event, Selection))
    everything: list[SampledRelease | Selection] = [*releases, *selected]
    if not everything:
        return 0.0
    if any(event.noise_multiplier < LEAST_NOISE for event in everything):
        return math.inf
    if (accountant := used_for(happened, accountant)) == "pld":
        return epsilon_by_losses(releases, delta, coarser)
    for event in releases:
        if accountant not in accountants_for(event):
            raise ValueError(
                f"accountant={accountant!r} has no bound for {event.sampling} sampling when neighbours differ by "
                "replace_one; use accountant='pld', or neighboring='add_or_remove_one'"
            )
    return epsilon_by_divergences(everything, delta)


def selections(events: Iterable[Event]) -> list[Selection]:
    """The selections among ``events`` whose runs released anything."""
    return [
        event for event in merged(events) if isinstance(event, Selection) and any(each.count for each in event.events)
    ]


def used_for(events: Sequence[Event], accountant: str) -> str:
    """The accountant that bounds ``events``: with a selection among them, Rényi divergences are all that is known."""
    return "rdp" if selections(events) else accountant


def sampled_releases(events: Iterable[Event]) -> list[SampledRelease]:
    """Each distinct mechanism among ``events`` with its count, as a release over a sample.

    Raises:
        ValueError: the events are about different neighbours, or a selection is among them.
    """
    listed = _mechanisms(events)
    if any(isinstance(event, Selection) for event in listed):
        raise ValueError(
            "the best of a random number of runs is among the events, and only Rényi divergences of it are known; "
            "charge it to a ledger of its own"
        )
    _check_alike(listed)
    happened = merged(_as_sampled(event) for event in listed if not isinstance(event, Selection))
    return [replace(event, noise_multiplier=min(event.noise_multiplier, MOST_NOISE)) for event in happened]


def _check_alike(events: Iterable[Event]) -> None:
    """Raises ValueError where the events are about different neighbours."""
    kinds = {(event.relation, event.unit) for event in merged(events)}
    if len(kinds) > 1:
        listed = ", ".join(f"{relation} of one {unit}" for relation, unit in sorted(kinds))
        raise ValueError(
            f"events must be about the same neighbours to add up to one guarantee; got {listed}. Report them "
            "separately, or charge runs that are to be added up with the same neighboring and unit of privacy"
        )


def accountants_for(event: Event) -> tuple[str, ...]:
    """The accountants that have a bound for ``event``: "pld" for all but selections, "rdp" for some samplings."""
    if isinstance(event, Selection):
        return ("rdp",)
    sampled = _as_sampled(event)
    fixed = isinstance(sampled, FixedSizeGaussian)
    return ACCOUNTANTS if fixed or sampled.relation == "add_or_remove_one" else ("pld",)


def _as_sampled(event: SampledRelease | JointGaussian) -> SampledRelease:
    once = event.together if isinstance(event, JointGaussian) else event
    return once.turns if isinstance(once, CyclicPoissonGaussian) else once


def _mechanisms(events: Iterable[Event]) -> list[Event]:
    """`merged`, but for events of mechanisms without a name, whose steps don't add up to turns."""
    events = list(events)
    unnamed = [event for event in events if mechanism_of(event) == ""]
    return unnamed + merged(event for event in events if mechanism_of(event) != "")
