"""One draw of noise and one charge a step, however many processes train: the leading rank's, which all of them get."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ghostclip.engine.plan import Plan
from ghostclip.engine.ranks import Alone, Ranks
from ghostclip.engine.spending import Runs, Spending
from ghostclip.events import Event
from ghostclip.ledger import Ledger
from ghostclip.noise import Noise
from ghostclip.noise.cipher import KEY_BYTES

__all__ = ["SharedNoise", "SharedSpending", "shared_noise", "spending_of"]


def shared_noise(source: Noise, ranks: Alone) -> Noise:
    """The noise of the ``ranks``: the source's own where one process trains alone."""
    return SharedNoise(source, ranks) if isinstance(ranks, Ranks) else source


def spending_of(ranks: Alone, event: Event, plan: Plan, **options: Any) -> Spending:
    """What the ``ranks`` spend; options as for `Spending`."""
    if isinstance(ranks, Ranks):
        return SharedSpending(ranks, event, plan, **options)
    return Spending(event, plan, **options)


class SharedNoise(Noise):
    """Noise that is drawn once for all ranks, by the one that leads, on the sums of all.

    Args:
        source: of the noise; used on the leading rank only.
        ranks: which train together.

    Attributes:
        mode, private: of the source.
        draws: releases that got noise here: none on a rank that doesn't lead.
    """

    def __init__(self, source: Noise, ranks: Ranks) -> None:
        self._source, self._ranks = source, ranks
        self.mode, self.private = source.mode, source.private
        # What the ranks draw their samples from, so that all draw the same.
        self._key = ranks.led(lambda: os.urandom(KEY_BYTES))
        self.draws = self._generators = 0

    def release(self, sums: Sequence[Tensor], std: float, divisor: float = 1.0) -> list[Tensor]:
        """(total of the ranks' sums + noise) / divisor, the same on all ranks; see `Noise.release`."""
        totals = self._ranks.total(sums)

        def work() -> None:
            totals[:] = self._source.release(totals, std, divisor)

        self._ranks.led(work)
        self.draws = self._source.draws
        return self._ranks.spread(totals)

    def generator(self, key: bytes | None = None) -> Any:
        """The ranks' next generator for sampling, the same on all of them."""
        self._generators += 1
        derived = hashlib.sha256(self._key + self._generators.to_bytes(8, "big")).digest()
        return self._source.generator(derived if key is None else key)

    def positions(self) -> dict[str, Any]:
        """The source's."""
        return self._source.positions()

    def resume(self, positions: Mapping[str, Any]) -> None:
        """The source goes on."""
        self._source.resume(positions)


class SharedSpending(Spending):
    """Counts on the leading rank, which alone has the ledger and may refuse; the others are told, and refuse with it.

    Args:
        ranks: which train together.
        ledger: used on the leading rank only.

    The others as for `Spending`.
    """

    def __init__(
        self,
        ranks: Ranks,
        event: Event,
        plan: Plan,
        *,
        max_epsilon: float | None = None,
        ledger: str | os.PathLike[str] | Ledger | None = None,
        noise: str = "standard",
    ) -> None:
        self._ranks = ranks
        # What the leading rank said last: all that was spent; what by the model's runs.
        self._heard: tuple[list[Event], Runs] = [], {}
        begin = partial(super().__init__, event, plan, max_epsilon=max_epsilon)
        self._shared(lambda: begin(ledger=ledger, noise=noise))
        if not ranks.leads:
            begin()

    def _shared(self, work: Callable[[], None]) -> None:
        """``work`` on the leading rank; afterwards, or when it refuses, all ranks know the same."""

        def told() -> tuple[list[Event], Runs]:
            work()
            return self.events, self.runs

        self._heard = self._ranks.led(told)

    @property
    def events(self) -> list[Event]:
        """Everything that was charged; on a rank that doesn't lead, as of the last step."""
        return super().events if self._ranks.leads else list(self._heard[0])

    @property
    def runs(self) -> dict[str, Counter[Event]]:
        """{name of a run: how often each event (of count 1) was charged by it}, of all that led to this model."""
        return super().runs if self._ranks.leads else {run: Counter(spent) for run, spent in self._heard[1].items()}

    @property
    def steps(self) -> int:
        """How many steps of the model's training were charged."""
        return sum(spent.total() for spent in self.runs.values())

    def add(self, runs: Runs) -> None:
        """Takes in what other runs were charged; called by all ranks."""
        self._shared(partial(super().add, runs))

    def charge(self) -> None:
        """Charges one step, once; called by all ranks. Raises on all what `Spending.charge` raises."""
        self._shared(super().charge)

    def check(self) -> None:
        """Raises on all ranks what `Spending.check` raises on the leading one."""
        self._shared(super().check)
