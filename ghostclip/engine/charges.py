"""What runs were charged and which noise their steps had: plain data, told among ranks and kept in checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ghostclip.errors import PrivacyError
from ghostclip.events import Event, mechanism_of, merged, within

__all__ = ["Noises", "Runs", "Told", "check_kinds", "counted", "events_of", "generators_in_words", "joined", "steps_of"]

# {random name of a run: how often each event (of count 1) was charged by it}
Runs = Mapping[str, Mapping[Event, int]]
# (mode, generator in words) of noise, each once, in the order of charges; a generator that wasn't recorded is "".
Noises = list[tuple[str, str]]


class Told(NamedTuple):
    """What the leading rank tells the others after each charge.

    Attributes:
        everything: what all runs were charged.
        runs: what those that led to the model were.
        head: how far the ledger is, `ghostclip.ledger.Head` as a dict; None without one.
        ledger: its path, or None.
        noises: of all that was charged.
    """

    everything: Runs
    runs: Runs
    head: dict[str, Any] | None
    ledger: str | None
    noises: Noises


def joined(these: Runs, those: Runs) -> dict[str, Counter[Event]]:
    """The runs of both; of one that is in both what is more, since a run only ever goes on."""
    return {run: Counter(these.get(run, {})) | Counter(those.get(run, {})) for run in {**these, **those}}


def events_of(runs: Runs) -> list[Event]:
    """What runs were charged, one event a mechanism."""
    return merged(replace(event, count=count) for spent in runs.values() for event, count in spent.items())


def counted(spent: Iterable[Event]) -> Counter[Event]:
    """{event of count 1: how often it happened}, whichever mechanism it was a step of."""
    counts: Counter[Event] = Counter()
    for event in spent:
        counts[replace(within(event, ""), count=1)] += event.count
    return counts


def steps_of(mechanism: str, runs: Runs) -> int:
    """How many steps of a mechanism runs were charged."""
    return sum(count for spent in runs.values() for event, count in spent.items() if mechanism_of(event) == mechanism)


def check_kinds(spent: Iterable[Event], step: Event, remedy: str) -> None:
    """Raises PrivacyError where what was spent is about other neighbours than the training's steps."""
    for each in spent:
        if (each.relation, each.unit) != (step.relation, step.unit):
            raise PrivacyError(
                f"what was released before (about {each.relation} of one {each.unit}) and the steps of this engine "
                f"(about {step.relation} of one {step.unit}) protect different things and don't add up to one "
                f"guarantee; {remedy}"
            )


def generators_in_words(noises: Noises) -> str:
    """A sentence for the guarantee; "" where no generator is known."""
    known = list(dict.fromkeys(generator for _, generator in noises if generator))
    if not known:
        return ""
    others = [f"from {generator}" for generator in known[1:]]
    if any(not generator for _, generator in noises):
        others.append("from a generator that was not recorded")
    return f" Its noise comes from {'; of other steps '.join([known[0], *others])}."
