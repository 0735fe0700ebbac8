"""The file under a ledger: made whole or not at all, locked, and written to so that what is there has reached the disk.

Every function raises LedgerError in place of OSError; the message names the file, what went wrong and what to do.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ghostclip.errors import LedgerError

__all__ = [
    "check_place",
    "create",
    "cut",
    "flush",
    "is_at",
    "locked",
    "note",
    "noted",
    "read",
    "seal",
    "stamp",
    "write",
]

NOTE = "user.ghostclip.ledger"
# By which a sealed file is older than its last write, in nanoseconds: more than any file system rounds times by.
OLDER = 10 * 10**9


def create(path: Path, content: bytes) -> None:
    """Makes the file with its first content, unless it is there; never, not even after a crash, a part of it."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    with _explained(path, "be made", "choose a path in a folder that exists, on a local disk, and that you may write"):
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            with open(descriptor, "wb", buffering=0) as file:
                file.write(content)
                os.fsync(descriptor)
            # A link, unlike a rename, leaves a file that another process has just made alone.
            os.link(temporary, path)
        except FileExistsError:
            return
        finally:
            os.unlink(temporary)
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def locked(path: Path) -> int | None:
    """A descriptor of the file, for reading and appending, that no other process has; None when it isn't there."""
    with _explained(path, "be opened", "give the path of a file that you may read and write"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise LedgerError(f"{path} is not a regular file, so it can't be a ledger; give another path")
            _lock(descriptor, path)
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor


def _lock(descriptor: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:
        raise LedgerError(
            f"the ledger {path} can't be locked: this system has no fcntl; train on Linux or macOS"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LedgerError(
            f"the ledger {path} is in use by another process, and two would not see what the other spends; wait for it "
            "to end, or give each its own ledger only if their data have nobody in common"
        ) from None


def read(path: Path, descriptor: int | None = None) -> bytes:
    """All bytes of the file."""
    with _explained(path, "be read", "give the path of a ledger that you may read"):
        if descriptor is None:
            return path.read_bytes()
        content = b""
        while part := os.pread(descriptor, 1 << 24, len(content)):
            content += part
        return content


def is_at(path: Path, descriptor: int) -> bool:
    """Whether the path leads to the descriptor's file."""
    mine = os.fstat(descriptor)
    with suppress(OSError):
        return os.path.samestat(mine, os.stat(path))
    return False


def check_place(path: Path, descriptor: int) -> None:
    """Raises LedgerError where the path leads to another file by now, or to none."""
    if not is_at(path, descriptor):
        raise LedgerError(
            f"the ledger {path} was removed or replaced while it was in use; put the file of this run back before you "
            "go on, or what it spent is forgotten"
        )


def seal(descriptor: int) -> tuple[int, int] | None:
    """Sets the time of the last write back by some seconds, so that any later write changes the `stamp`.

    The clock of a file system stands still for some milliseconds; a write within them would keep the time as it is.

    Returns:
        The stamp; None where the time can't be set, as in another user's file.
    """
    with suppress(OSError, NotImplementedError, TypeError):
        now = time.time_ns()
        os.utime(descriptor, ns=(now, now - OLDER))
        return stamp(descriptor)
    return None


def stamp(descriptor: int) -> tuple[int, int]:
    """The file's size and the time of the last write."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def note(descriptor: int, text: str) -> None:
    """Writes a line beside the file's content, where the file system has room for one (an extended attribute)."""
    with suppress(AttributeError, OSError):
        os.setxattr(descriptor, NOTE, text.encode())


def noted(file: Path | int) -> str:
    """The line of `note`; empty where there is none."""
    with suppress(AttributeError, OSError, UnicodeDecodeError):
        return os.getxattr(file, NOTE).decode()
    return ""


def write(path: Path, descriptor: int, data: bytes) -> None:
    """Appends all of ``data``; it may not have reached the disk yet."""
    with _explained(path, "be written", "nothing was released. Make room on the disk, then go on"):
        while data:
            data = data[os.write(descriptor, data) :]


def flush(path: Path, descriptor: int) -> None:
    """Returns once everything written is on the disk."""
    # After a failed fsync the system may forget the lost pages and report success the next time.
    remedy = "nothing was released. What is on the disk is not known: see to the disk, then start the run again"
    with _explained(path, "be brought to the disk", remedy):
        os.fsync(descriptor)


def cut(path: Path, descriptor: int, size: int) -> None:
    """Takes away what is behind ``size`` bytes."""
    with _explained(path, "be shortened to its last whole line", "give the path of a file that you may write"):
        os.ftruncate(descriptor, size)


@contextmanager
def _explained(path: Path, what: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = "the disk is full" if full else error.strerror or str(error)
        raise LedgerError(f"the ledger {path} can't {what}: {why}; {remedy}") from error
