"""The lines of a ledger: JSON that people can read, each with a CRC and a hash that holds on to all lines before it.

A line is ``{"record":{...},"crc":"...","hash":"..."}``. The CRC-32 is of the record's own bytes; the hash is SHA-256 of
the hash before and those bytes, so that no line can be changed, taken out or moved without all later hashes changing.
The first record names the format and its version and has a random number, so that no two ledgers share a hash. Then:

- ``intent``: ``event``, with its count, may be released from now on; it counts as spent, released or not.
- ``returned``: of the intent ``of``, ``count`` releases will never happen: the run that had them has ended.
- ``recovered``: an opening found ``bytes`` of a line that a crash had cut short, and took them away.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ghostclip.errors import LedgerError
from ghostclip.events import EVENTS, Event, mechanism_of
from ghostclip.validate import positive_int

__all__ = [
    "VERSION",
    "Charge",
    "Contents",
    "Head",
    "check_kept",
    "decoded",
    "encoded",
    "first_line",
    "line_of",
    "parsed",
    "take_in",
]

FORMAT, VERSION = "ghostclip ledger", 1
NO_HASH = "0" * 64
START = b'{"record":'
LINE = re.compile(rb'\{"record":(\{.*\}),"crc":"([0-9a-f]{8})","hash":"([0-9a-f]{64})"\}')


@dataclass(frozen=True)
class Head:
    """The state of a ledger at some time. ``str()`` of it is a line to keep; `Ledger.contains` compares a later copy.

    Attributes:
        records: the number of records.
        hash: of the last record, 64 hexadecimal digits.
    """

    records: int
    hash: str

    def __str__(self) -> str:
        return f"{self.records} {self.hash}"

    @classmethod
    def read(cls, text: str) -> Head | None:
        """The head from its ``str()``; None for any other text."""
        records, _, hash = text.partition(" ")
        return cls(int(records), hash) if records.isdecimal() and records.isascii() else None


@dataclass(frozen=True)
class Charge:
    """A block of steps that a run reserved in a ledger.

    Attributes:
        event: the steps, with their count.
        returned: the number of these steps that the run gave back.
        run: a random name of the run.
        noise: the run's noise mode: "standard", "hardened" or "test".
        time: when they were reserved, in UTC (ISO 8601).
        generator: where its random numbers came from, in words; "" where the record doesn't say.
    """

    event: Event
    returned: int
    run: str
    noise: str
    time: str
    generator: str = ""

    @property
    def spent(self) -> Event:
        """The steps that count as spent: ``event`` without those given back."""
        return replace(self.event, count=self.event.count - self.returned)


@dataclass
class Contents:
    """What the bytes of a ledger say.

    Attributes:
        hashes: of all records, in order.
        charges: the intents by their record's number.
        totals: what each run spent, by its name: how often each event (of count 1).
        size: bytes of whole lines.
        torn: a last line that a crash cut short.
        rest: what completes that line, where it is an intent of which only the end is missing; else empty. Completed,
            it is among the rest of all this.
    """

    hashes: list[str] = field(default_factory=list)
    charges: dict[int, Charge] = field(default_factory=dict)
    totals: dict[str, Counter[Event]] = field(default_factory=lambda: defaultdict(Counter))
    size: int = 0
    torn: bytes = b""
    rest: bytes = b""

    @property
    def head(self) -> Head:
        """The last record's place and hash."""
        return Head(len(self.hashes), self.hashes[-1] if self.hashes else NO_HASH)

    def contains(self, head: Head) -> bool:
        """Whether this was once what ``head`` says."""
        return 0 < head.records <= len(self.hashes) and self.hashes[head.records - 1] == head.hash

    def add(self, record: Mapping[str, Any], hash: str) -> None:
        """Takes in the next record.

        Raises:
            ValueError, TypeError, KeyError: it doesn't mean anything at this place; the message says why.
        """
        kind, number = record["kind"], len(self.hashes)
        if number == 0:
            if kind != FORMAT:
                raise ValueError(f"the first record must be of kind {FORMAT!r}; got {kind!r}")
        elif kind == "intent":
            event = decoded(record["event"])
            positive_int(count=event.count)
            about = record["run"], record["noise"], record["time"], record.get("generator", "")
            self.charges[number] = Charge(event, 0, *about)
            self.totals[record["run"]][replace(event, count=1)] += event.count
        elif kind == "returned":
            charge, count = self.charges[record["of"]], positive_int(count=record["count"])
            if charge.returned or count > charge.event.count or charge.run != record["run"]:
                raise ValueError(f"it returns {count} of record {record['of']}, which has fewer left to its run")
            self.charges[record["of"]] = replace(charge, returned=count)
            self.totals[record["run"]][replace(charge.event, count=1)] -= count
        elif kind != "recovered":
            raise ValueError(f"its kind is {kind!r}, which version {VERSION} doesn't have")
        self.hashes.append(hash)


def encoded(event: Event) -> dict[str, Any]:
    """An event as plain data: ``{"event": name of its class, field: value, ...}``, events within it likewise.

    Raises:
        LedgerError: it is of a kind that `ghostclip.events.EVENTS` doesn't have, so that it couldn't be read back.
    """
    if EVENTS.get(type(event).__name__) is not type(event):
        raise LedgerError(
            f"a {type(event).__name__} can't be written to a ledger; it takes the events of ghostclip.events.EVENTS: "
            f"{', '.join(EVENTS)}"
        )
    if mechanism_of(event) == "":
        raise LedgerError(
            f"a {type(event).__name__} without a mechanism can't be written to a ledger, where its steps and those of "
            "other runs would count as steps of one mechanism; name it: replace(event, mechanism=...)"
        )
    values = {item.name: getattr(event, item.name) for item in fields(event)}
    parts = {name: [encoded(part) for part in value] for name, value in values.items() if isinstance(value, tuple)}
    return {"event": type(event).__name__} | values | parts


def decoded(value: Mapping[str, Any]) -> Event:
    """The event that `encoded` was given. Raises ValueError, TypeError or KeyError when there is none like that."""
    values = {name: item for name, item in value.items() if name != "event"}
    parts = {name: tuple(map(decoded, item)) for name, item in values.items() if isinstance(item, list)}
    return EVENTS[value["event"]](**values | parts)


def line_of(record: Mapping[str, Any], number: int, before: str) -> tuple[bytes, str]:
    """The line of a record and its hash, from its number and the hash of the record before."""
    body = json.dumps({"n": number, **record}, separators=(",", ":"), allow_nan=False).encode()
    return _line(body, before)


def first_line(time: str, name: str) -> bytes:
    """The line every ledger starts with; ``name`` is random."""
    return line_of({"kind": FORMAT, "version": VERSION, "id": name, "time": time}, 0, NO_HASH)[0]


def _line(body: bytes, before: str) -> tuple[bytes, str]:
    hash = hashlib.sha256(before.encode() + body).hexdigest()
    return START + body + f',"crc":"{zlib.crc32(body):08x}","hash":"{hash}"}}\n'.encode(), hash


def parsed(data: bytes, path: Any) -> Contents:
    """What a ledger's bytes say, every CRC, hash and number checked; ``path`` is for messages.

    Raises:
        LedgerError: it is damaged, of another version or no ledger at all; the message says where.
    """
    if not data.startswith(START):
        what = "is empty, which a ledger never is" if not data else "is not a ledger of ghostclip"
        raise LedgerError(
            f"the file {path} {what}; give the path of a ledger, or of a file that isn't there yet to start one"
        )
    contents = Contents()
    *lines, last = data.split(b"\n")
    for line in lines:
        take_in(contents, line, path)
    if last:
        contents.torn, contents.rest = last, _completion(last, contents, path)
    if contents.rest:
        take_in(contents, last + contents.rest[:-1], path)
    if not contents.hashes:
        raise _damaged(path, 0, "it is cut short")
    return contents


def take_in(contents: Contents, line: bytes, path: Any) -> None:
    """Checks the next line and takes in its record."""
    number, before = contents.head.records, contents.head.hash
    found = LINE.fullmatch(line)
    if found is None:
        raise _damaged(path, number, "it is not a record")
    body, crc, hash = found.groups()
    if crc.decode() != f"{zlib.crc32(body):08x}":
        raise _damaged(path, number, "its CRC is wrong, so bytes in it have changed")
    try:
        record = json.loads(body)
        if number == 0 and record["kind"] == FORMAT and record["version"] != VERSION:
            raise LedgerError(
                f"the ledger {path} is of version {record['version']}, and this is ghostclip's version {VERSION} of "
                "the format; read it with the version of ghostclip that wrote it"
            )
        if record["n"] != number or hash.decode() != _line(body, before)[1]:
            raise _damaged(
                path, number, "it doesn't continue the record before, so records were taken out, moved or edited"
            )
        contents.add(record, hash.decode())
        contents.size += len(line) + 1
    except (ValueError, TypeError, KeyError) as error:
        raise _damaged(path, number, f"it can't be read ({error})") from error


def _completion(last: bytes, contents: Contents, path: Any) -> bytes:
    """What a torn last line lacks, where its record is whole and an intent; raises when it is no part of a line."""
    number = contents.head.records
    start = START + f'{{"n":{number},"kind":"'.encode()
    if not last.startswith(start[: len(last)]):
        raise _damaged(path, number, "it is not a record")
    try:
        record, length = json.JSONDecoder().raw_decode(last[len(START) :].decode())
    except UnicodeDecodeError as error:
        raise _damaged(path, number, "it is not a record") from error
    except json.JSONDecodeError:
        return b""
    whole, _ = _line(last[len(START) : len(START) + length], contents.head.hash)
    if not whole.startswith(last):
        raise _damaged(path, number, "its CRC or its hash is wrong, so bytes in it have changed")
    return whole[len(last) :] if record.get("kind") == "intent" else b""


def check_kept(contents: Contents, noted: Head | None, path: Any) -> None:
    """Raises LedgerError when the file had come further than its contents; ``noted`` is the furthest it had come."""
    if noted is not None and not contents.contains(noted):
        raise LedgerError(
            f"the ledger {path} was cut short, or an older or other one was put in its place: it had {noted.records} "
            "records, and not all of them are there; put back a copy that has them, or what they charged is forgotten"
        )


def _damaged(path: Any, number: int, why: str) -> LedgerError:
    return LedgerError(
        f"the ledger {path} is damaged at line {number + 1}: {why}; what was spent is not known any more. Put back an "
        "undamaged copy that has all steps released so far, and never a new or older file, which would forget some"
    )
