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

_noted: ContextVar[list[Charges] | None] = ContextVar("charges of the engines inside of a search", default=None)


class Noted:
    """What all engines charged that were built since: one release under one name counts once.

    Example: an engine takes 5 steps, and 2 more later. `take` has 5 after the first ones, then 2, then nothing.
    """

    def __init__(self) -> None:
        self._engines: list[Charges] = []
        self._taken: dict[str, Counter[Event]] = {}

    def take(self, without: Container[str]) -> list[Event]:
        """What was charged since this was called last, one event a mechanism; ``without`` runs of these names."""
        runs: dict[str, Counter[Event]] = {}
        for charges in self._engines:
            for run, spent in charges.items():
                runs[run] = runs.get(run, Counter()) | spent
        new = [spent - self._taken.get(run, Counter()) for run, spent in runs.items() if run not in without]
        self._taken = runs
        return merged(replace(event, count=count) for spent in new for event, count in spent.items())


@contextmanager
def noting_charges() -> Iterator[Noted]:
    """Inside, each engine that is built is noted."""
    noted = Noted()
    token = _noted.set(noted._engines)
    try:
        yield noted
    finally:
        _noted.reset(token)


def note_charges(charges: Charges) -> None:
    """An engine was built, and charges here; nothing happens outside of `noting_charges`."""
    if (engines := _noted.get()) is not None:
        engines.append(charges)
