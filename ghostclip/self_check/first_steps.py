"""What an engine's self-check looks at, and when: gradients, losses in other company, and the first update.

What marks show anyway (`ghostclip.graph.owners`: rows of each layer follow their own example's loss) is not repeated.
"""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Callable, Collection
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from ghostclip.clipper import GhostClipper
from ghostclip.clipper.cutting import Sizes
from ghostclip.clipper.forwards import LossFunction, forward_of
from ghostclip.clipper.trial import without_trace
from ghostclip.errors import ExamplesMixError, VerificationError
from ghostclip.self_check.agreement import gradients_agree, untrained
from ghostclip.self_check.loading import LoadedRows
from ghostclip.self_check.mixing import MixingTest
from ghostclip.self_check.trial_losses import TrialLosses, attempted

__all__ = ["SelfCheck"]

# Logical batches at the start whose losses are compared, and one in how many physical batches later.
STEPS, SELDOM = 6, 400
# The most units of a physical batch that are tried, unless more are needed for its shapes; and those whose gradients
# are compared.
MOST, FEW = 32, 16

# Models of which `ghostclip.check` found nothing on a batch.
CHECKED: weakref.WeakSet[nn.Module] = weakref.WeakSet()

log = logging.getLogger("ghostclip")


class PhysicalBatch(Protocol):
    """Examples as the loss function gets them, so many rows of so many units of privacy."""

    examples: Any
    rows: int
    units: int
    batch_index: Any


class SelfCheck:
    """Watches the steps of an engine; all that they need and leave stays as it would have been.

    Losses are compared in batches of the first steps, in random ones later, and in all whose tensors are larger than
    any that was tried, as when the first long text comes. Gradients are compared on a few rows of the first batch where
    they are all finite, or in its passes where rows can't be loaded again, and the first update with examples in it is
    looked at.
    Which batches, rows and orders is drawn from the operating system's entropy.

    The model's buffers and modes are put back, and torch's, numpy's and Python's random numbers. ``wanted=False``
    switches all of it off. ``went_on``: whether the training goes on with steps of a checkpoint that had no test of
    losses.
    """

    def __init__(self, clipper: GhostClipper, optimizer: Optimizer, wanted: bool = True) -> None:
        self._clipper, self._model, self._optimizer, self._wanted = clipper, clipper.model, optimizer, wanted
        self._to_compare = self._to_move = wanted
        self._saw_examples = self._compared = self._stepped = self.went_on = False
        # Trained parameters on which the losses didn't depend, and what warns after the first update.
        self._unused: list[str] = []
        self._warn: Callable[[], None] | None = None
        self._tried, self._dice = Sizes(), random.Random()
        # Not the batch itself, which holds its data loader's workers.
        self._left, self._seen = STEPS, weakref.ref[Any](self)
        self._said = set[str]()
        # Why the last comparison failed; said only where the step itself succeeds, whose error says the same otherwise.
        self._failure = ""

    @property
    def untested(self) -> bool:
        """Whether steps were taken, and nothing tested whether losses depend on other examples, `check` included.

        Comparisons here say nothing of a checkpoint's steps, whose loss function may have been another.
        """
        return (self.went_on or (self._stepped and not self._compared)) and self._model not in CHECKED

    @property
    def over(self) -> bool:
        """Whether gradients and the first update were checked; losses may still be compared."""
        return not (self._to_compare or self._to_move)

    def before(self, loss_fn: LossFunction, physical: PhysicalBatch, logical: Any, most: int | None) -> None:
        """Before a physical batch's forward: compares losses if its turn has come.

        In the first steps one part of the ``logical`` batch is compared. ``most`` units of privacy fit into memory;
        None: all.

        Raises:
            ExamplesMixError: a loss depends on other examples, or the model keeps something of them.
            VerificationError: as `backward`.
        """
        if not self._wanted or physical.units < 2:
            return
        larger = not self._tried.hold(physical.examples, physical.rows)
        due = self._take_turn(logical) or larger
        # Rows of layers are told by an index, which parts of the batch have none of.
        ragged, each = physical.batch_index is not None, physical.rows // physical.units
        if not (due or (self._to_compare and not ragged)):
            return
        rows = LoadedRows(logical.dataset, logical.collate, logical.rows[logical.handed - 1], logical.passed, each)
        try:
            some = self._some(physical.examples, rows, larger, min(most or rows.units, rows.units))
            if due:
                passes = None if ragged or self._clipper.sharding.sharded else self._clipper.passes
                self._compared |= self._compare(TrialLosses(loss_fn, self._model, some, passes))
            if self._to_compare and not ragged:
                self._compare_gradients(loss_fn, some.some(range(min(FEW, some.units))))
        except VerificationError:
            raise
        except Exception as error:  # what is wrong with the batch itself shows in its own forward
            self._failure = f"losses can't be compared among other examples ({type(error).__name__}: {error})"
        if larger:
            self._tried.add(physical.examples, physical.rows)

    def _take_turn(self, logical: object) -> bool:
        """Whether it is the first part of a logical batch in the first steps, or a random one later."""
        if self._left == 0:
            return self._dice.random() < 1.0 / SELDOM
        if logical is self._seen():
            return False
        if self._left == STEPS:
            log.info(
                "the first %d steps take longer: the self-check computes losses of up to %d examples a few times more, "
                "to see whether one depends on another; later in one of %d physical batches, and in any that is larger "
                "than all before",
                STEPS, MOST, SELDOM,
            )  # fmt: skip
        self._seen, self._left = weakref.ref(logical), self._left - 1
        return True

    def _some(self, batch: Any, rows: LoadedRows, larger: bool, most: int) -> LoadedRows:
        """Random rows of the batch; where it is larger than all before, as many as it takes for its sizes."""
        some = rows.some(self._dice.sample(range(rows.units), min(MOST, most)))
        if larger and len(some) < len(rows):
            found = Sizes()
            found.add(some.load(range(len(some))).batch, len(some))
            if not found.hold(batch, len(rows)):
                return rows.some(self._dice.sample(range(rows.units), most))
        return some

    def _compare(self, trial: TrialLosses) -> bool:
        """Whether losses could be compared; raises ExamplesMixError where the trial's rows mix."""
        losses = trial.first.losses
        if not losses.is_floating_point():
            return False
        test, whole = MixingTest(trial, self._say), losses.shape == (len(trial.rows),)
        if (found := (whole and (test.kept() or test.read() or test.mixed())) or test.ignored()) is not None:
            path, line = f"{found.path}: " if found.path else "", f" [{found.line}]" if found.line else ""
            raise ExamplesMixError(
                f"{path}{found.problem}{line}, so the self-check found examples that mix; {found.remedy}"
            )
        return test.compared

    def _say(self, reason: str) -> None:
        """Says once for each reason what isn't tested, or is to be known."""
        if (kind := reason.partition(":")[0]) not in self._said:
            self._said.add(kind)
            log.warning("self-check: %s", reason)

    def _compare_gradients(self, loss_fn: LossFunction, few: LoadedRows) -> None:
        """`backward` of a few rows, lest the graph of all be held; what can't be measured is left to the passes."""
        passes, untested = self._clipper.passes, f"gradients are not compared on {len(few)} rows"
        with attempted(untested), without_trace(self._model), passes.forgetting():
            batch = few.load(range(len(few))).batch
            with passes.running(forward_of(self._model, loss_fn, batch)):
                self.backward(loss_fn(self._model, batch))

    def backward(self, losses: Tensor) -> None:
        """Compares a few of the per-example gradients with autograd's and keeps the graph of the losses [B].

        Raises:
            VerificationError: they differ; nothing was gathered.
            LossShapeError, StaleInputError, UnsupportedModelError: as `GhostClipper.norms`.
        """
        self._saw_examples = True
        if self._to_compare and getattr(losses, "requires_grad", False):
            unused = gradients_agree(self._clipper.passes, losses)
            self._to_compare, self._unused = unused is None, unused or []

    def cannot_compare(self) -> None:
        """Says once that losses came without a loss function; not after a step with one, or `ghostclip.check`."""
        if self._wanted and self._left == STEPS and self._model not in CHECKED:
            self._say(
                "a loop that computes its own losses has no test of whether a loss depends on other examples of "
                "its batch, by padding to the longest for instance, and epsilon holds only if none does: call "
                "ghostclip.check(model, loss_fn, loader) once before it"
            )

    def released(self, held: Collection[nn.Parameter]) -> None:
        """To be called when the noisy gradients of the optimizer's parameters ``held`` are in place."""
        if self._failure:
            self._say(self._failure)
            self._failure = ""
        if self._to_move and self._saw_examples:
            self._warn = untrained(self._clipper.sharding, held, self._optimizer, self._unused)

    def stepped(self) -> None:
        """To be called after the update; warns once of trained parameters for which training does nothing."""
        self._stepped = True
        if self._warn is not None:
            self._warn()
            self._to_move, self._warn = False, None
