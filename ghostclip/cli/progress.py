"""What a command shows on stderr while it works: progress bars, and log lines that leave the bars whole."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["bar", "log_on_stderr"]

IN_A_LOG = 10.0  # seconds between two updates of a progress bar that no one watches

log = logging.getLogger("ghostclip")


class _Lines(logging.Handler):
    """Prints each record as one line that begins with the program's name; no line twice, since runs repeat theirs."""

    def __init__(self) -> None:
        super().__init__()
        self._printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Prints above a bar that is shown; its line would be continued otherwise."""
        line = "ghostclip: " + " ".join(record.getMessage().split())
        if line in self._printed:
            return
        self._printed.add(line)
        if sys.modules.get("tqdm") is None:
            print(line, file=sys.stderr, flush=True)
        else:
            from tqdm import tqdm

            tqdm.write(line, file=sys.stderr)


@contextmanager
def log_on_stderr() -> Iterator[None]:
    """While it lasts, what is logged at level INFO or above is shown on stderr; the logger is left as it was."""
    lines, level, propagate = _Lines(), log.level, log.propagate
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    # Libraries that are imported later may give the root logger a handler of its own.
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(lines)
        log.setLevel(level)
        log.propagate = propagate


@contextmanager
def bar(name: str, count: int, unit: str = "it") -> Iterator[Callable[..., None]]:
    """A bar for so many units; gives what to call after each one, with the last loss and epsilon if any. Needs tqdm."""
    from tqdm import tqdm

    seconds = 0.1 if sys.stderr.isatty() else IN_A_LOG
    with tqdm(total=count, desc=name, unit=unit, dynamic_ncols=True, mininterval=seconds) as shown:

        def advance(loss: float | None = None, epsilon: float | None = None) -> None:
            if loss is not None:
                spent = {} if epsilon is None else {"epsilon": f"{epsilon:.2f}"}
                shown.set_postfix({"loss": f"{loss:.3f}", **spent}, refresh=False)
            shown.update()

        yield advance
