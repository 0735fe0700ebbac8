"""Ledger: the file of spent privacy, and the account that a run has in it."""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ghostclip.errors import LedgerError
from ghostclip.events import Event, merged
from ghostclip.ledger import files
from ghostclip.ledger.journal import Most
from ghostclip.ledger.records import Contents, Head, check_kept, parsed
from ghostclip.ledger.turns import end, found, give_up, in_turn, joined
from ghostclip.validate import positive_int

__all__ = ["BLOCK", "Account", "Ledger"]

BLOCK = 32


class Ledger:
    """A file that records the privacy spent. It never records less than was released, even after a crash.

    Steps are reserved in blocks. The record of a whole block is on the disk (fsync) before the first of its steps is
    released, and all its steps count as spent from then on. So a crash makes the ledger count too much, by less than a
    block, and never too little. A run that ends normally gives the rest of its block back.

    A crash may leave an incomplete last line. It was never flushed, so nothing was released on it. The ledger completes
    and counts the line if only its end is missing, and removes it otherwise.

    One process at a time may write; a lock on the file stops others, and forked processes too. Engines of one process
    may share a ledger.

    Checksums and a hash chain show damage and careless edits. They are no signature. The last hash is also in an
    extended attribute of the file, so a file that was cut or overwritten by an older copy is refused. To notice that
    the file was replaced by another one, keep its `head` elsewhere and compare by `contains`.

    Args:
        path: of the file, which the first account creates. Use a local disk: locks and fsync of network file systems
            may be unreliable.
        block: the number of steps reserved at a time, >= 1. With 1 each step waits for the disk.

    Raises:
        ValueError, TypeError: an argument is out of range.
    """

    def __init__(self, path: str | os.PathLike[str], *, block: int = BLOCK) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"the path of a ledger must be a str or a Path; got {path!r} of type {type(path).__name__}")
        self.path = Path(os.path.abspath(path))
        self.block = positive_int(block=block)

    def account(self, noise: str = "standard", generator: str = "", run: str = "") -> Account:
        """Opens an account, through which one run charges its steps.

        Args:
            noise: the run's noise mode, which is recorded: "standard", "hardened" or "test".
            generator: where its random numbers come from, in words, which is recorded, too.
            run: a name that no other run has, under which a charge is found again; "": a random one.

        Raises:
            LedgerError: another process uses the file, or it is damaged, of another version, or can't be created.
        """
        return Account(self, noise, generator, run)

    @property
    def contents(self) -> Contents:
        """The records of the file, with ``charges`` ({number of the record: `Charge`}) and ``hashes`` among them.

        Raises:
            LedgerError: the file can't be read or is damaged. The other properties raise it too.
        """
        if (used := _in_use(self.path)) is not None:
            return used[0]
        # In this order, since another process may be writing.
        noted = Head.read(files.noted(self.path))
        contents = parsed(files.read(self.path), self.path)
        check_kept(contents, noted, self.path)
        return contents

    @property
    def head(self) -> Head:
        """The number of records and the hash of the last one, for `contains`."""
        return self.contents.head

    def contains(self, head: Head) -> bool:
        """Whether this is the ledger that had ``head``, unchanged up to there; False for an older copy or another one.

        Raises:
            LedgerError: the file can't be read or is damaged.
        """
        return self.contents.contains(head)

    @property
    def events(self) -> list[Event]:
        """The releases that count as spent, one event per mechanism, for `ghostclip.accounting.epsilon_of`.

        Of a block that a run of this process has reserved, only the steps it took count.
        """
        runs = self._runs()
        return merged(replace(event, count=count) for spent in runs.values() for event, count in spent.items())

    def _runs(self) -> Mapping[str, Counter[Event]]:
        """{name of a run: how often each event (of count 1) was charged by it}."""
        used = _in_use(self.path)
        return self.contents.totals if used is None else used[1]

    def take_in(self, runs: Mapping[str, Mapping[Event, int]], noise: str, generator: str) -> int:
        """Charges what runs spent elsewhere, as one whose checkpoint is restored, under their own names.

        Args:
            runs: {name of a run: how often each event (of count 1) was charged by it}.
            noise, generator: which are recorded, as for `account`.

        Returns:
            How many steps the ledger didn't have.

        Raises:
            LedgerError: they can't be written.
        """
        for event in (event for spent in runs.values() for event in spent):
            _check_single(event)
        known = self._runs()
        missing = {run: Counter(spent) - known.get(run, Counter()) for run, spent in runs.items()}
        for run, event, count in ((run, *each) for run, spent in missing.items() for each in spent.items()):
            account = Ledger(self.path, block=count).account(noise, generator, run)
            try:
                for _ in range(count):
                    account.charge(event)
            finally:
                account.close()
        return sum(spent.total() for spent in missing.values())


def _check_single(event: Event) -> None:
    if event.count != 1:
        raise ValueError(
            f"an event is charged with a count of 1, once for each release and before it; got count={event.count}"
        )


class Account:
    """The part of a ledger that one run charges its steps to; `Ledger.account` returns it.

    Attributes:
        run: the name of the run, which its records have.
    """

    def __init__(self, ledger: Ledger, noise: str, generator: str, run: str = "") -> None:
        self._path, self._block, self._noise = ledger.path, ledger.block, (noise, generator)
        self._journal, self.run = in_turn(joined)(ledger.path, run)
        # When a run is forgotten rather than closed, or the process ends.
        self._forgotten = weakref.finalize(self, give_up, self._journal, self.run)

    @in_turn
    def charge(self, event: Event, most: Most | None = None) -> None:
        """Charges one release. It returns when the charge is on the disk; only then may the release happen.

        Args:
            event: the release, with a count of 1.
            most: limits a new block, as for `check`; None: no limit.

        Raises:
            ValueError: the event stands for more than one release, of which each is charged before it happens.
            LedgerError: the charge can't be written, or the account is closed. Nothing may be released.
            BudgetExceededError: or any other error that ``most`` raises. Nothing may be released.
        """
        self._check_open()
        _check_single(event)
        self._journal.charge(self.run, event, self._block, self._noise, most or (lambda *_: sys.maxsize))

    @in_turn
    def check(self, event: Event, most: Most) -> None:
        """Calls ``most`` if the next `charge` would reserve a new block, so that its error comes early.

        Args:
            event: the release, with a count of 1.
            most: (number of records of other runs, {run: {event: how often it was charged}}) -> the most steps that the
                run may reserve, >= 1. It raises an error, such as BudgetExceededError, if there is no step left.

        Raises:
            LedgerError: the account is closed, or was opened by the process that this one was forked from.
        """
        self._check_open()
        self._journal.check(self.run, event, most)

    @in_turn
    def give_back(self) -> None:
        """Gives the rest of the reserved block back: the next charge asks anew how many steps there may be.

        Raises:
            LedgerError: see `close`.
        """
        self._check_open()
        self._journal.end(self.run)

    @property
    @in_turn
    def runs(self) -> dict[str, Counter[Event]]:
        """{run: {event with a count of 1: how often it was charged}}, of all runs in the ledger.

        Of a block that a run of this process has reserved, only the steps it took count.
        """
        return self._journal.taken()

    @property
    @in_turn
    def noises(self) -> list[tuple[str, str]]:
        """(mode, generator) of the noise of all charges in the ledger, each once; a generator may be ""."""
        charges = self._journal.contents.charges.values()
        return list(dict.fromkeys((charge.noise, charge.generator) for charge in charges if charge.spent.count))

    def close(self) -> None:
        """Gives the rest of the reserved block back and ends the account. In a forked process nothing is given back.

        Raises:
            LedgerError: the file was changed by others or can't be written; the rest of the block stays spent.
        """
        if self._forgotten.detach() is not None and self._journal.is_ours():
            in_turn(end)(self._journal, self.run)

    def _check_open(self) -> None:
        if not self._forgotten.alive:
            raise LedgerError(f"this account in the ledger {self._path} was closed; build a new PrivacyEngine")


@in_turn
def _in_use(path: Path) -> tuple[Contents, dict[str, Counter[Event]]] | None:
    """What the ledger says that this process has open, and what each run took; None where it hasn't."""
    journal = found(path)
    return None if journal is None else (journal.contents, journal.taken())
