"""Ctrl-C while a command of this package is still being imported, which takes seconds: one line, and status 130."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath

__all__ = ["INTERRUPTED", "ends_a_command"]

INTERRUPTED = 130


@contextmanager
def ends_a_command() -> Iterator[None]:
    """While it lasts, Ctrl-C ends the process as it ends a running command; in other programs it stays what it is."""
    try:
        yield
    except KeyboardInterrupt:
        if not _is_a_command():
            raise
        print("ghostclip: interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


def _is_a_command() -> bool:
    """Whether this process was started as ``ghostclip`` or ``python -m ghostclip``."""
    started = PurePath(sys.argv[0] if sys.argv else "")
    if started.name == "-m":  # what stands there until Python has found the module
        return "ghostclip" in sys.orig_argv
    return started.stem == "ghostclip" or started.parts[-2:] == ("ghostclip", "__main__.py")
