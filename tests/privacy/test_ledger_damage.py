"""Ledger files that were cut short, changed, or never were ledgers: recovered or refused, never counted as less."""

import errno
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledgers import EVENT, charged, put, records, some_records, spent

from ghostclip.errors import LedgerError
from ghostclip.ledger import Ledger
from ghostclip.ledger.records import encoded, line_of, parsed


def test_a_line_cut_anywhere_is_recovered_and_counted_when_it_is_all_there(path: Path) -> None:
    charged(Ledger(path, block=4).account(), 4).close()
    before = len(path.read_bytes())
    charged(Ledger(path, block=4).account(), 4).close()
    whole = path.read_bytes()
    complete = whole.index(b',"crc"', before)
    for size in range(before, len(whole)):
        put(path, whole[:size])
        assert spent(path) == (4 if size < complete else 8)
        Ledger(path).account().close()
        assert spent(path) == (4 if size < complete else 8)
        kinds = [record["kind"] for record in records(path)]
        assert kinds[2:] == ([] if size == before else ["recovered"] if size < complete else ["intent"])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_flipped_bit_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "flipped.ledger"
    whole = path.read_bytes() if path.exists() and path.stat().st_size else some_records(path)
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    flipped = bytearray(whole)
    flipped[bit // 8] ^= 1 << bit % 8
    path.write_bytes(flipped)
    try:
        with pytest.raises(LedgerError, match=str(path)):
            Ledger(path).account()
    finally:
        path.write_bytes(whole)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_flipped_bit_in_a_file_that_was_cut_short_never_lowers_the_count(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "cut.ledger"
    whole = path.read_bytes() if path.exists() and path.stat().st_size else some_records(path)
    size = data.draw(st.integers(whole.index(b"\n") + 1, len(whole)))
    bit = data.draw(st.integers(0, 8 * size - 1))
    released = parsed(whole[: whole.rindex(b"\n", 0, size) + 1], path)
    flipped = bytearray(whole[:size])
    flipped[bit // 8] ^= 1 << bit % 8
    put(path, flipped)
    with suppress(LedgerError):
        assert spent(path) >= sum(charge.spent.count for charge in released.charges.values())
    put(path, whole)


def test_a_file_that_was_cut_or_written_over_with_an_older_copy_is_refused(path: Path) -> None:
    older = [charged(Ledger(path, block=4).account(), 4).close() or path.read_bytes() for _ in range(3)]
    whole = older.pop()
    cuts = [whole[:size] for size in range(len(whole) - 120, len(older[0]), -1)]
    for content in [*older, *cuts]:
        path.write_bytes(content)
        for refused in (lambda: Ledger(path).account(), lambda: Ledger(path).head):
            with pytest.raises(LedgerError, match=r"was cut short, or an older .* was put in its place: it had 4"):
                refused()
        assert path.read_bytes() == content
    path.write_bytes(whole)
    assert spent(path) == 12
    Ledger(path).account().close()


@pytest.fixture(params=["sealed", "times can't be set"])
def times(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a time of the last write that tells of any other, and where that can't be had, as in another's file."""

    if request.param != "sealed":
        monkeypatch.setattr("ghostclip.ledger.files.os.utime", Mock(side_effect=PermissionError("not the owner")))


@pytest.mark.usefixtures("times")
def test_any_byte_that_changes_while_it_is_in_use_is_noticed_before_the_next_block(path: Path) -> None:
    account = charged(Ledger(path, block=2).account(), 20)
    content = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for place in range(0, len(content), 41):
            os.pwrite(file.fileno(), bytes([content[place] ^ 1]), place)
            with pytest.raises(LedgerError, match="changed by something else while it was in use"):
                account.charge(EVENT)
            assert path.stat().st_size == len(content)
            # Put back, it goes on. A write so soon after ours may be of the same time by the system's clock.
            os.pwrite(file.fileno(), content[place : place + 1], place)
            charged(account, 2)
            content = path.read_bytes()
    charged(account, 1)
    content = path.read_bytes()
    os.truncate(path, len(content) - 1)
    with pytest.raises(LedgerError, match="changed by something else"):
        account.close()
    path.write_bytes(content)
    assert Ledger(path).events


def test_a_ledger_that_is_only_touched_goes_on(path: Path) -> None:
    account = charged(Ledger(path, block=1).account(), 3)
    for _ in range(3):
        path.touch()
        charged(account, 1)
    account.close()
    assert spent(path) == 6


def test_file_systems_without_attributes_do_without(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("setxattr", "getxattr"):
        monkeypatch.setattr(os, name, Mock(side_effect=OSError(errno.ENOTSUP, "Operation not supported")))
    charged(Ledger(path).account(), 3).close()
    for name in ("setxattr", "getxattr"):
        monkeypatch.delattr(os, name)
    charged(Ledger(path).account(), 3).close()
    assert spent(path) == 6


def without(number: int) -> Callable[[list[bytes]], list[bytes]]:
    return lambda lines: lines[:number] + lines[number + 1 :]


def forged(kind: str, **fields: Any) -> Callable[[list[bytes]], list[bytes]]:
    """A last line that holds together, with a record that can't be."""

    def change(lines: list[bytes]) -> list[bytes]:
        last = json.loads(lines[-1])
        return [*lines, line_of({"kind": kind, "time": "", **fields}, len(lines), last["hash"])[0]]

    return change


def intent(**changes: Any) -> Callable[[list[bytes]], list[bytes]]:
    return forged("intent", run="x", noise="", event={**encoded(EVENT), **changes})


def exchanged(lines: list[bytes]) -> list[bytes]:
    """With a record of another ledger that is whole and as old."""
    with TemporaryDirectory() as folder:
        other = some_records(Path(folder) / "other.ledger").splitlines(True)
    return [*lines[:2], other[2], *lines[3:]]


DAMAGE: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "a record is gone": (without(2), "line 3: it doesn't continue the record before"),
    "a record of another ledger": (exchanged, "it doesn't continue the record before"),
    "the first record is gone": (without(0), "line 1"),
    "records were exchanged": (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "line 2: it doesn't continue"),
    "a record is there twice": (lambda lines: [*lines, lines[-1]], "it doesn't continue the record before"),
    "a line of something else": (lambda lines: [*lines, b"hello\n"], "it is not a record"),
    "a record was edited": (
        lambda lines: [line.replace(b'"count":4', b'"count":1') for line in lines],
        "line 2: its CRC is wrong, so bytes in it have changed",
    ),
    "zeros at the end": (lambda lines: [*lines, bytes(100)], "it is not a record"),
    "a kind of a later version": (forged("refund", count=1), "its kind is 'refund', which version 1 doesn't have"),
    "an unknown event": (intent(event="Magic"), "it can't be read"),
    "an event out of range": (intent(noise_multiplier=-1), "noise_multiplier must be a finite number >= 0"),
    "an intent of nothing": (intent(count=0), "count must be a whole number >= 1"),
    "a return of more than there is": (forged("returned", run="x", of=1, count=99), "it returns 99 of record 1"),
    "a return of what wasn't reserved": (forged("returned", run="x", of=0, count=1), "it can't be read"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_with_its_place_and_what_to_do(path: Path, name: str) -> None:
    change, message = DAMAGE[name]
    path.write_bytes(b"".join(change(some_records(path).splitlines(True))))
    before = path.read_bytes()
    for refused in (lambda: Ledger(path).account(), lambda: Ledger(path).head, lambda: Ledger(path).events):
        with pytest.raises(LedgerError) as caught:
            refused()
        assert f"the ledger {path} is damaged at line" in str(caught.value)
        assert message in str(caught.value)
        assert "Put back an undamaged copy" in str(caught.value)
    assert path.read_bytes() == before


def test_a_ledger_of_another_version_is_refused(path: Path) -> None:
    header = {"kind": "ghostclip ledger", "version": 2, "id": "x", "time": ""}
    path.write_bytes(line_of(header, 0, "0" * 64)[0])
    with pytest.raises(LedgerError, match=r"is of version 2, and this is ghostclip's version 1"):
        Ledger(path).account()


@pytest.mark.parametrize("content", [b"", b"\n", b"{}", b"some text\n" * 10, b"\x80\x04\x95", b'{"record":{"n":0}}\n'])
def test_what_is_no_ledger_is_refused_and_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(LedgerError, match=r"is empty|is not a ledger|is damaged at line 1"):
        Ledger(path).account()
    assert path.read_bytes() == content


def test_places_where_no_ledger_can_be(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    for name, message in {
        "": "can't be opened: Is a directory; give the path of a file",
        "pipe": "is not a regular file",
        "no/such/folder": "can't be made: No such file or directory; choose a path in a folder that exists",
        "file/below": "can't be opened: Not a directory",
    }.items():
        with pytest.raises(LedgerError, match=message):
            Ledger(tmp_path / name).account()
    with pytest.raises(LedgerError, match="can't be read: No such file or directory"):
        _ = Ledger(tmp_path / "none").head


def test_no_permission_and_no_path(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="the path of a ledger must be a str or a Path; got 3"):
        Ledger(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="block must be a whole number >= 1; got 0"):
        Ledger("x", block=0)
    monkeypatch.setattr(os, "open", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(LedgerError, match=r"run\.ledger can't be opened: Permission denied; give the path of a file"):
        Ledger(path).account()
