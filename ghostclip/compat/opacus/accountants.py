"""Opacus's accountants: what its engines charged, epsilon with its orders, and its saved histories."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar, NoReturn, Protocol

import numpy as np
from scipy.special import logsumexp

from ghostclip.accounting import epsilon_of, noise_for
from ghostclip.errors import PrivacyError
from ghostclip.events import Event, FixedSizeGaussian, SampledGaussian, SampledRelease, merged
from ghostclip.ledger import Ledger
from ghostclip.ledger.records import decoded, encoded
from ghostclip.validate import open_fraction, positive

__all__ = ["Accountant", "PRVAccountant", "RDPAccountant", "create_accountant", "import_history"]

History = list[tuple[float, float, int]]
# Steps of the grid on which moments are integrated, in standard deviations, and how far beyond the mass it goes.
FINENESS, MARGIN = 1 / 24, 14.0
MOST_NOISE = 1e6


class Charging(Protocol):
    """An engine, as an accountant sees it."""

    def charged(self) -> Sequence[Event]:
        """All that it charged."""


class Accountant(ABC):
    """Counts the steps that engines charged, and those that were loaded or noted by hand.

    Nothing that was charged is ever taken back. Loading a state adds its steps, even if the state is this
    accountant's own.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self._noted: list[Event] = []
        self._shown: History = []  # what `history` gave, and how many of its entries are counted
        self._told = 0
        self.engines: list[Charging] = []

    def follow(self, engine: Charging) -> None:
        """Counts what an engine charges, now and later."""
        self.engines.append(engine)

    def follows(self, engine: Any) -> bool:
        """Whether it counts what an engine charges."""
        return engine in self.engines

    def take_over(self, other: Accountant) -> None:
        """Counts all that ``other`` counted, and what its engines charge later."""
        other._note_appended()
        self._noted += other._noted
        self.engines += other.engines

    def _note_appended(self) -> None:
        """Notes what was appended to the list that `history` gave."""
        self._noted += events_in({"history": self._shown[self._told :]})
        self._told = len(self._shown)

    @property
    def events(self) -> list[Event]:
        """All steps, one event with its count for each mechanism."""
        self._note_appended()
        return merged([*self._noted, *(event for engine in self.engines for event in engine.charged())])

    @property
    def history(self) -> History:
        """All steps as Opacus lists them: (noise multiplier, sample rate, number of steps).

        What is appended to the list counts, as steps over Poisson samples. A list that is assigned takes the place of
        what was loaded or noted. Once an engine has charged steps, assigning one raises PrivacyError.
        """
        self._shown[:] = [(event.noise_multiplier, event.sample_rate, event.count) for event in self.events]
        self._told = len(self._shown)
        return self._shown

    @history.setter
    def history(self, steps: History) -> None:
        if any(engine.charged() for engine in self.engines):
            raise PrivacyError(
                "history can't be replaced: an engine charged steps, of which none is taken back; to add others call "
                'accountant.load_state_dict({"history": [...]})'
            )
        self._noted, self._told = events_in({"history": steps}), len(self._shown)

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Adds one step over a Poisson sample that no engine of this package took.

        Args:
            noise_multiplier: standard deviation of the noise over the sensitivity; >= 0.
            sample_rate: the probability with which each example joined the batch; in (0, 1].

        Raises:
            ValueError, TypeError: an argument is out of range.
        """
        self._noted.append(SampledGaussian(sample_rate, noise_multiplier))

    @abstractmethod
    def epsilon_of(self, events: Sequence[Event], delta: float) -> float:
        """Epsilon of at least one event, all with noise."""

    def get_epsilon(self, delta: float, **options: Any) -> float:
        """The epsilon spent so far at ``delta``: 0 for no steps, inf as soon as one step had no noise.

        Args:
            delta: in (0, 1).
            options: Opacus's: ``alphas``, the orders of `RDPAccountant`. `PRVAccountant` ignores its options.

        Raises:
            ValueError: an argument is out of range.
            PrivacyError: trained parameters changed outside of steps, or the accountant has no bound for a step.
        """
        return self._epsilon(self.events, open_fraction(delta=delta), **options)

    def _epsilon(self, events: Sequence[Event], delta: float, **options: Any) -> float:
        if any(event.noise_multiplier == 0 for event in events):
            return math.inf
        return self.epsilon_of(events, delta, **options) if events else 0.0

    @abstractmethod
    def noise_for(self, event: SampledRelease, target_epsilon: float, delta: float) -> float:
        """The least noise (to about 1e-5) with which ``event``, as often as it says, stays within ``target_epsilon``.

        Raises:
            ValueError: no noise reaches it, or an argument is out of range.
        """

    @property
    def get_optimizer_hook_fn(self) -> NoReturn:
        """Raises AttributeError: engines charge their steps themselves."""
        raise AttributeError("an accountant has no get_optimizer_hook_fn; leave the hook out: each step is charged")

    def __len__(self) -> int:
        return len(self.events)

    @classmethod
    def mechanism(cls) -> str:
        """The accountant's name: "rdp" or "prv"."""
        return cls.name

    def state_dict(self) -> dict[str, Any]:
        """Opacus's ``history`` and ``mechanism``, and ``events``, which also say how examples were drawn."""
        return {"history": [*self.history], "mechanism": self.name, "events": [encoded(each) for each in self.events]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Adds the steps of a ``state_dict()``, of an accountant of this module or of Opacus, of either mechanism.

        Raises:
            ValueError: it holds no history.
        """
        self._noted += events_in(state_dict)


class RDPAccountant(Accountant):
    """Epsilon by Rényi divergences at Opacus's orders.

    The divergences are those of the sampled Gaussian mechanism (Mironov et al. 2019, section 3.3), converted to
    (epsilon, delta) by Canonne et al. 2020, proposition 12. `DEFAULT_ALPHAS` are the orders.
    """

    name = "rdp"
    DEFAULT_ALPHAS = [1 + x / 10.0 for x in range(1, 100)] + list(range(12, 64))

    def get_privacy_spent(self, *, delta: float, alphas: Sequence[float] | None = None) -> tuple[float, float]:
        """The epsilon spent so far, with the Rényi order that gives it.

        Args:
            delta: in (0, 1).
            alphas: the orders to try, each above 1; None: `DEFAULT_ALPHAS`.

        Returns:
            (epsilon, order); (0, 0) for no steps, (inf, 0) if a step had no noise.

        Raises:
            ValueError: an argument is out of range.
            PrivacyError: trained parameters changed outside of steps, or the accountant has no bound for a step.
        """
        events = self.events
        if not events:
            return 0.0, 0.0
        if any(event.noise_multiplier == 0 for event in events):
            return math.inf, 0.0
        return _best(events, open_fraction(delta=delta), self.DEFAULT_ALPHAS if alphas is None else alphas)

    def epsilon_of(self, events: Sequence[Event], delta: float, alphas: Sequence[float] | None = None) -> float:
        """The least epsilon over the orders."""
        return _best(events, delta, self.DEFAULT_ALPHAS if alphas is None else alphas)[0]

    def noise_for(self, event: SampledRelease, target_epsilon: float, delta: float) -> float:
        """The noise is found by bisection."""
        target, delta = positive(target_epsilon=target_epsilon), open_fraction(delta=delta)

        def within(noise: float) -> bool:
            return self.epsilon_of([replace(event, noise_multiplier=noise)], delta) <= target

        high = 1.0
        while not within(high):
            high *= 2
            if high > MOST_NOISE:
                raise ValueError(f"target_epsilon={target!r} can't be reached; raise it or delta, or take fewer epochs")
        low = 0.0 if high == 1.0 else high / 2
        while high - low > 1e-5 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if within(middle) else (middle, high)
        return high


class PRVAccountant(Accountant):
    """Epsilon by privacy loss distributions, as ``accountant="pld"`` of `ghostclip.accounting`; the default.

    It is an upper bound. Opacus's PRV accountant adds its error bound of 0.01 to an estimate, so its epsilon is
    slightly larger.
    """

    name = "prv"

    def epsilon_of(self, events: Sequence[Event], delta: float, **_: Any) -> float:
        """Epsilon by PLD; Opacus's ``eps_error`` and ``delta_error`` are ignored."""
        return epsilon_of(events, delta=delta)

    def noise_for(self, event: SampledRelease, target_epsilon: float, delta: float) -> float:
        """The noise is found by `ghostclip.accounting.noise_for`."""
        return noise_for(
            lambda noise: [replace(event, noise_multiplier=noise)], target_epsilon=target_epsilon, delta=delta
        )


def create_accountant(mechanism: str) -> Accountant:
    """The accountant named "prv" or "rdp".

    Raises:
        ValueError: another name. "gdp" is a central-limit figure, which is no upper bound.
    """
    for kind in (PRVAccountant, RDPAccountant):
        if kind.name == mechanism:
            return kind()
    raise ValueError(
        f'accountant must be "prv" or "rdp" (a central-limit figure such as "gdp" is no bound); got {mechanism!r}'
    )


def events_in(state_dict: Mapping[str, Any]) -> list[Event]:
    """What a state dict of an accountant holds; ValueError where it holds no history, TypeError where it is none."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"the state of an accountant is the dict of its state_dict(); got {state_dict!r}")
    if "events" in state_dict:
        return [decoded(event) for event in state_dict["events"]]
    if "history" not in state_dict:
        raise ValueError(f"the state of an accountant must have a history; got {sorted(state_dict)}")
    try:
        history = [(rate, noise, steps) for noise, rate, steps in state_dict["history"]]
    except (TypeError, ValueError):
        got = f"got {state_dict['history']!r}"
        raise ValueError(f"history must be a list of (noise multiplier, sample rate, steps); {got}") from None
    return [SampledGaussian(*each) for each in history]


def import_history(accountant: Any, path: str | os.PathLike[str]) -> Ledger:
    """Charges the steps that an accountant counted to a ledger file, which engines with ``ledger=path`` then count.

    Each call charges all of them again.

    Args:
        accountant: an accountant of Opacus or of this module, or its ``state_dict()``.
        path: of the ledger; an existing one is continued.

    Returns:
        The ledger.

    Raises:
        LedgerError: the file is in use, is damaged or can't be written.
        ValueError: the accountant holds no history, or a number in it is out of range.
    """
    for event in events_in(getattr(accountant, "state_dict", lambda: accountant)()):
        account = Ledger(path, block=max(1, event.count)).account()
        for _ in range(event.count):
            account.charge(replace(event, count=1))
        account.close()
    return Ledger(path)


def _best(events: Sequence[Event], delta: float, orders: Sequence[float]) -> tuple[float, float]:
    """(the least epsilon over the orders, its order)."""
    alphas = np.asarray(orders, dtype=float)
    if not len(alphas) or not bool((np.isfinite(alphas) & (alphas > 1)).all()):
        raise ValueError(f"alphas must be orders above 1, for which Rényi divergences bound epsilon; got {orders!r}")
    total = sum(
        (event.count * _divergences(_as_gaussian(event), tuple(orders)) for event in events), np.zeros(len(alphas))
    )
    found = total - (math.log(delta) + np.log(alphas)) / (alphas - 1) + np.log1p(-1 / alphas)
    best = int(np.argmin(found))
    return max(0.0, float(found[best])), float(alphas[best])


def _as_gaussian(event: Event) -> tuple[float, float]:
    """(rate, noise multiplier) of the Poisson sample whose divergences bound the event's."""
    if event.relation != "add_or_remove_one" or not isinstance(event, SampledGaussian | FixedSizeGaussian):
        raise PrivacyError(f'the RDP accountant has no bound for {event!r}; use the default, accountant="prv"')
    # A sample of fixed size exchanges one example for another, which moves the sum twice as far.
    halved = isinstance(event, FixedSizeGaussian)
    return event.sample_rate, event.noise_multiplier / (2 if halved else 1)


@lru_cache(maxsize=64)
def _divergences(gaussian: tuple[float, float], orders: tuple[float, ...]) -> np.ndarray:
    """Of one Poisson-sampled release, for each order a: log E[(1 - q + q exp((2x - 1) / 2s^2))^a] / (a - 1).

    The expectation is over x ~ N(0, s^2). The trapezoidal rule is exact here but for rounding: the integrand is
    analytic and vanishes at both ends.
    """
    rate, noise = gaussian
    found = []
    for order in orders:
        x = np.arange(-MARGIN * noise, order + MARGIN * noise, noise * FINENESS)
        ratio = (2 * x - 1) / (2 * noise**2) + math.log(rate)
        mixed = ratio if rate == 1.0 else np.logaddexp(math.log1p(-rate), ratio)
        density = -(x**2) / (2 * noise**2) + math.log(FINENESS / math.sqrt(2 * math.pi))
        found.append(float(logsumexp(order * mixed + density)) / (order - 1))
    return np.maximum(found, 0.0)
