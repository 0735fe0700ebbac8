"""What the leading rank tells the others of what was spent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ghostclip.engine.noises import Noises
from ghostclip.events import Event

__all__ = ["Runs", "Told"]

# {random name of a run: how often each event (of count 1) was charged by it}
Runs = Mapping[str, Mapping[Event, int]]


class Told(NamedTuple):
    """What the leading rank says after each charge.

    Attributes:
        events: all that was spent.
        runs: what by the runs that led to the model.
        head: how far the ledger is, `ghostclip.ledger.Head` as a dict; None without one.
        ledger: its path, or None.
        noises: of all that was charged to it, and of releases before the training.
    """

    events: list[Event]
    runs: Runs
    head: dict[str, Any] | None
    ledger: str | None
    noises: Noises
