"""Notices of work that takes seconds, such as compilation, so that no program seems to hang."""

from __future__ import annotations

import logging
import sys

__all__ = ["notice"]

log = logging.getLogger("ghostclip")


def notice(message: str, *values: object) -> None:
    """Logs that something slow begins: logger "ghostclip", level INFO.

    Where that level is off and nobody has chosen a level for this logger, the line is printed on stderr.

    Args:
        message: one line, with ``values`` as `logging` formats them.
    """
    if log.isEnabledFor(logging.INFO):
        log.info(message, *values)
    elif log.level == logging.NOTSET:
        print(f"ghostclip: {message % values}", file=sys.stderr, flush=True)
