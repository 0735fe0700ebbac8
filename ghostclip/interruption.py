"""Whether this process is a command of this package; Ctrl-C while one is imported ends in one line and status 130."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath

__all__ = ["INTERRUPTED", "ends_a_command", "is_a_command"]

INTERRUPTED = 130


@contextmanager
def ends_a_command() -> Iterator[None]:
    """While it lasts, Ctrl-C ends the process as it ends a running command; in other programs it stays what it is."""
    try:
        yield
    except KeyboardInterrupt:
        if not is_a_command():
            raise
        print("ghostclip: interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


def is_a_command() -> bool:
    """Whether this process was started as ``ghostclip`` or ``python -m ghostclip``."""
    started = PurePath(sys.argv[0] if sys.argv else "")
    if started.name == "-m":  # what stands there until Python has found the module
        return _module_started() == "ghostclip"
    return started.stem == "ghostclip" or started.parts[-2:] == ("ghostclip", "__main__.py")


def _module_started() -> str | None:
    """What follows the interpreter's own ``-m``, whose options come before any argument of a module."""
    for option, following in zip(sys.orig_argv[1:], [*sys.orig_argv[2:], ""], strict=True):
        if option == "-m":
            return following
        if option.startswith("-m"):
            return option[2:]
    return None
