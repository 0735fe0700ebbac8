"""The progress bar of a training run, on stderr, with the last step's loss and the privacy spent."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ghostclip.cli.training import Watch

__all__ = ["bar"]

IN_A_LOG = 10.0  # seconds between two updates where no one watches


@contextmanager
def bar(name: str, steps: int) -> Iterator[Watch]:
    """A bar for so many steps; gives the function to call after each one. Needs tqdm."""
    from tqdm import tqdm

    seconds = 0.1 if sys.stderr.isatty() else IN_A_LOG
    with tqdm(total=steps, desc=name, unit="step", dynamic_ncols=True, mininterval=seconds) as shown:

        def advance(loss: float, epsilon: float | None) -> None:
            spent = {} if epsilon is None else {"epsilon": f"{epsilon:.2f}"}
            shown.set_postfix({"loss": f"{loss:.3f}", **spent}, refresh=False)
            shown.update()

        yield advance
