"""The progress bar of a training run or of a part of an audit, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["bar"]

IN_A_LOG = 10.0  # seconds between two updates where no one watches


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
