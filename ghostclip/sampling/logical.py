"""A logical batch, as the training loop gets it: handed out in physical batches, once and to the end, or discarded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from ghostclip.errors import PrivacyError
from ghostclip.sampling.draws import Physical
from ghostclip.sampling.users import UserRows

__all__ = ["LogicalBatch"]


class LogicalBatch:
    """One sample of the data set, handed out in physical batches. Which examples it holds is private data.

    Attributes:
        sizes: the number of rows in each physical batch; no numbers for an empty sample.
        users: whose rows they are, for each physical batch; None where examples are the units of privacy.
        handed: how many physical batches were handed out so far.
        digest: tells samples apart where several processes share one out; "" where there is one.
    """

    def __init__(
        self,
        physical: Sequence[Physical],
        load: Callable[[], Any],
        left: Callable[[LogicalBatch], None],
        digest: str = "",
    ) -> None:
        self.digest = digest
        self.sizes = [len(rows) for rows, _ in physical]
        self.users: list[UserRows | None] = [users for _, users in physical]
        self.handed = 0
        self._load, self._left = load, left
        self._started = False

    def physical(self) -> Iterator[Any]:
        """The physical batches, as the data loader makes them; leaving before the last one discards the logical batch.

        Raises:
            PrivacyError: called twice, or used after the next logical batch was taken.
        """
        if self._started:
            raise PrivacyError(
                "physical() of this logical batch was called before, and its examples may be used in one pass only; "
                "take the next batch of engine.batches()"
            )
        self._started = True
        return self._hand_out()

    def __iter__(self) -> NoReturn:
        """Raises TypeError: it is no pair of tensors, as a DataLoader's batch is, and can't be taken apart as one."""
        raise TypeError(
            "a batch of engine.batches() is a logical batch, which can't be unpacked like a DataLoader's: hand it to "
            "engine.step(batch, loss_fn), or take its parts by `for inputs, targets in batch.physical()` and call "
            "engine.backward(losses) for each"
        )

    def _hand_out(self) -> Iterator[Any]:
        try:
            for _ in self.sizes:
                examples = self._load()
                self.handed += 1
                yield examples
        finally:
            if self.handed < len(self.sizes):
                self._left(self)
