"""Checkpoints of `ghostclip train`: when they are written, and how a run goes on from one."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ghostclip.accounting import ACCOUNTANTS
from ghostclip.checkpoint import previous_of
from ghostclip.cli.arguments import UsageError
from ghostclip.cli.methods import METHODS, Ghost
from ghostclip.validate import positive_int

__all__ = ["History", "Keeping", "add_checkpoints", "keeping_of"]


@dataclass
class History:
    """What a run has seen so far, for its report; private data.

    Attributes:
        losses: the mean training loss of each step.
        examples: that went through training.
        seconds: of training.
        epsilons: {accountant: epsilon at each mark so far}.
    """

    losses: list[float] = field(default_factory=list)
    examples: int = 0
    seconds: float = 0.0
    epsilons: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in ACCOUNTANTS})

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, whose private part it is in."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes it back."""
        vars(self).update(state)


@dataclass(frozen=True)
class Keeping:
    """Keeps a run's checkpoints.

    Attributes:
        path: where the last one is.
        every: steps between two; None: one after each epoch.
        resume: go on from what is there.
    """

    path: Path
    every: int | None
    resume: bool

    @contextmanager
    def kept(self, steps: Ghost, history: History) -> Iterator[Callable[[], None]]:
        """Goes on from the checkpoint, where that was asked for; gives what to call after each step."""
        if self.resume:
            found = steps.engine.restore(self.path, extra={"history": history})
            steps.first_epoch = found.epoch
            # A step that was interrupted after its release and before it was noted down.
            history.losses += [math.nan] * (found.steps - len(history.losses))
        every = self.every or len(steps.engine.batches())

        def after_step() -> None:
            if len(history.losses) % every == 0:
                steps.engine.save(self.path, extra={"history": history})

        try:
            yield after_step
        finally:
            # However it ended: at the last step, by Ctrl-C, or by an error, after which nothing half done is stored.
            steps.engine.save(self.path, extra={"history": history})


def add_checkpoints(parser: argparse.ArgumentParser) -> None:
    """Adds ``--checkpoint``, ``--every`` and ``--resume``."""
    group = parser.add_argument_group("checkpoints")
    group.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="keep the run there, after each epoch and when it is interrupted by Ctrl-C; without --ledger its steps "
        "are charged to DIR.ledger, so that a crash makes none forgotten",
    )
    group.add_argument("--every", type=int, metavar="N", help="save after every N steps instead")
    group.add_argument("--resume", action="store_true", help="go on from --checkpoint")


def keeping_of(arguments: argparse.Namespace) -> Keeping | None:
    """What was asked for; fills in the ledger that goes with it.

    Raises:
        UsageError: options that don't go together, or a checkpoint that is or isn't there.
    """
    if arguments.checkpoint is None:
        for option in ("every", "resume"):
            if getattr(arguments, option):
                raise UsageError(f"--{option} needs --checkpoint DIR, the folder that the run is kept in")
        return None
    if METHODS[arguments.method] is not Ghost:
        raise UsageError(f"--method {arguments.method} is there for comparison and keeps no --checkpoint; leave it out")
    if arguments.compare:
        raise UsageError("the runs beside yours are not kept; give --checkpoint or --compare, not both")
    path = arguments.checkpoint
    there = (path.is_dir() and any(path.iterdir())) or previous_of(path).exists()
    if arguments.resume and not there:
        raise UsageError(f"there is no checkpoint at {path} to go on from; leave out --resume to start a run")
    if there and not arguments.resume:
        raise UsageError(f"there is a checkpoint at {path}; add --resume to go on from it, or give another folder")
    if arguments.ledger is None:
        arguments.ledger = f"{path}.ledger"
    every = None if arguments.every is None else positive_int(every=arguments.every)
    return Keeping(path, every, arguments.resume)
