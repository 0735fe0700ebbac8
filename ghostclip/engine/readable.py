"""Warns where a step is noise alone because no example of its logical batch was finite, which nothing else shows."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ghostclip.clipper import ClippingResult

__all__ = ["ReadableExamples"]

log = logging.getLogger("ghostclip")


class ReadableExamples:
    """Whether a logical batch has an example with a finite loss and gradient; says so once where none of many has.

    It changes no sum, and takes a host sync only for physical batches of which an example was left out. ``facts`` are
    how many examples were seen of the logical batch, and whether one of them was finite. One process of several
    ``leads`` and says it.
    """

    def __init__(self, leads: bool) -> None:
        self._to_say = leads
        self.begin()

    def begin(self) -> None:
        """A logical batch starts, or what was gathered of it is dropped."""
        self.facts = (0, False)

    def saw(self, result: ClippingResult, left_out: bool) -> None:
        """A physical batch was gathered, of which no example was left out unless ``left_out``."""
        vectors = list(result.norms.values()) if isinstance(result.norms, dict) else [result.norms]
        seen, found = self.facts
        if not (found or left_out):
            found = True
        elif not found:
            vectors += [] if result.losses is None else [result.losses]
            found = bool(torch.stack([each.isfinite() for each in vectors]).all(0).any())
        self.facts = (seen + len(vectors[0]), found)

    def agree(self, of_ranks: Sequence[tuple[int, bool]]) -> None:
        """Adds up the ``facts`` of all ranks; [] where there is one."""
        if of_ranks:
            self.facts = (sum(seen for seen, _ in of_ranks), any(found for _, found in of_ranks))

    def warn(self) -> None:
        """The step was taken: says once that no example of it was finite."""
        seen, found = self.facts
        if found or not seen or not self._to_say:
            return
        self._to_say = False
        log.warning(
            "none of the %d examples of a logical batch had a finite loss and gradient (private: not for release), so "
            "its step was noise alone, and was charged; look for NaN and infinity in the data and the parameters, for "
            "overflow or log(0) in the loss, and for a learning rate that is too large. Later ones aren't named",
            seen,
        )
