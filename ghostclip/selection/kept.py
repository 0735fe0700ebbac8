"""The runs of a search, kept beside its ledger until it ends: an interrupted search goes on with the same runs."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ghostclip import checkpoint
from ghostclip.errors import PrivacyError
from ghostclip.events import Selection
from ghostclip.ledger import Ledger
from ghostclip.ledger.records import encoded

__all__ = ["KeptRuns", "Runs", "folder_of"]

log = logging.getLogger("ghostclip")


@dataclass
class Runs:
    """What was drawn for a search, and the best run so far. Confidential: the guarantee is for the best one alone.

    Attributes:
        name: random; the ledger's charge has it.
        settings: the number of each run's candidate, in order.
        done: how many runs ended.
        best: the number of the best one's candidate; None before the first run ended.
        score, result: of the best one.
    """

    name: str
    settings: list[int]
    done: int = 0
    best: int | None = None
    score: float = -math.inf
    result: Any = None

    @classmethod
    def drawn(cls, settings: list[int]) -> Runs:
        """A search that begins."""
        return cls(f"search-{secrets.token_hex(16)}", settings)

    def add(self, result: Any, score: float) -> None:
        """The next run ended. The first of equal scores stays; a score that is not a number is below all others."""
        score = -math.inf if math.isnan(score) else score
        if self.best is None or score > self.score:
            # A copy, since the next run may train the same tensors.
            self.best, self.score, self.result = self.settings[self.done], score, _copied(result)
        self.done += 1


def _copied(result: Any) -> Any:
    """A copy that shares nothing with it; raises TypeError where there is none."""
    try:
        return copy.deepcopy(result)
    except Exception as error:
        raise TypeError(
            f"what train returned can't be copied ({error}), and the best result is kept while further runs train; "
            "return model.state_dict(), numbers, or detached tensors"
        ) from error


def folder_of(ledger: Ledger) -> Path:
    """Where the runs of an unfinished search are kept."""
    return Path(f"{ledger.path}.search")


class KeptRuns:
    """Runs in a checkpoint's folder, for its owner only: there whole or not at all, after a crash too.

    Args:
        folder: to write.
        event: what the search is charged as.
        candidates: the settings, told from others by what they print as, but for addresses and the order of sets.
    """

    def __init__(self, folder: Path, event: Selection, candidates: Sequence[Any]) -> None:
        self._folder = folder
        printed = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(_in_order(list(candidates))))
        digest = hashlib.sha256(printed.encode()).hexdigest()
        self._search = {"event": encoded(event), "candidates": len(candidates), "digest": digest}
        self._remarked = False

    def begin(self, draw: Callable[[], list[int]]) -> Runs:
        """The runs of the unfinished search there; else they are drawn, and are on the disk when this returns.

        Raises:
            PrivacyError: the unfinished search had other arguments, or its folder is damaged.
        """
        try:
            found = checkpoint.load(self._folder)
        except FileNotFoundError:
            runs = Runs.drawn(draw())
            self._save(runs)
            return runs
        if found.public.get("search") != self._search:
            raise PrivacyError(
                f"{self._folder} is of an unfinished search with other arguments, whose number of runs is drawn "
                "already; call select with the same arguments to finish it, or remove the folder to start another "
                "search, which is charged anew"
            )
        log.info("going on with the unfinished search in %s", self._folder)
        return Runs(**found.private["runs"])

    def keep(self, runs: Runs) -> None:
        """Brings what ended so far to the disk; where the best result can't be stored, an older state stays there.

        Raises:
            OSError: the disk is full, or the like.
        """
        try:
            self._save(runs)
        except PrivacyError as error:
            if not self._remarked:
                log.warning("runs from here on are repeated if the search is interrupted: %s", error)
            self._remarked = True

    def end(self) -> None:
        """Removes the folder: at once, by another name, so that no crash leaves a part of it, or brings it back."""
        shutil.rmtree(checkpoint.previous_of(self._folder), ignore_errors=True)
        ended = self._folder.with_name(f"{self._folder.name}.ended-{secrets.token_hex(4)}")
        with suppress(FileNotFoundError):
            self._folder.rename(ended)
        shutil.rmtree(ended, ignore_errors=True)

    def _save(self, runs: Runs) -> None:
        state = {field.name: getattr(runs, field.name) for field in fields(Runs)}
        checkpoint.save(self._folder, {"search": self._search}, {"runs": state}, folder_mode=0o700)


def _in_order(value: Any) -> Any:
    """The same with lists in place of sets, whose order is another one in each process."""
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, dict):
        return {key: _in_order(each) for key, each in value.items()}
    return [_in_order(each) for each in value] if isinstance(value, list | tuple) else value
