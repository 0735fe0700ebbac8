"""Warns where many examples of a logical batch have no finite loss or gradient, which nothing else shows."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ghostclip.clipper import ClippingResult

__all__ = ["ReadableExamples"]

log = logging.getLogger("ghostclip")
# A warning is due where a smaller share of the examples than this is finite.
SHARE = 0.75


class ReadableExamples:
    """How many examples of a logical batch have a finite loss and gradient; says so once where many have not.

    It changes no sum, and takes a host sync only for physical batches of which an example was left out. ``facts`` are
    how many examples were seen of the logical batch, and how many of them were finite. One process of several
    ``leads`` and says it.
    """

    def __init__(self, leads: bool) -> None:
        self._to_say = leads
        self.begin()

    def begin(self) -> None:
        """A logical batch starts, or what was gathered of it is dropped."""
        self.facts = (0, 0)

    def saw(self, result: ClippingResult, left_out: bool) -> None:
        """A physical batch was gathered, of which no example was left out unless ``left_out``."""
        vectors = list(result.norms.values()) if isinstance(result.norms, dict) else [result.norms]
        seen = finite = len(vectors[0])
        if left_out:
            vectors += [] if result.losses is None else [result.losses]
            finite = int(torch.stack([each.isfinite() for each in vectors]).all(0).sum())
        self.facts = (self.facts[0] + seen, self.facts[1] + finite)

    def agree(self, of_ranks: Sequence[tuple[int, int]]) -> None:
        """Adds up the ``facts`` of all ranks; [] where there is one."""
        if of_ranks:
            self.facts = (sum(seen for seen, _ in of_ranks), sum(finite for _, finite in of_ranks))

    def warn(self) -> None:
        """The step was taken: says once that few of its examples were finite."""
        seen, finite = self.facts
        if finite >= SHARE * seen or not self._to_say:
            return
        self._to_say = False
        log.warning(
            "%s of the %d examples of a logical batch had a finite loss and gradient (private: not for release), so "
            "%s; look for NaN and infinity in the data and the parameters, for overflow or log(0) in the loss, and for "
            "a learning rate that is too large. Later ones aren't named",
            f"only {finite}" if finite else "none",
            seen,
            "the others took no part" if finite else "its step was noise alone, and was charged",
        )
