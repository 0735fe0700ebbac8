"""One ledger file while this process appends to it: blocks of steps, each on the disk before the first is taken."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ghostclip.errors import LedgerError
from ghostclip.events import Event
from ghostclip.ledger import files
from ghostclip.ledger.records import Contents, Head, check_kept, encoded, line_of, parsed, take_in
from ghostclip.validate import positive_int

__all__ = ["Journal", "Most", "now"]

# (how many records aren't the run's own, what each run spent) -> the most that it may reserve; it may raise instead.
Most = Callable[[int, dict[str, Counter[Event]]], int]


@dataclass
class Block:
    """What an intent reserved for a run: the record's number, the event (of count 1), how many are left to take."""

    record: int
    event: Event
    left: int


class Journal:
    """Appends to a locked ledger. One thread at a time may call its methods; see `ghostclip.ledger.turns`.

    Args:
        path: absolute.
        file: a descriptor that `files.locked` gave; it is closed with the journal.

    Attributes:
        contents: all that is in the file.
        runs: the names of this process's runs.

    Raises:
        LedgerError: the file is no ledger, is damaged, or can't be written.
    """

    def __init__(self, path: Path, file: int) -> None:
        self.path, self.contents = path, Contents()
        self.runs: set[str] = set()
        self._file, self._process = file, os.getpid()
        self._blocks: dict[str, Block] = {}
        self._written: Counter[str] = Counter()
        self._sure, self._broken = False, False
        # Of all that this process left in the file.
        self._digest = hashlib.sha256()
        self._stamp: tuple[int, int] | None = None
        self._load()

    def charge(self, run: str, event: Event, count: int, noise: tuple[str, str], most: Most) -> None:
        """Charges ``event``, of count 1: from the run's block, else from a new one, which is on the disk before.

        A new block has ``count`` of them, or as few as ``most`` allows, which may raise. ``noise`` is the run's mode
        and generator, see `Charge`.
        """
        self._check_owner()
        if self._block_for(run, event) is None:
            self._reserve(run, event, count, noise, most)
        self._blocks[run].left -= 1

    def _reserve(self, run: str, event: Event, count: int, noise: tuple[str, str], most: Most) -> None:
        """Writes the intent of a new block."""
        self._refresh()
        allowed = positive_int(most=min(count, most(*self._spent_for(run))))
        returned = self._given_up(run)
        intent = {"kind": "intent", "time": now(), "run": run, "noise": noise[0], "generator": noise[1]}
        self._append([*returned, intent | {"event": encoded(replace(event, count=allowed))}])
        self._written[run] += 1 + len(returned)
        self._blocks[run] = Block(len(self.contents.hashes) - 1, replace(event, count=1), allowed)

    def check(self, run: str, event: Event, most: Most) -> None:
        """Raises what `charge` would, where the next step needs a new block and may not have it."""
        self._check_owner()
        if self._block_for(run, event) is None:
            most(*self._spent_for(run))

    def _spent_for(self, run: str) -> tuple[int, dict[str, Counter[Event]]]:
        """What `Most` is told: of other runs all that they reserved, of this one what it took."""
        spent = dict(self.contents.totals)
        if run in spent:
            spent[run] = self.taken()[run]
        # An intent that was interrupted counts as somebody else's: it is there, and the run doesn't have its block.
        return len(self.contents.hashes) - self._written[run], spent

    def _block_for(self, run: str, event: Event) -> Block | None:
        """The run's block, where it has such events left."""
        block = self._blocks.get(run)
        return block if block is not None and block.left and block.event == event else None

    def end(self, run: str) -> None:
        """Gives back what is left of the run's block."""
        self._check_owner()
        if returned := self._given_up(run):
            self._refresh()
            self._append(returned)

    def taken(self) -> dict[str, Counter[Event]]:
        """What each run spent: how often each event (of count 1), blocks in use as far as they were taken."""
        found = {run: Counter(spent) for run, spent in self.contents.totals.items()}
        for run, block in self._blocks.items():
            found[run][block.event] -= block.left
        return found

    def is_ours(self) -> bool:
        """Whether this process opened it, rather than one that it was forked from."""
        return self._process == os.getpid() and self._file >= 0

    def is_of(self, path: Path) -> bool:
        """Whether the path leads to this journal's file."""
        return files.is_at(path, self._file)

    def close(self) -> None:
        """Lets go of the file and its lock."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _given_up(self, run: str) -> list[dict[str, Any]]:
        """The record that returns what the run has left, which nobody can take from here on."""
        block = self._blocks.pop(run, None)
        if block is None or not block.left:
            return []
        count, block.left = block.left, 0
        return [{"kind": "returned", "time": now(), "run": run, "of": block.record, "count": count}]

    def _check_owner(self) -> None:
        if not self.is_ours():
            raise LedgerError(
                f"the ledger {self.path} was opened by the process that this one was forked from, and spending from it "
                "here would not be seen there; let the parent do all steps, or build the PrivacyEngine in this process"
            )

    def _refresh(self) -> None:
        """Makes sure that the file is as this journal left it."""
        if self._broken:
            raise LedgerError(
                f"the ledger {self.path} could not be brought to the disk before, so what is there is not known; see "
                "to the disk, then start the run again"
            )
        if not self._sure:
            self._load()
        files.check_place(self.path, self._file)
        # Reading all of it takes 1.5 ms for 100,000 steps in blocks of 32, and 100 ms one by one; this takes 10 us.
        if self._stamp is None or files.stamp(self._file) != self._stamp:
            if hashlib.sha256(files.read(self.path, self._file)).digest() != self._digest.digest():
                raise self._changed()
            self._stamp = files.seal(self._file)

    def _append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Writes records and returns when they are on the disk. Whatever comes in between, they may count as spent."""
        data, hash = b"", self.contents.head.hash
        for number, record in enumerate(records, len(self.contents.hashes)):
            line, hash = line_of(record, number, hash)
            data += line
        self._sure = False
        files.write(self.path, self._file, data)
        self._flush()
        for line in data.splitlines():
            take_in(self.contents, line, self.path)
        self._digest.update(data)
        self._sure = True
        files.note(self._file, str(self.contents.head))
        self._stamp = files.seal(self._file)

    def _flush(self) -> None:
        try:
            files.flush(self.path, self._file)
        except LedgerError:
            self._broken = True
            raise

    def _load(self) -> None:
        """Reads the file, and mends a last line that a crash had cut short."""
        known = self.contents.head
        content = files.read(self.path, self._file)
        contents = parsed(content, self.path)
        check_kept(contents, Head.read(files.noted(self._file)), self.path)
        if known.records and not contents.contains(known):
            raise self._changed()
        if contents.rest:
            files.write(self.path, self._file, contents.rest)
        elif contents.torn:
            files.cut(self.path, self._file, contents.size)
        # Also what an earlier process wrote and was killed before it could flush.
        self._flush()
        gone = 0 if contents.rest else len(contents.torn)
        self._digest = hashlib.sha256((content + contents.rest)[: contents.size])
        contents.torn = contents.rest = b""
        self.contents, self._sure = contents, True
        files.note(self._file, str(contents.head))
        self._stamp = files.seal(self._file)
        if gone:
            self._append([{"kind": "recovered", "time": now(), "bytes": gone}])

    def _changed(self) -> LedgerError:
        return LedgerError(
            f"the ledger {self.path} was changed by something else while it was in use; put back what was there "
            "before you go on, or what this run spent is forgotten"
        )


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
