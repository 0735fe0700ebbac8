"""ghostclip ledger: what a ledger says was spent, by which runs, and whether the file is whole"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ghostclip import accounting
from ghostclip.cli.arguments import add_accounting, add_json, print_json
from ghostclip.events import Event
from ghostclip.ledger import Charge, Ledger

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = (
        "example: ghostclip ledger run.ledger --delta 1e-6\n"
        "The file is read, never written; a run in progress is counted with all the steps it has reserved."
    )
    parser.add_argument("ledger", metavar="FILE", help="that PrivacyEngine(ledger=...) or train --ledger has written")
    add_accounting(parser, "which bound epsilon is (default: pld, the tighter one)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Checks every record, and prints what was charged and what it adds up to."""
    ledger = Ledger(arguments.ledger)
    head, torn, charges = ledger.head, ledger.torn, ledger.charges
    runs, spent = _by_run(charges), [charge.spent for charge in charges]
    choice = {"delta": arguments.delta, "accountant": arguments.accountant}
    if arguments.json:
        found = {"ledger": arguments.ledger, "records": head.records, "head": head.hash, "torn_bytes": torn}
        print_json(found | {"runs": runs, "epsilon": accounting.epsilon_of(spent, **choice), **choice})
        return 0
    print(f"{arguments.ledger}: {head.records} records, each whole and in its place; the last hash is {head.hash}")
    if torn:
        print(f"A crash cut the last line short after {torn} bytes; the next run mends it.")
    for row in runs:
        times = f"from {row['from']} to {row['to']}"
        print(f"  run {row['run']}, {row['noise']} noise, {times}: {row['steps']:,} steps over {row['setting']}")
    print(accounting.guarantee(spent, **choice))
    return 0


def _by_run(charges: Sequence[Charge]) -> list[dict[str, Any]]:
    """One row for each run and each kind of step it took, in the order in which they started."""
    found: dict[tuple[str, Event], list[Charge]] = {}
    for charge in charges:
        found.setdefault((charge.run, replace(charge.event, count=1)), []).append(charge)
    return [_row(run, event, taken) for (run, event), taken in found.items()]


def _row(run: str, event: Event, charges: Sequence[Charge]) -> dict[str, Any]:
    reserved, returned = sum(charge.event.count for charge in charges), sum(charge.returned for charge in charges)
    return {
        "run": run,
        "noise": charges[0].noise,
        "from": charges[0].time,
        "to": charges[-1].time,
        "setting": accounting.samples(event),
        "reserved": reserved,
        "returned": returned,
        "steps": reserved - returned,
        "sample_rate": event.sample_rate,
        "noise_multiplier": event.noise_multiplier,
        "neighboring": event.relation,
        "unit": event.unit,
    }
