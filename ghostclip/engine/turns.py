"""Which logical batch is in the making, whether the next one may be taken, and what other ranks are told of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ghostclip.engine.distributed import Ranks, refuse_differences
from ghostclip.engine.update_check import UpdateCheck
from ghostclip.errors import PrivacyError
from ghostclip.sampling import LogicalBatch

__all__ = ["Turns"]

T = TypeVar("T")
NO_STEP = """the logical batch before this one had no step, so nothing of it was charged or released. The loop is

    for batch in engine.batches():
        for examples in batch.physical():    # none in an empty batch, which has its step all the same
            engine.backward(loss_fn(model, examples))
        optimizer.step()
        optimizer.zero_grad()

Take the step that is missing, or call batch.discard() (engine.batches().discard() where it is out of reach), which \
charges it"""


class Turns:
    """Follows logical batches from being handed out to their step.

    Args:
        updates: knows whether parameters moved outside of steps.
        ranks: which train together.

    Attributes:
        ranks: as given.
        batch: handed out last; None once it had its step, or was discarded.
        pending: whether the logical batch handed out last has had no step.
    """

    def __init__(self, updates: UpdateCheck, ranks: Ranks) -> None:
        self._updates, self.ranks = updates, ranks
        self.batch: LogicalBatch | None = None
        self.pending = self._released = False
        # Whether all ranks were asked about the logical batch in the making, so that nobody waits for an answer.
        self._asked = self._refused = False

    def ready(self, new_loop: bool) -> None:
        """Raises PrivacyError unless the next logical batch may be taken.

        The one before must have had its step, or have been left by an exception: one that came up in the engine, or one
        by which the loop over its physical batches, and then that over ``engine.batches()``, was left.
        """
        batch = self.batch
        try:
            self._updates.check()
            if batch is not None and not batch.failed and not (new_loop and batch.interrupted):
                raise PrivacyError(NO_STEP)
        except PrivacyError as problem:
            if not self._refused:
                # Other ranks may be in the step of the batch that isn't taken here.
                self._refused = True
                self.ranks.refuse(problem)
            raise

    def begin(self, batch: LogicalBatch | None) -> None:
        """A logical batch starts, or none."""
        self.batch = batch
        self._asked = self._refused = self._released = False
        if batch is not None:
            self.pending = True
            self._updates.begin()

    def end(self) -> None:
        """The batch is charged, and released."""
        self.current("optimizer.step()").stepped = True
        self.batch, self._released = None, True

    def check_released(self) -> None:
        """Raises PrivacyError after an update by which no batch was charged and released."""
        if not self._released:
            raise PrivacyError(
                "optimizer.step() came to its end without the engine's noise or charge (its closure was not called, or "
                "the engine's hook before the step was removed). If it used clipped sums, they had no noise: don't use "
                "this model. Call optimizer.step() without a closure, and leave its hooks"
            )

    def failed(self) -> None:
        """An exception came up in the engine: the batch may be left without its step."""
        if self.batch is not None:
            self.batch.failed = True

    def current(self, caller: str) -> LogicalBatch:
        """The logical batch in the making; raises PrivacyError, which names the caller, when there is none."""
        if self.batch is None:
            raise PrivacyError(
                f"{caller} was called without a logical batch of its own, so nothing could be accounted for; call it "
                "once for each batch (not one of a DataLoader of yours), inside of `for batch in engine.batches()`"
            )
        return self.batch

    def refuse_over(self, batch: LogicalBatch) -> None:
        """Raises PrivacyError where a batch can't be discarded; one that an exception has discarded already can."""
        if batch.stepped or self.batch not in (None, batch):
            raise PrivacyError(
                "batch.discard() is for the logical batch that engine.batches() gave last, before its step; this one "
                f"{'had its step' if batch.stepped else 'was over before'}"
            )

    def start(self, discarded: bool) -> None:
        """All ranks begin a step, or discard the batch; raises PrivacyError where some do the other, or refuse."""
        self.agreed(lambda: None, lambda: {"same": {"whether the batch is discarded": discarded}})
        self._asked = discarded

    def agreed(self, work: Callable[[], T], facts: Callable[[], dict[str, Any]]) -> tuple[T, list[dict[str, Any]]]:
        """`Ranks.agreed`, where ranks must also say the same."""
        self._asked = True
        done, said = self.ranks.agreed(work, facts)
        refuse_differences([each["same"] for each in said], "at every step")
        return done, said

    def tell(self, failure: Exception) -> None:
        """Other ranks wait in their step for what this one has to say."""
        if not self._asked:
            self._asked = True
            self.ranks.refuse(failure)
