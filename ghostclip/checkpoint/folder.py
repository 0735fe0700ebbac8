"""A folder that is replaced whole or not at all, with the one before kept beside it.

``<path>`` is the newest, ``<path>.previous`` the one before, ``<path>.partial`` what is being written or what a crash
left of it. A crash between the two renames leaves no ``<path>``, and a complete ``<path>.previous``.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ghostclip.errors import PrivacyError
from ghostclip.validate import a_path

__all__ = ["place_of", "previous_of", "read_file", "replace_folder"]

PRIVATE_MODE, MODE = 0o600, 0o666


def place_of(path: str | os.PathLike[str]) -> Path:
    """The folder a user means, links in its path followed."""
    found = a_path(path=path)
    if not os.fspath(path):
        raise ValueError("path must name a folder for the checkpoint; got an empty string")
    return Path(os.path.realpath(found))


def previous_of(place: Path) -> Path:
    """Where the checkpoint before is kept."""
    return place.with_name(place.name + ".previous")


def read_file(file: Path) -> bytes:
    """The bytes of a regular file, which may not be a link.

    Raises:
        PrivacyError: it is something else; OSError: it can't be read.
    """
    if file.is_symlink():
        raise PrivacyError(
            f"{file} is a symbolic link, and a checkpoint's files may not be: what it leads to can change; put the "
            "file itself there"
        )
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    with open(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise PrivacyError(f"{file} is not a regular file, so it is not part of a checkpoint; remove it")
        return opened.read()


def replace_folder(
    place: Path,
    files: Mapping[str, bytes],
    private: frozenset[str],
    known: frozenset[str],
    intact: Callable[[Path], bool],
    mode: int = 0o777,
) -> None:
    """Makes ``place`` a folder of ``files``; what was there becomes the previous one, if it is ``intact``.

    Only the owner may read ``private`` files. A folder that is replaced may hold ``known`` names and no others.
    ``mode`` is the folder's, before the umask.

    Raises:
        PrivacyError: something else is in the way, or another process is writing here.
        OSError: the disk is full, or the like; what was saved before is still there.
    """
    partial = place.with_name(place.name + ".partial")
    for folder in (place, previous_of(place), partial):
        _refuse_other(folder, known)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(partial, mode):
            try:
                for entry in partial.iterdir():
                    entry.unlink()
                for name, content in files.items():
                    _write(partial / name, content, PRIVATE_MODE if name in private else MODE)
                _flush(partial)
                _exchange(place, partial, intact)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except OSError as error:
        kept = any(map(os.path.exists, (place, previous_of(place))))
        what = "; what was saved before is still there" if kept else ""
        why = f"{error.strerror or error}; the checkpoint was not saved{what}"
        raise OSError(error.errno, why, str(place)) from error


def _exchange(place: Path, partial: Path, intact: Callable[[Path], bool]) -> None:
    """Three renames at most, in an order that leaves a complete folder whenever it ends."""
    previous = previous_of(place)
    kept = place.exists() and intact(place)
    if kept:
        shutil.rmtree(previous, ignore_errors=True)
        os.rename(place, previous)
    elif place.exists():
        shutil.rmtree(place)
    try:
        os.rename(partial, place)
    except BaseException:
        if kept and not place.exists():
            os.rename(previous, place)
        raise
    _flush(place.parent)


def _refuse_other(folder: Path, known: frozenset[str]) -> None:
    """Raises PrivacyError when replacing the folder would destroy something that is no checkpoint."""
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise PrivacyError(f"{folder} is in the way of a checkpoint: it is not a folder; give another path")
    strange = sorted(set(os.listdir(folder)) - known)
    if strange:
        raise PrivacyError(
            f"{folder} holds {', '.join(strange[:3])}{' and more' if len(strange) > 3 else ''}, which is not part of a "
            "checkpoint and would be lost; give another path, or move it away"
        )


@contextmanager
def _locked(partial: Path, mode: int) -> Iterator[None]:
    """Makes the folder, or takes over what a crash left; no other process may be writing into it."""
    import fcntl

    with suppress(FileExistsError):
        partial.mkdir(mode)
    try:
        descriptor = os.open(partial, os.O_RDONLY | os.O_CLOEXEC)
    except BaseException:
        with suppress(OSError):
            partial.rmdir()
        raise
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.path.samestat(os.stat(partial), os.fstat(descriptor))
        except (BlockingIOError, FileNotFoundError):
            mine = False
        if not mine:
            raise PrivacyError(
                f"another process is saving a checkpoint at {partial.with_suffix('')}; give each run its own path"
            )
        yield
    finally:
        os.close(descriptor)


def _write(file: Path, content: bytes, mode: int) -> None:
    """Writes a new file and returns once it is on the disk."""
    descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, mode)
    with open(descriptor, "wb", buffering=0) as opened:
        left = memoryview(content)
        while left:
            left = left[opened.write(left) :]
        os.fsync(descriptor)


def _flush(folder: Path) -> None:
    """Returns once the folder's entries are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
