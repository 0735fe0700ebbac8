"""Small ledgers for tests: charging them, and reading them as somebody else would."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ghostclip.events import (
    CyclicGaussian,
    CyclicPoissonGaussian,
    Event,
    FixedSizeGaussian,
    JointGaussian,
    SampledGaussian,
    Selection,
    TruncatedGaussian,
)
from ghostclip.ledger import Account, Ledger
from ghostclip.ledger.records import parsed

EVENT = SampledGaussian(0.01, 1.1)
OTHER = SampledGaussian(0.02, 0.7)
KINDS: list[Event] = [
    EVENT,
    SampledGaussian(1 / 3, 0.1 + 0.2, 7, relation="replace_one", unit="user"),
    FixedSizeGaussian(0.5, 1.0),
    TruncatedGaussian(0.5, 1.0, dataset_size=100, max_batch_size=60),
    CyclicPoissonGaussian(0.08, 1.0, 9, separation=8, mechanism="a1", correlation="BandedToeplitz(bands=8)"),
    CyclicGaussian(1.0, 1.0, 9, separation=4, mechanism="b2", sensitivity=1.5),
    JointGaussian((EVENT, replace(EVENT, noise_multiplier=3.0)), 4),
    Selection((replace(EVENT, count=7),), 10.0, "poisson", 2),
    Selection((EVENT, replace(EVENT, noise_multiplier=3.0)), 2.5, 0.5),
]


def charged(account: Account, steps: int, event: Event = EVENT) -> Account:
    for _ in range(steps):
        account.charge(event)
    return account


def spent(path: Path) -> int:
    """How many steps the file counts, as a reader that has nothing to do with this process finds it."""
    return sum(charge.spent.count for charge in parsed(path.read_bytes(), path).charges.values())


def put(path: Path, content: bytes) -> None:
    """A file as a crash leaves it: nothing beside its content tells what it had."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line)["record"] for line in path.read_text().splitlines()]


def in_child(work: Callable[[], None]) -> int:
    """Runs ``work`` in a fork that ends without cleaning up, and returns its exit status: 0 when nothing was raised."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def some_records(path: Path) -> bytes:
    """A ledger of a few runs, some of which returned part of their blocks."""
    for noise, event, steps in (("standard", EVENT, 5), ("hardened", KINDS[6], 3), ("standard", EVENT, 4)):
        charged(Ledger(path, block=4).account(noise), steps, replace(event, count=1)).close()
    return path.read_bytes()
