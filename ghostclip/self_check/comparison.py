"""When examples of a training are tried in other company: in the first steps, at random later, at larger shapes."""

from __future__ import annotations

import logging
import random
import weakref
from typing import Any

from torch import nn

from ghostclip.clipper.cutting import Sizes
from ghostclip.clipper.first_pass import FirstPasses
from ghostclip.errors import ExamplesMixError
from ghostclip.self_check.loading import LoadedRows
from ghostclip.self_check.mixing import REMEDY_OF_KEPT, MixingTest
from ghostclip.self_check.trial_losses import LossFunction, TrialLosses

__all__ = ["LossComparison"]

# Logical batches at the start that are compared, and one in how many physical batches later.
STEPS, SELDOM = 6, 400
# Comparisons that may fail, by a file that can't be read for instance, before sizes count as tried.
MISTRIALS = 6
# The most units of a physical batch that are tried, unless more are needed for its shapes.
MOST = 32

NOTHING_RELEASED = "Nothing of this batch was released or charged (self_check=False switches this test off)"

log = logging.getLogger("ghostclip")


class LossComparison:
    """Loads rows of physical batches again and compares their losses, see `ghostclip.self_check.mixing`.

    Batches are those of the first steps, random ones later, and all whose tensors are larger than any that was tried,
    as when the first long text comes. Which batches, rows and orders is drawn from the operating system's entropy.

    Args:
        model: in training. Its buffers, modes and torch's, numpy's and Python's random numbers are put back.
        passes: of the model, which measure gradients; None: losses are compared alone.

    Attributes:
        begun: whether the user was told of it, or of why there is none.
    """

    def __init__(self, model: nn.Module, passes: FirstPasses | None = None) -> None:
        self._model, self._passes, self._tried, self._dice = model, passes, Sizes(), random.Random()
        # Not the batch itself, which holds its data loader's workers.
        self._left, self._seen = STEPS, weakref.ref[Any](self)
        self.begun, self._failures = False, 0
        self._said: set[str] = set()

    def compare(
        self, loss_fn: LossFunction, batch: Any, rows: LoadedRows, units: int, logical: object,
        *, most: int | None = None, ragged: bool = False,
    ) -> None:  # fmt: skip
        """Compares the losses of a physical batch if its turn has come.

        Args:
            loss_fn: (model, batch) -> losses [rows].
            batch: physical.
            rows: of the batch.
            units: of privacy (examples, or users with as many rows each, side by side).
            logical: the batch it is part of, of which one part is compared in the first steps.
            most: units that fit into memory; None: all.
            ragged: whether rows of layers are told by an index, which parts of the batch have none of.

        Raises:
            ExamplesMixError: a loss depends on other examples, or the model keeps something of them.
        """
        if units < 2:
            return
        larger = not self._tried.hold(batch, len(rows))
        if not (self._is_due(logical) or larger):
            return
        try:
            passes = None if ragged else self._passes
            self._compare(loss_fn, batch, rows, units, larger, units if most is None else most, passes)
        except ExamplesMixError:
            raise
        except Exception as error:  # what is wrong with the batch itself shows in its own forward
            self._say(f"losses can't be compared among other examples ({type(error).__name__}: {error})")
            self._failures += 1
            larger = larger and self._failures > MISTRIALS
        if larger:
            self._tried.add(batch, len(rows))

    def _compare(
        self, loss_fn: LossFunction, batch: Any, rows: LoadedRows, units: int, larger: bool, most: int,
        passes: FirstPasses | None,
    ) -> None:  # fmt: skip
        each = len(rows) // units
        some = rows.some(self._chosen(units, each, min(MOST, most)))
        if larger and len(some) < len(rows):
            found = Sizes()
            found.add(some.load(range(len(some))).batch, len(some))
            if not found.hold(batch, len(rows)):
                some = rows.some(self._chosen(units, each, most))
        trial = TrialLosses(loss_fn, self._model, some, passes)
        losses = trial.first.losses
        if losses.shape != (len(some),) or not losses.is_floating_point():
            return
        test = MixingTest(trial, len(some) // each, self._dice, self._say)
        if (kept := test.kept()) is not None:
            raise ExamplesMixError(
                f"the self-check found that the forward keeps something of the examples in the {kept.kind} "
                f"{kept.name!r}, which would be used or published with the model without noise; {REMEDY_OF_KEPT}. "
                f"{NOTHING_RELEASED}"
            )
        if (mixed := test.mixed()) is not None:
            path, line = f"{mixed.path}: " if mixed.path else "", f" [{mixed.line}]" if mixed.line else ""
            raise ExamplesMixError(
                "the self-check found examples that mix: an example's loss depends on the data of another, or on how "
                f"many there are, so that none can be bounded: {path}{mixed.problem}{line}; {mixed.remedy}. "
                f"{NOTHING_RELEASED}"
            )

    def _chosen(self, units: int, each: int, count: int) -> list[int]:
        """The rows of some units, at random, in their order."""
        chosen = sorted(self._dice.sample(range(units), min(units, count)))
        return [unit * each + row for unit in chosen for row in range(each)]

    def _is_due(self, logical: object) -> bool:
        """Whether it is the first part of a logical batch in the first steps, or a random one later."""
        if self._left == 0:
            return self._dice.random() < 1.0 / SELDOM
        if logical is self._seen():
            return False
        if self._left == STEPS:
            log.info(
                "the self-check loads at most %d examples again and calls the loss function a few times more in each "
                "of the first %d steps, for one in %d physical batches later, and for batches larger in some dimension "
                "than all before; self_check=False turns it off",
                MOST, STEPS, SELDOM,
            )  # fmt: skip
        self._seen, self._left, self.begun = weakref.ref(logical), self._left - 1, True
        return True

    def _say(self, reason: str) -> None:
        """Says once for each reason what isn't tested, or is to be known."""
        if (kind := reason.partition(":")[0]) not in self._said:
            self._said.add(kind)
            log.warning("self-check: %s", reason)
