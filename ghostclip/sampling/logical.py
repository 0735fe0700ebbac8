"""A logical batch, as the training loop gets it: handed out in physical batches, once and to the end, or discarded."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

from ghostclip.errors import PrivacyError
from ghostclip.sampling.draws import Physical
from ghostclip.sampling.users import UserRows

__all__ = ["BatchOwner", "BatchState", "LogicalBatch", "Unowned"]


class BatchState(enum.Enum):
    """How far a logical batch is: from ACCUMULATING by COMPLETE, CHARGED and RELEASED to STEPPED, as a rule.

    One whose step was missed is LEFT; it is CHARGED for good where it was discarded on purpose, or where its release
    failed after the charge. An empty one begins as COMPLETE, so that it isn't left out without a charge.

    Attributes:
        is_open: whether a step may still be taken.
    """

    ACCUMULATING = "its physical batches are handed out, and their clipped sums added up", True
    COMPLETE = "the loop over its physical batches is over", True
    FAILED = "work of the package with it raised an exception; what it gathered may be completed, or left", True
    LEFT = "it was over without a step", False
    CHARGED = "its step is charged, and nothing released", False
    RELEASED = "its noisy gradient is in place, and the optimizer's step under way", False
    STEPPED = "its step was taken", False

    def __init__(self, meaning: str, is_open: bool) -> None:
        self.is_open = is_open


class BatchOwner(Protocol):
    """Who takes the steps of logical batches, and is told of each."""

    def ready(self, left: bool) -> None:
        """The next logical batch, or the end of the epoch, is asked for; raises PrivacyError to refuse it.

        ``left``: whether this is another loop than that of the batch before, which is gone.
        """

    def begin(self, batch: LogicalBatch | None) -> None:
        """The batch is handed out; None: the one before is over."""

    def left(self, batch: LogicalBatch, problem: Exception | None) -> None:
        """The loop over the batch's physical ones was left before the last of them, by ``problem``, if by an error."""

    def discard(self, batch: LogicalBatch | None) -> None:
        """The batch gets no step, on purpose; None: the one handed out last, if it had none."""


class Unowned:
    """Nobody: batches are drawn and no steps are taken with them."""

    def ready(self, *_: Any, **__: Any) -> None:
        """Does nothing, as for all else that a `BatchOwner` is told."""

    begin = left = discard = ready


class LogicalBatch:
    """One random sample of the data set, split into physical batches. Which examples it holds is private data.

    Attributes:
        rows: the numbers of the rows in each physical batch, by which they can be loaded again.
        sizes: the number of rows in each physical batch; no numbers for an empty sample.
        users: whose rows they are, for each physical batch; None where examples are the units of privacy.
        handed: how many physical batches were handed out so far.
        state: how far it is.
        step_number: of its step, by which a schedule has its terms; 0 for the model's first step.
        digest: tells samples apart where several processes share one out; "" where there is one.
        dataset, collate: what physical batches are made of, and by.
    """

    def __init__(
        self,
        physical: Sequence[Physical],
        load: Callable[[], Any],
        owner: BatchOwner,
        digest: str = "",
        step_number: int = 0,
        source: tuple[Any, Callable[[Any], Any]] = ((), list),
    ) -> None:
        self.digest, self.step_number = digest, step_number
        self.dataset, self.collate = source
        self.rows = [rows for rows, _ in physical]
        self.sizes = [len(rows) for rows, _ in physical]
        self.users: list[UserRows | None] = [users for _, users in physical]
        self.handed = 0
        self.state = BatchState.ACCUMULATING if self.sizes else BatchState.COMPLETE
        self._load, self._owner = load, owner
        self._functions: list[Callable[[Any], Any]] = []
        self._started = False

    def __repr__(self) -> str:
        """Says how far it is, and nothing of its size."""
        started = "handed out in part" if self.handed else "not yet used"
        known = self.state in (BatchState.ACCUMULATING, BatchState.COMPLETE)
        return f"LogicalBatch(step {self.step_number}, {started if known else self.state.name.lower()})"

    def physical(self) -> Iterator[Any]:
        """Iterates over the physical batches. Leaving the loop before the last one discards the logical batch.

        Raises:
            PrivacyError: it was called before, or the next logical batch was taken already.
        """
        if self._started:
            raise PrivacyError(
                "physical() of this logical batch was called before, and its examples may be used in one pass only; "
                "take the next batch of engine.batches()"
            )
        self._started = True
        return self._hand_out()

    def pass_through(self, function: Callable[[Any], Any]) -> None:
        """Has each physical batch go through ``function``, to another device for instance, before it is handed out."""
        self._functions.append(function)

    def passed(self, examples: Any) -> Any:
        """Physical batches as they are handed out, see `pass_through`."""
        for function in self._functions:
            examples = function(examples)
        return examples

    def discard(self) -> None:
        """Leaves the batch out on purpose. Nothing of it is released, and its step is charged.

        The charge is needed because the choice of a batch may depend on the data. After an exception that discarded the
        batch the call does nothing. If several processes train together, all of them call it.

        Raises:
            PrivacyError: the batch had its step, or is not the current one.
            BudgetExceededError, LedgerError: the step can't be charged; the batch is discarded nevertheless.
        """
        self._owner.discard(self)

    def __iter__(self) -> NoReturn:
        """Raises TypeError: it is no pair of tensors, as a DataLoader's batch is, and can't be taken apart as one."""
        raise TypeError(
            "a batch of engine.batches() is a logical batch, which can't be unpacked or indexed like a DataLoader's: "
            "hand it to engine.step(batch, loss_fn), or take its parts by `for inputs, targets in batch.physical()` "
            "and call engine.backward(losses) for each"
        )

    def __getitem__(self, key: object) -> NoReturn:
        """Raises TypeError, as `__iter__` does."""
        self.__iter__()

    def _hand_out(self) -> Iterator[Any]:
        try:
            for _ in self.sizes:
                examples = self._load()
                if self._functions:
                    examples = self.passed(examples)
                self.handed += 1
                yield examples
        except BaseException as end:
            if self.state.is_open and not isinstance(end, GeneratorExit):
                self.state = BatchState.FAILED
            if self.handed < len(self.sizes):
                self._owner.left(self, end if isinstance(end, Exception) else None)
            raise
        # The last statement: wherever Ctrl-C comes before it, the next loop goes on.
        if self.state is BatchState.ACCUMULATING:
            self.state = BatchState.COMPLETE
