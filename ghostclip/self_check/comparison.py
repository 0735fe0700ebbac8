"""Whether an example's loss depends on the other examples of its batch: others are put beside it, and it is compared.

The graph shows where examples meet in what is differentiated. What is not differentiated (a loss weighted by the
batch's own statistics, a detached mean, a threshold at the median) shows only in the losses. In each comparison a part
of the examples stays, copies of one of them stand in the place of all others, and the losses of those that stayed are
compared with theirs in the whole batch; then the same for the rest. The shapes, and so kernels, roundings and random
numbers, are those of the whole batch. Last, each part is a batch by itself, which shows what depends on their number.
"""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.errors import VerificationError
from ghostclip.graph.data_swap import mixed_examples
from ghostclip.self_check.batch_rows import BatchRows, ExampleDims, RaggedBatchRows
from ghostclip.self_check.trial_losses import LossFunction, TrialLosses

__all__ = ["LossComparison"]

# Logical batches at the start that are compared, and one in how many physical batches later.
STEPS, SELDOM = 6, 400
# Times that a difference must come back, in an order by chance, lest it be one from call to call. Only a loss that is
# about to be refused is called so often.
TOSSES = 40
# Random choices of examples for which the same random numbers must be drawn.
CHOICES = 16
# Relative change of a loss, and the fewest losses that must change alike, to say that it depends on their number.
OF_NUMBER, FEWEST = 0.1, 4

OF_THE_NUMBER = (
    "an example's loss depends on how many examples its batch has (it is divided by their number, or the like), which "
    "is private; divide by a constant"
)

log = logging.getLogger("ghostclip")


class LossComparison:
    """Compares losses in the first steps of a training, and at random later.

    Which batches and rows, and in which order, is drawn from the operating system's entropy: by no random numbers of
    the user's, and by no data.

    Args:
        model: in training. Its buffers, modes and torch's, numpy's and Python's random numbers are put back.

    Attributes:
        begun: whether the user was told of it, or of why there is none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._dims, self._dice = model, ExampleDims(), random.Random()
        # Not the batch itself, which holds its data loader's workers.
        self._left, self._seen = STEPS, weakref.ref[Any](self)
        self.begun = False
        self._said: set[str] = set()

    def compare(
        self, loss_fn: LossFunction, batch: Any, rows: int, units: int, logical: object, batch_index: Any = None
    ) -> None:
        """Compares the losses of a physical batch if its turn has come.

        Args:
            loss_fn: (model, batch) -> losses [rows].
            batch: physical.
            rows: how many losses there are.
            units: of privacy (examples, or users with as many rows each, side by side).
            logical: the batch it is part of, of which one part is compared in the first steps.
            batch_index: of ragged examples, the example of each row.

        Raises:
            VerificationError: a loss depends on other examples, or buffers keep something of them.
        """
        parts = self._parts_to_compare(logical) if units > 1 else 0
        if not parts:
            return
        found: BatchRows = BatchRows(batch, rows, self._dims)
        if batch_index is not None:
            found = RaggedBatchRows(batch, rows, batch_index)
        if not found.swappable:
            if self._left == 0:  # another batch may have shown where examples are
                self._say("the batch holds no tensor with a row for each example")
            return
        try:
            trial = TrialLosses(loss_fn, self._model, found)
            if trial.first.losses.shape == (rows,) and trial.first.losses.is_floating_point():
                self._check(trial, self._two_groups(units, rows // units)[:parts])
        except VerificationError:
            raise
        except Exception as error:  # what is wrong with the batch itself shows in its own forward
            self._say(f"{type(error).__name__}: {error}")

    def _parts_to_compare(self, logical: object) -> int:
        """Both groups of a batch in the first steps, and at random later one; 0: it is not its turn."""
        if self._left == 0:
            return int(self._dice.random() < 1.0 / SELDOM)
        if logical is self._seen():
            return 0
        if self._left == STEPS:
            log.info(
                "the self-check calls the loss function 5 to 7 times more in each of the first %d steps, and for one "
                "in %d physical batches later; self_check=False turns it off",
                STEPS, SELDOM,
            )  # fmt: skip
        self._seen, self._left, self.begun = weakref.ref(logical), self._left - 1, True
        return 2

    def _say(self, reason: str) -> None:
        """Says once for each reason that there was no comparison."""
        if (kind := reason.partition(":")[0]) not in self._said:
            self._said.add(kind)
            log.warning("the self-check could not compare losses among other examples: %s", reason)

    def _check(self, trial: TrialLosses, parts: list[Tensor]) -> None:
        """Raises VerificationError where losses of the rows ``parts`` depend on others, or buffers keep something."""
        swaps = [(part, index) for part in parts if (index := self._swapped(part, trial.first.losses)) is not None]
        if swaps:
            _refuse_remembering(trial, swaps[0][1])
        if any(trial.moves(index, part) for part, index in swaps):
            # Random numbers may fall elsewhere when other examples are longer: with the modules that draw them in eval
            # mode losses must move as well.
            trial.quieten()
            if any(self._depends(trial, part, index) for part, index in swaps):
                raise VerificationError(_message(_place(trial)))
        if trial.batch.divisible and self._depends_on_number(trial, parts):
            raise VerificationError(_message(OF_THE_NUMBER))

    def _two_groups(self, units: int, each: int) -> list[Tensor]:
        """The rows of a random half of the units, and those of the others."""
        order = self._dice.sample(range(units), units)
        groups = [sorted(order[: units // 2]), sorted(order[units // 2 :])]
        return [torch.tensor([unit * each + row for unit in group for row in range(each)]) for group in groups]

    def _swapped(self, part: Tensor, losses: Tensor) -> Tensor | None:
        """An index by which the rows of ``part`` stay, and one of them stands in all other places; None: none can."""
        fine = [row for row in part.tolist() if bool(losses[row].isfinite())]
        if not fine:
            return None
        index = torch.full((len(losses),), self._dice.choice(fine))
        index[part] = part
        return index

    def _depends(self, trial: TrialLosses, part: Tensor, index: Tensor) -> bool:
        """Whether losses of ``part`` depend on the rows that stand in the other places."""
        if not trial.moves(index, part):
            return False
        if trial.draws and not self._draws_alike(trial):
            self._say("the loss function draws other random numbers for other data")
            return False
        trial.allow_rounding()
        # Of several dimensions as long as there are examples, theirs is one along which no other loss moves.
        return all(
            self._repeats(trial, partial(trial.moves, index, part, choice)) for choice in range(trial.batch.choices)
        )

    def _draws_alike(self, trial: TrialLosses) -> bool:
        """Whether the same random numbers are drawn whatever the examples, as far as some random choices show."""
        rows = range(trial.batch.rows)
        _, expected = trial.watched(trial.every)
        chosen = [torch.tensor(self._dice.choices(rows, k=len(rows))) for _ in range(CHOICES)]
        return all(trial.watched(index)[1] == expected for index in chosen)

    def _depends_on_number(self, trial: TrialLosses, parts: list[Tensor]) -> bool:
        """Whether all losses change alike, and by far more than rounding, when each part is a batch by itself."""
        trial.quieten()
        if trial.draws:
            return False

        def change() -> bool:
            losses = [trial.run(part).losses for part in parts]
            right = all(some.shape == part.shape for some, part in zip(losses, parts, strict=True))
            before = trial.first.losses[torch.cat(parts).to(losses[0].device)]
            return right and _changed_alike(before, torch.cat(losses), trial.floor)

        try:
            if not change():
                return False
        except Exception as error:  # it need not take batches of every size
            log.info("losses of parts of a batch are not compared: %s: %s", type(error).__name__, error)
            return False
        trial.allow_rounding()
        return self._repeats(trial, change)

    def _repeats(self, trial: TrialLosses, changes: Callable[[], bool]) -> bool:
        """Whether something ``changes`` each time, and the whole batch's losses never do, in an order that is drawn.

        A function that goes by a count of its calls passes with a probability of 2 ** -TOSSES at most.
        """
        if not changes():
            return False
        for _ in range(TOSSES):
            if self._dice.random() < 0.5:
                if trial.moves(trial.every):
                    self._say("the loss function gives other losses when it is called again")
                    return False
            elif not changes():
                return False
        return True


def _place(trial: TrialLosses) -> str:
    """Where examples meet, and what to do, as far as that can be seen."""
    whole = trial.batch.taken(trial.every)
    try:
        found = trial.replayed(lambda: mixed_examples(trial.model, trial.loss_fn, whole))
    except Exception:  # the finding stands without a place
        found = []
    if not found:
        return "an example's loss depends on the data of another"
    path, problem, remedy, line = found[0]
    return f"{path + ': ' if path else ''}{problem}{f' [{line}]' if line else ''}; {remedy}"


def _message(finding: str) -> str:
    return (
        f"the self-check found examples that mix, so that none of them can be bounded: {finding}. Nothing of this "
        "batch was released or charged. (If the batch holds a tensor with as many rows as examples that is shared by "
        "all of them, like a table of class weights, give it to the loss function another way, or switch this off by "
        "self_check=False)"
    )


def _changed_alike(before: Tensor, after: Tensor, floor: float) -> bool:
    """Whether all losses, but those that are next to zero, are larger now, or all smaller, by more than rounding."""
    counted = (before.abs() > floor) | (after.abs() > floor)
    before, after = before[counted], after[counted]
    change = after - before
    if len(change) < FEWEST or not bool((change.abs() > OF_NUMBER * before.abs() + floor).all()):
        return False
    growth = after.abs() - before.abs()
    return any(bool((sign * each > 0).all()) for each in (change, growth) for sign in (1, -1))


def _refuse_remembering(trial: TrialLosses, index: Tensor) -> None:
    """Raises VerificationError when a forward leaves other values in the model's buffers for other examples.

    Buffers go into checkpoints and into what is published, and no noise is on them.
    """
    if not trial.first.written:
        return
    again, after = trial.run(trial.every).written, trial.run(index).written
    if not _unlike(trial.first.written, again) and (changed := _unlike(trial.first.written, after)):
        raise VerificationError(
            f"the self-check found that the forward keeps something of the examples in the buffer {changed[0]!r}, "
            "which would be saved and published with the model without noise; don't update it in training (put its "
            "module into eval mode, or take the update out). Nothing of this batch was released or charged. (If it "
            "tells nothing of the examples' data, switch this off by self_check=False)"
        )


def _unlike(these: Mapping[str, Tensor], those: Mapping[str, Tensor]) -> list[str]:
    """Names of buffers with other values; one that changes its shape with its batch is a cache."""
    both = [name for name in these if name in those and these[name].shape == those[name].shape]
    return [name for name in both if not torch.isclose(these[name], those[name], rtol=0, atol=0, equal_nan=True).all()]
