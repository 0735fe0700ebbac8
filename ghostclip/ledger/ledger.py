"""Ledger: the file of spent privacy, and the account that a run has in it."""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter
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
    """A file that says what was spent: whatever happens to the process, never less than was released.

    Steps are reserved in blocks: an intent for a whole block is written and flushed to the disk (fsync) before the
    first of its steps is released, and counts as spent from then on. So a crash makes the ledger over-count, by less
    than a block, and never under-count. A run that ends as it should gives back what it has left of its block: the
    record that says so is written after nobody can take those steps any more, by the process that reserved them, and
    only when the file is as that process left it.

    A last line that a crash cut short was never flushed as a whole, so nothing was released on it. It is counted all
    the same when only its end is missing, and taken away otherwise.

    One process at a time may write (a lock on the file tells the others); its engines may share the ledger. A forked
    process can't write through what its parent opened. CRC and hash chain show damage and careless edits; they are no
    signature. How far it had come is noted in an extended attribute of the file too, so that one which was cut or
    written over with an older copy is refused; one that was replaced by another file is told by `contains`, with a
    `head` that was kept elsewhere.

    Args:
        path: of the file. The first account creates it. Use a local disk: locks and fsync of network file systems may
            be unreliable.
        block: the number of steps reserved at a time, >= 1; 1 flushes every step to the disk.

    Raises:
        ValueError, TypeError: an argument is out of range.
    """

    def __init__(self, path: str | os.PathLike[str], *, block: int = BLOCK) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"the path of a ledger must be a str or a Path; got {path!r} of type {type(path).__name__}")
        self.path = Path(os.path.abspath(path))
        self.block = positive_int(block=block)

    def account(self, noise: str = "standard") -> Account:
        """Opens an account, through which one run charges its steps.

        Args:
            noise: the mode of the run's noise; it is recorded.

        Raises:
            LedgerError: another process uses the file, or it is damaged, of another version, or can't be created.
        """
        return Account(self, noise)

    @property
    def contents(self) -> Contents:
        """The records of the file.

        Raises:
            LedgerError: the file can't be read or is damaged. The other properties raise it, too.
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
        """The number of records and the last record's hash. `contains` compares a later copy of the file with it."""
        return self.contents.head

    def contains(self, head: Head) -> bool:
        """Whether the ledger continues the one that had this ``head``; False for an older copy or another ledger."""
        return self.contents.contains(head)

    @property
    def events(self) -> list[Event]:
        """What was spent, one event a mechanism; blocks in use by this process count as far as they were taken."""
        used = _in_use(self.path)
        runs = self.contents.totals if used is None else used[1]
        return merged(replace(event, count=count) for spent in runs.values() for event, count in spent.items())


class Account:
    """What one run spends from a ledger. Made by `Ledger.account`.

    Attributes:
        run: its random name.
    """

    def __init__(self, ledger: Ledger, noise: str) -> None:
        self._path, self._block, self._noise = ledger.path, ledger.block, noise
        self._journal, self.run = in_turn(joined)(ledger.path)
        # When a run is forgotten rather than closed, or the process ends.
        self._forgotten = weakref.finalize(self, give_up, self._journal, self.run)

    @in_turn
    def charge(self, event: Event, most: Most | None = None) -> None:
        """Charges one release; when this returns, the charge is on the disk and the release may happen.

        Args:
            event: with a count of 1.
            most: asked before a new block is reserved, how many steps it may have; see `check`.

        Raises:
            LedgerError: the charge can't be written; nothing may be released.
        """
        self._check_open()
        if not self._journal.take(self.run, event):
            self._journal.reserve(self.run, event, self._block, self._noise, most or (lambda *_: sys.maxsize))
            self._journal.take(self.run, event)

    @in_turn
    def check(self, event: Event, most: Most) -> None:
        """Raises what `charge` would raise for want of budget.

        Args:
            event: with a count of 1.
            most: (records that aren't the run's own, {run: how often each event was charged}) -> the most steps that
                it may reserve, at least 1, or it raises. The first argument changes whenever others spend.
        """
        self._check_open()
        self._journal.check(self.run, event, most)

    @property
    @in_turn
    def runs(self) -> dict[str, Counter[Event]]:
        """{run: how often each event (of count 1) was charged}, blocks in use as far as they were taken."""
        return self._journal.taken()

    def close(self) -> None:
        """Gives back what is left of the block (not in a forked process). Nothing can be charged from here on.

        Raises:
            LedgerError: the file isn't as it was left, or can't be written; what is left of the block stays spent.
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
