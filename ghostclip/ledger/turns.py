"""The journals of this process: one a file, however many runs share it, and none in a process that was forked."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import ParamSpec, TypeVar

from ghostclip.errors import LedgerError
from ghostclip.ledger import files
from ghostclip.ledger.journal import Journal, now
from ghostclip.ledger.records import first_line

__all__ = ["end", "found", "give_up", "in_turn", "joined"]

P = ParamSpec("P")
T = TypeVar("T")


class _Open:
    """What is open in this process, and runs that nobody can use any more."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.journals: list[Journal] = []
        self.given_up: list[tuple[Journal, str]] = []


_open = _Open()


def in_turn(function: Callable[P, T]) -> Callable[P, T]:
    """While the function runs, no other thread calls a journal's methods.

    The lock is free afterwards wherever Ctrl-C comes: signals are handled between the steps of Python code, and never
    between a ``with`` and a lock, which is C. A context manager of Python's own has such steps before its body.
    """

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with _open.lock:
                return function(*args, **kwargs)
        finally:
            _settle()

    return alone


def joined(path: Path, run: str = "") -> tuple[Journal, str]:
    """The journal of a file, which is made where it isn't there, and the name of a new run in it. Only `in_turn`.

    ``run`` is that name; "" for a random one.

    Raises:
        LedgerError: the file is in use by another process, damaged, of another version, or can't be made or written.
    """
    run = run or token_hex(6)
    for _ in range(3):
        if (journal := found(path)) is None:
            if (file := files.locked(path)) is None:
                files.create(path, first_line(now(), token_hex(16)))
                continue
            try:
                journal = Journal(path, file)
            except BaseException:
                os.close(file)
                raise
            _open.journals.append(journal)
        journal.runs.add(run)
        return journal, run
    raise LedgerError(f"the ledger {path} disappears as soon as it is made; give another path")


def found(path: Path) -> Journal | None:
    """The journal of the file at the path, where this process has it open. Only `in_turn`."""
    return next((journal for journal in _open.journals if journal.is_of(path)), None)


def end(journal: Journal, run: str) -> None:
    """Ends a run: gives back what it has left, and closes the journal after its last one. Only `in_turn`."""
    journal.runs.discard(run)
    try:
        journal.end(run)
    finally:
        if not journal.runs and journal in _open.journals:
            _open.journals.remove(journal)
            journal.close()


def give_up(journal: Journal, run: str) -> None:
    """Ends a run that was collected as garbage, now or when it is somebody's turn no more, and in silence."""
    _open.given_up.append((journal, run))
    _settle()


def _settle() -> None:
    # Garbage may be collected in the middle of a turn of the same thread, which must not be waited for: it settles
    # this itself when it is done. One of another thread, begun since we looked, may be.
    while _open.given_up and not _open.lock.locked():
        with _open.lock, suppress(IndexError):
            journal, run = _open.given_up.pop()
            # What can't be given back stays spent, and that is no reason to disturb anyone.
            with suppress(LedgerError):
                end(journal, run)


def _after_fork() -> None:
    """In the child: the parent's files are closed, which keeps the lock the parent's alone, and nothing is open."""
    global _open
    journals = _open.journals
    _open = _Open()
    for journal in journals:
        journal.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
