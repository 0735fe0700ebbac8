"""What engines charge inside of a search's runs: the search compares it with what it is charged for a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from ghostclip.events import Event, merged

__all__ = ["Noted", "note_charges", "noting_charges"]

# {name of a run: how often each event, of count 1, was charged by it}: an engine's own, which goes on as it does.
Charges = Mapping[str, Counter[Event]]

# What each had charged when it was noted, too, which isn't the search's.
Engines = list[tuple[Charges, Charges]]

_noted: ContextVar[Engines | None] = ContextVar("charges of the engines inside of a search", default=None)
_searches: list[Engines] = []  # all that are going on


class Noted:
    """What all engines charged since: one release under one name counts once.

    Example: an engine takes 5 steps, and 2 more later. `take` has 5 after the first ones, then 2, then nothing.
    """

    def __init__(self) -> None:
        self._engines: Engines = []
        self._taken: dict[str, Counter[Event]] = {}

    def take(self, without: Container[str]) -> list[Event]:
        """What was charged since this was called last, one event a mechanism; ``without`` runs of these names."""
        runs: dict[str, Counter[Event]] = {}
        for charges, before in self._engines:
            for run, spent in charges.items():
                runs[run] = runs.get(run, Counter()) | (spent - before.get(run, Counter()))
        new = [spent - self._taken.get(run, Counter()) for run, spent in runs.items() if run not in without]
        self._taken = runs
        return merged(replace(event, count=count) for spent in new for event, count in spent.items())


@contextmanager
def noting_charges() -> Iterator[Noted]:
    """Inside, each engine that is built, or takes a step, is noted: in this thread, and in those without a search."""
    noted = Noted()
    _searches.append(noted._engines)
    token = _noted.set(noted._engines)
    try:
        yield noted
    finally:
        _noted.reset(token)
        _searches[:] = [each for each in _searches if each is not noted._engines]


def note_charges(charges: Charges, built: bool = False) -> None:
    """An engine was ``built``, or is about to charge, here; nothing happens outside of `noting_charges`."""
    if not _searches:
        return
    own = _noted.get()
    for engines in _searches if own is None else [own]:
        if all(known is not charges for known, _ in engines):
            engines.append((charges, {} if built else {run: Counter(spent) for run, spent in charges.items()}))
