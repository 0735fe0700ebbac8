"""The ledger file: what it says after every kind of end, and what it survives."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ledgers import EVENT, KINDS, charged, in_child, put, records, spent

from ghostclip import accounting, events
from ghostclip.errors import LedgerError
from ghostclip.events import EVENTS, Event, SampledGaussian
from ghostclip.ledger import Head, Ledger
from ghostclip.ledger.records import decoded, encoded


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the next calls of the operating system's functions do: {name: an error to raise, or a function}."""
    faults: dict[str, Any] = {}

    def call(name: str, real: Callable[..., Any], *arguments: Any) -> Any:
        fault = faults.get(name)
        if isinstance(fault, BaseException):
            raise fault
        return real(*arguments) if fault is None else fault(real, *arguments)

    for name in ("write", "fsync", "ftruncate", "link"):
        monkeypatch.setattr(os, name, partial(call, name, getattr(os, name)))
    yield faults
    faults.clear()


def test_every_step_is_there_and_the_rest_of_the_block_is_given_back(path: Path) -> None:
    account = charged(Ledger(path, block=4).account(), 5)
    assert spent(path) == 8
    assert Ledger(path).events == [replace(EVENT, count=5)]
    account.close()
    account.close()
    assert spent(path) == 5
    with pytest.raises(LedgerError, match="was closed"):
        account.charge(EVENT)
    assert [record["kind"] for record in records(path)] == ["ghostclip ledger", "intent", "intent", "returned"]


def test_the_intent_is_on_the_disk_before_a_step_is_granted(path: Path, disk: dict[str, Any]) -> None:
    account = Ledger(path, block=2).account()
    calls: list[str] = []
    for name in ("write", "fsync"):
        disk[name] = lambda real, *arguments, name=name: (calls.append(name), real(*arguments))[1]
    charged(account, 2)
    assert calls == ["write", "fsync"]
    charged(account, 1)
    assert calls == ["write", "fsync"] * 2


def test_a_run_that_is_collected_in_the_middle_of_another_s_turn_waits(path: Path, disk: dict[str, Any]) -> None:
    forgotten, account = charged(Ledger(path).account(), 3), Ledger(path).account()
    waiting = [forgotten]
    del forgotten

    def write(real: Callable[..., int], *arguments: Any) -> int:
        waiting.clear()
        return real(*arguments)

    disk["write"] = write
    charged(account, 1)
    assert Ledger(path).events == [replace(EVENT, count=4)]
    account.close()
    assert spent(path) == 4


@pytest.mark.parametrize("event", KINDS, ids=lambda event: type(event).__name__)
def test_every_kind_of_event_comes_back_as_it_was(path: Path, event: Event) -> None:
    once = replace(event, count=1)
    charged(Ledger(path).account(), 3, once).close()
    assert Ledger(path).events == [replace(event, count=3)]
    assert decoded(json.loads(json.dumps(encoded(event)))) == event


def test_no_kind_of_event_is_forgotten() -> None:
    public = {name for name in events.__all__ if is_dataclass(getattr(events, name))}
    assert public - {"SampledRelease"} == set(EVENTS) == {type(event).__name__ for event in KINDS}


def test_an_event_that_stands_for_several_releases_is_refused(path: Path) -> None:
    """It was charged as one."""
    account = Ledger(path).account()
    several = accounting.Setting(0.01).event(1.0, steps=1000)
    for charge in (account.charge, lambda event: Ledger(path).take_in({"run": {event: 1}}, "standard", "")):
        with pytest.raises(ValueError, match=r"once for each release and before it; got count=1000"):
            charge(several)
    assert Ledger(path).events == []


def test_an_event_that_could_not_be_read_back_is_refused(path: Path) -> None:
    account = Ledger(path).account()
    with pytest.raises(LedgerError, match="a Strange can't be written to a ledger"):
        account.charge(type("Strange", (SampledGaussian,), {})(0.1, 1.0))
    assert len(records(path)) == 1


def test_killed_processes_over_count_by_less_than_a_block(path: Path) -> None:
    def work() -> None:
        _kept = charged(Ledger(path, block=8).account(), 11)
        os.kill(os.getpid(), signal.SIGKILL)

    for times in range(1, 4):
        assert in_child(work) == -signal.SIGKILL
        assert spent(path) == 16 * times


@pytest.mark.slow
def test_a_process_that_ends_gives_back_its_block(path: Path) -> None:
    script = (
        "import sys; from ghostclip.ledger import Ledger; from ghostclip.events import SampledGaussian\n"
        "account = Ledger(sys.argv[1]).account()\n"
        "for _ in range(3): account.charge(SampledGaussian(0.01, 1.1))\n"
        "raise RuntimeError('as it happens')"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False)
    assert "as it happens" in ended.stderr
    assert spent(path) == 3


def test_two_processes_on_one_ledger(path: Path) -> None:
    account = charged(Ledger(path).account(), 1)

    def refused() -> None:
        with pytest.raises(LedgerError, match="in use by another process"):
            Ledger(path).account()
        assert Ledger(path).head.records == 2  # reading it is allowed

    assert in_child(refused) == 0
    account.close()
    assert in_child(lambda: charged(Ledger(path).account(), 1).close()) == 0
    assert spent(path) == 2


def test_a_fork_can_neither_spend_nor_give_back_nor_unlock(path: Path) -> None:
    account = charged(Ledger(path).account(), 3)

    def child() -> None:
        with pytest.raises(LedgerError, match="the process that this one was forked from"):
            account.charge(EVENT)
        account.close()

    before = path.read_bytes()
    assert in_child(child) == 0
    assert path.read_bytes() == before
    assert in_child(lambda: Ledger(path).account().close()) == 1
    charged(account, 1).close()
    assert spent(path) == 4


def test_a_fork_that_outlives_its_parent_does_not_hold_the_lock(path: Path) -> None:
    def parent() -> None:
        _kept = charged(Ledger(path).account(), 1)
        if os.fork() == 0:
            os.close(out)
            os.read(wait, 1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    wait, out = os.pipe()
    assert in_child(parent) == -signal.SIGKILL
    charged(Ledger(path).account(), 1).close()
    os.close(out)
    os.close(wait)
    assert spent(path) == 33


def torn(real: Callable[..., int], descriptor: int, data: bytes) -> int:
    """A disk that is full after half of it."""
    if not data.startswith(b'{"record"'):
        raise OSError(errno.ENOSPC, "No space left on device")
    return real(descriptor, data[: len(data) // 2])


def test_writes_that_take_part_of_it_are_gone_on_with(path: Path, disk: dict[str, Any]) -> None:
    disk["write"] = lambda real, descriptor, data: real(descriptor, data[: (len(data) + 1) // 2])
    charged(Ledger(path).account(), 2).close()
    assert spent(path) == 2


def test_on_a_full_disk_nothing_is_granted_and_with_room_it_goes_on(path: Path, disk: dict[str, Any]) -> None:
    account = charged(Ledger(path, block=2).account(), 2)
    disk["write"] = torn
    for _ in range(2):
        with pytest.raises(LedgerError, match=r"the disk is full; nothing was released\. Make room"):
            account.charge(EVENT)
    disk.clear()
    assert Ledger(path).events == [replace(EVENT, count=2)]
    charged(account, 1).close()
    assert spent(path) == 3
    assert [record["kind"] for record in records(path)][2:] == ["recovered", "intent", "returned"]


def test_after_a_failed_fsync_nothing_is_granted_any_more(path: Path, disk: dict[str, Any]) -> None:
    account = charged(Ledger(path, block=2).account(), 2)
    disk["fsync"] = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(LedgerError, match=r"can't be brought to the disk: .* nothing was released"):
        account.charge(EVENT)
    disk.clear()
    for _ in range(2):
        with pytest.raises(LedgerError, match="could not be brought to the disk before"):
            account.charge(EVENT)
    account.close()
    assert spent(path) == 4
    charged(Ledger(path).account(), 1).close()
    assert spent(path) == 5


@pytest.mark.parametrize("place", ["write", "fsync"])
@pytest.mark.parametrize("late", [False, True])
def test_interrupted_while_it_writes(path: Path, disk: dict[str, Any], place: str, late: bool) -> None:
    account = charged(Ledger(path, block=2).account(), 2)

    def interrupted(real: Callable[..., Any], *arguments: Any) -> None:
        if late:
            real(*arguments)
        raise KeyboardInterrupt

    disk[place] = interrupted
    with pytest.raises(KeyboardInterrupt):
        account.charge(EVENT)
    disk.clear()
    charged(account, 1).close()
    # What was written before the interruption counts, though nobody may release on it.
    assert spent(path) == (3 if (place, late) == ("write", False) else 5)


def test_a_ledger_is_made_whole_or_not_at_all(path: Path, disk: dict[str, Any]) -> None:
    for name in ("fsync", "link"):
        disk[name] = OSError(errno.EIO, "Input/output error")
        with pytest.raises(LedgerError, match="can't be made: Input/output error; choose a path"):
            Ledger(path).account()
        disk.clear()
        assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("change", ["removed", "replaced", "changed", "appended", "shortened"])
def test_a_file_that_changes_under_a_run(path: Path, change: str) -> None:
    account = charged(Ledger(path, block=2).account(), 1)
    before = path.read_bytes()
    changes: dict[str, Callable[[], Any]] = {
        "removed": path.unlink,
        "replaced": lambda: (path.rename(path.with_suffix(".old")), path.write_bytes(before)),
        "changed": lambda: path.write_bytes(before.replace(b'"count":2', b'"count":1')),
        "appended": lambda: path.write_bytes(before + before.splitlines(True)[1]),
        "shortened": lambda: path.write_bytes(before[: before.index(b"\n") + 1]),
    }
    charged(account, 1)
    changes[change]()
    for _ in range(2):
        with pytest.raises(LedgerError, match=r"(removed or replaced|changed by something else) while it was in use"):
            account.charge(EVENT)


def test_a_head_tells_an_older_copy_and_another_ledger(path: Path, tmp_path: Path) -> None:
    charged(Ledger(path).account(), 1).close()
    old, copy = Ledger(path).head, path.read_bytes()
    account = charged(Ledger(path).account(), 1)
    new = Ledger(path).head
    assert Ledger(path).contains(old)
    assert Ledger(path).contains(new)
    account.close()
    put(path, copy)
    assert Ledger(path).contains(old)
    assert not Ledger(path).contains(new)
    assert not Ledger(path).contains(Head(0, old.hash))
    Ledger(tmp_path / "another").account().close()
    assert not Ledger(tmp_path / "another").contains(Head(1, json.loads(copy.splitlines()[0])["hash"]))


def test_a_path_means_the_same_file_wherever_the_process_goes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    ledger = Ledger(path.name)
    account = charged(ledger.account(), 1)
    monkeypatch.chdir("/")
    account.close()
    assert ledger.events == [EVENT]
