"""The samples of an epoch: drawn once, read by the data loader and by the training loop, which may lag behind it."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ghostclip.sampling.schemes import Scheme
from ghostclip.sampling.users import UserRows, Users

__all__ = ["Chunks", "Draws", "Physical", "divided"]

# Hexadecimal digits by which ranks compare samples.
DIGITS = 32

# The numbers of the rows to load, and whose they are where users are the units of privacy.
Physical: TypeAlias = tuple[list[int], UserRows | None]


class Draws:
    """The samples of one epoch, each drawn when the data loader or the training loop first needs to know it.

    Args:
        generator: of the samples.
        scheme_at: from a step's number to how its sample is drawn.
        divide: from the units of a sample to its physical batches.
        steps: how many samples there are.
        compared: whether samples get digests.
        first: the number of the first sample's step.

    Attributes:
        next_step: the number of the step of the next sample to hand out.
        digest: of the sample handed out last, as it was drawn, and of its place in the epoch; "" when not ``compared``.
    """

    def __init__(
        self,
        generator: np.random.Generator,
        scheme_at: Callable[[int], Scheme],
        divide: Callable[[list[int]], Sequence[Physical]],
        steps: int,
        compared: bool = False,
        first: int = 0,
    ) -> None:
        self.digest, self.next_step = "", first
        self._generator, self._scheme_at, self._divide = generator, scheme_at, divide
        self._steps, self._handed, self._compared = steps, 0, compared
        self._to_load: deque[Sequence[Physical]] = deque()
        # Of each sample that is still to be handed out: physical batches, digest, the generator's state before it.
        self._ahead: deque[tuple[Sequence[Physical], str, Any]] = deque()
        # The state before the one handed out last.
        self._last = generator.bit_generator.state

    def _draw(self) -> bool:
        """Draws a sample; False after the last."""
        place = self._handed + len(self._ahead)
        if place >= self._steps:
            return False
        before = self._generator.bit_generator.state
        step = self.next_step + len(self._ahead)
        chosen = self._scheme_at(step).draw(self._generator, step)
        digest = ""
        if self._compared:
            digest = hashlib.sha256(np.array([place + 1, *chosen], np.int64).tobytes()).hexdigest()[:DIGITS]
        physical = self._divide(chosen)
        self._ahead.append((physical, digest, before))
        self._to_load.append(physical)
        return True

    def indices(self) -> Iterator[list[int]]:
        """The epoch's physical batches one after another, for the data loader, which may run ahead."""
        while self._to_load or self._draw():
            for rows, _ in self._to_load.popleft():
                yield rows

    def next_batch(self) -> Sequence[Physical] | None:
        """The next logical batch's physical ones, for the training loop; None after the last."""
        if not self._ahead and not self._draw():
            return None
        physical, self.digest, self._last = self._ahead.popleft()
        self._handed, self.next_step = self._handed + 1, self.next_step + 1
        return physical

    @property
    def over(self) -> bool:
        """Whether the last sample was handed out."""
        return self._handed >= self._steps

    def state(self, again: bool) -> Mapping[str, Any]:
        """The generator's state before the next sample to hand out, or before the last one ``again``."""
        if again:
            return self._last
        return self._ahead[0][2] if self._ahead else self._generator.bit_generator.state

    def rewind(self, next_step: int) -> None:
        """Takes back what was drawn ahead; what is drawn from now on are the samples from the step ``next_step`` on."""
        self.next_step = next_step
        if self._ahead:
            self._generator.bit_generator.state = self._ahead[0][2]
        self._ahead.clear()
        self._to_load.clear()


class Chunks:
    """The data loader's batch sampler: the physical batches of the epoch that is being started."""

    draws: Draws

    def __iter__(self) -> Iterator[list[int]]:
        return self.draws.indices()


def divided(users: Users | None, limit: int | None, share: tuple[int, int], chosen: list[int]) -> Sequence[Physical]:
    """The physical batches of a sample, or of this rank's share in it."""
    rank, ranks = share
    chosen = chosen[rank::ranks]
    if users is not None:
        return users.divide(chosen)
    size = limit or max(1, len(chosen))
    return [(chosen[start : start + size], None) for start in range(0, len(chosen), size)]
