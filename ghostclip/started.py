"""Whether this process was started as a command: then torch is imported where the command line handles Ctrl-C."""

from __future__ import annotations

import sys
from pathlib import PurePath

__all__ = ["is_a_command"]


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
