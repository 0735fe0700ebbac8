"""Notices of work that takes seconds, such as compilation, so that no program seems to hang."""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager

__all__ = ["notice", "slow_work"]

# Seconds after which a bar is shown, and between two updates of its clock.
PATIENCE, TICK = 1.0, 0.5
CLOCK = "{desc}: {elapsed}"

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


@contextmanager
def slow_work(name: str, message: str, *values: object, parts: int | None = None) -> Iterator[Callable[[], object]]:
    """Gives a notice, and shows a progress bar on a terminal once the work has lasted a second.

    Without tqdm, or where the work's length is unknown, a clock is shown in its place.

    Args:
        name: of the work, for the bar.
        message: of the notice, with ``values`` as `logging` formats them.
        parts: the work's number of parts; None where it isn't known.

    Yields:
        What to call after each part, from any thread.
    """
    notice(message, *values)
    done, finished = threading.Event(), list[None]()
    clock = threading.Thread(target=_show, args=(name, parts, finished, done), name="ghostclip-progress", daemon=True)
    if _has_watcher():
        clock.start()
    try:
        yield lambda: finished.append(None)
    finally:
        done.set()
        if clock.ident is not None:
            clock.join()


def _has_watcher() -> bool:
    """Whether notices are shown, on a terminal."""
    shown = log.isEnabledFor(logging.INFO) or log.level == logging.NOTSET
    return shown and sys.stderr.isatty()


def _show(name: str, parts: int | None, finished: Sized, done: threading.Event) -> None:
    """A bar from `PATIENCE` on until the work is done; runs in a thread of its own."""
    started = time.time()
    if done.wait(PATIENCE):
        return
    if importlib.util.find_spec("tqdm") is None:
        _show_seconds(f"ghostclip: {name}", started, done)
        return
    from tqdm import tqdm

    shape = {} if parts else {"bar_format": CLOCK}
    with tqdm(total=parts, desc=f"ghostclip: {name}", leave=False, **shape) as bar:
        bar.start_t = started
        while True:
            bar.n = len(finished)
            bar.refresh()
            if done.wait(TICK):
                return


def _show_seconds(name: str, started: float, done: threading.Event) -> None:
    """A line with the seconds so far, which is cleared when the work is done."""
    line = ""
    while True:
        line = f"{name}: {time.time() - started:.0f} s"
        print(f"\r{line}", end="", file=sys.stderr, flush=True)
        if done.wait(TICK):
            break
    print(f"\r{' ' * len(line)}\r", end="", file=sys.stderr, flush=True)
