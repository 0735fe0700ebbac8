"""What engines charge inside of a search's runs: the search compares it with what it is charged for a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from ghostclip.events import Event, merged

__all__ = ["Noted", "note_charges", "noting_charges"]

# {name of a run: how often each event, of count 1, was charged by it}: an engine's own, which goes on as it does.
Charges = Mapping[str, Counter[Event]]


@dataclass(frozen=True)
class _Engine:
    """One that charges inside of a search.

    Attributes:
        charges: of it, as they are now.
        before: what it had charged when it was noted, which isn't the search's.
        after: the charges of the engines that trained its model before it.
    """

    charges: Charges
    before: Charges
    after: Sequence[Charges]


_noted: ContextVar[list[_Engine] | None] = ContextVar("the engines inside of a search", default=None)
_searches: list[list[_Engine]] = []  # all that are going on


class Noted:
    """What all engines charged since: one release under one name counts once.

    Example: an engine takes 5 steps in the first run of the search, 2 more in its score, and 5 in the second run.
    `take` has 5, then 2, then 12: the second run goes on from the weights of the first one.
    """

    def __init__(self) -> None:
        self._engines: list[_Engine] = []
        self._taken: dict[str, Counter[Event]] = {}
        self._earlier: dict[str, Counter[Event]] = {}

    def begin(self) -> None:
        """A run of the search begins: what goes on from an earlier one counts with all that this charged."""
        self._earlier = self._taken

    def take(self, without: Container[str]) -> list[Event]:
        """What was charged since this was called last, one event a mechanism; ``without`` runs of these names."""
        found: dict[str, Counter[Event]] = {}
        every = [
            {run: spent for run, spent in _less(each.charges, each.before).items() if run not in without}
            for each in self._engines
        ]
        for engine, own in zip(self._engines, every, strict=True):
            new, whole = _less(own, self._taken), _joined([own, *engine.after])
            goes_on = any(new.values()) and any(map(self._earlier.get, whole))
            found = _joined([found, whole if goes_on else new])
        self._taken = _joined([self._taken, *every])
        return merged(replace(event, count=count) for spent in found.values() for event, count in spent.items())


def _less(these: Charges, those: Charges) -> dict[str, Counter[Event]]:
    return {run: spent - those.get(run, Counter()) for run, spent in these.items()}


def _joined(every: Sequence[Charges]) -> dict[str, Counter[Event]]:
    """All runs; of one that is in several what is most."""
    found: dict[str, Counter[Event]] = {}
    for charges in every:
        for run, spent in charges.items():
            found[run] = found.get(run, Counter()) | spent
    return found


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


def note_charges(charges: Charges, built: bool = False, after: Sequence[Charges] = ()) -> None:
    """An engine was ``built``, or is about to charge, here; nothing happens outside of `noting_charges`.

    ``after`` are the charges of engines that trained the model before, whose weights it still has.
    """
    if not _searches:
        return
    own = _noted.get()
    for engines in _searches if own is None else [own]:
        if all(known.charges is not charges for known in engines):
            before = {} if built else {run: Counter(spent) for run, spent in charges.items()}
            engines.append(_Engine(charges, before, after))
