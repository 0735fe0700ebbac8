"""Whether losses, or what a model keeps, depend on the other examples of a batch: rows are tried in other company.

The graph shows where examples meet in what is differentiated. Two things don't show there: what the loss function
computes without gradients (a weight over the batch's sum), and what the collate function computes (the longest length).
They show in losses, or in the norms of their gradients, when the batch is another one.

Example: four texts have lengths 5, 9, 3 and 7, padded to 9. Loaded again as halves, 5 and 9 are padded to 9, 3 and 7
to 7. If a loss sees the padding, those of the second half change. The losses of both halves together must be those of
all four, as a multiset, since a collate function may sort its rows; with users, whose rows are found by their places,
each in its place.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ghostclip.clipper.cutting import have_same_sizes
from ghostclip.clipper.trial import trying
from ghostclip.self_check.loading import Widened
from ghostclip.self_check.mixing_place import LOSS_REMEDY, mixing_place
from ghostclip.self_check.model_state import unlike
from ghostclip.self_check.trial_losses import TrialLosses, TrialOutcome
from ghostclip.wrap import Finding

__all__ = ["REMEDY_OF_KEPT", "Kept", "MixingTest"]

# Times that a difference must come back, in an order by chance, lest it be one from call to call. Only a loss that is
# about to be refused is called so often.
TOSSES = 40
# Random choices of rows for which the same random numbers must be drawn.
CHOICES = 16

REMEDY_OF_KEPT = "don't update it in training (put its module into eval mode, or take the update out)"
OF_COMPANY = Finding(
    "",
    "losses change when their examples are loaded in a smaller batch",
    "most often they see the padding to the longest text of the batch: mask it, divide by each text's own count of "
    "tokens, or pad to a fixed length; else the collate function or the loss computes something over the batch (a "
    "mean, a count of tokens or classes, MixUp, a division by the batch's size): compute it for each example alone, or "
    "divide by a constant",
)
OF_ORDER = Finding(
    "",
    "the collate function changes the order of the rows, by which the engine knows with unit_ids whose they are",
    "keep the rows in the order in which the collate function gets them (pack_padded_sequence takes them in any order "
    "with enforce_sorted=False)",
)
OF_DATA = Finding(
    "",
    "an example's loss depends on the data of another",
    LOSS_REMEDY,
)

log = logging.getLogger("ghostclip")


class Kept(NamedTuple):
    """What keeps something of the examples: "buffer", "frozen parameter" or "attribute", and its full name."""

    kind: str
    name: str


class MixingTest:
    """Tries the rows of a batch in other company.

    Args:
        trial: of all the rows.
        units: of privacy (examples, or users with as many rows each, side by side).
        dice: chooses rows and orders, by no random numbers of the user's.
        say: is told once why something can't be tested.
    """

    def __init__(self, trial: TrialLosses, units: int, dice: random.Random, say: Callable[[str], None]) -> None:
        self._trial, self._dice, self._say = trial, dice, say
        self._each = len(trial.rows) // units
        self._outcomes: list[TrialOutcome] = []
        order = self._order(units)
        self._halves = [self._rows(order[: units // 2]), self._rows(order[units // 2 :])]

    def _order(self, units: int) -> list[int]:
        """By which units are parted: from short to long, so that a half has no long ones; at random if alike."""
        order, lengths = self._dice.sample(range(units), units), self._trial.first.loaded.lengths
        if lengths is None:
            return order
        longest = [max(lengths[place] for place in self._rows([unit])) for unit in range(units)]
        return sorted(order, key=longest.__getitem__)

    def _rows(self, units: Sequence[int]) -> list[int]:
        """The places of the rows of some units, in their order."""
        return [unit * self._each + row for unit in sorted(units) for row in range(self._each)]

    def kept(self) -> Kept | None:
        """Where the forward keeps something of the examples, and passes it on without noise.

        A buffer must not have other values after other examples: it is saved and published with the model. A frozen
        parameter must not be written at all. Anything else is kept for nobody if it changes no later loss: the same
        rows must have the same losses, whichever came before them.
        """
        trial, first = self._trial, self._trial.untouched
        if first.left.frozen:
            return Kept("frozen parameter", first.left.frozen[0])
        if (others := self._swapped(self._halves[0])) is None:
            return None
        if first.left.wrote:
            again, swapped = (trial.run(rows, quiet=False) for rows in (trial.every, others))
            repeats = not unlike(first.left.buffers, again.left.buffers)
            if repeats and swapped.random_states[1] == first.random_states[1]:
                for name in unlike(first.left.buffers, swapped.left.buffers):
                    return Kept("buffer", name)
        return self._remembered(others) if first.left.changed else None

    def _remembered(self, others: Sequence[int]) -> Kept | None:
        """The attribute by which losses follow the rows of the batch before."""
        trial = self._trial
        once, again, after = (trial.run(trial.every, after=rows) for rows in (trial.every, trial.every, others))
        if trial.differ(once.losses, again.losses) or unlike(once.left.attributes, again.left.attributes):
            return None
        names = unlike(once.left.attributes, after.left.attributes)
        if trial.differ(once.losses, after.losses):
            return Kept("attribute", [*names, *trial.untouched.left.changed][0] or "a list, dict or number")
        if names:
            self._say(
                f"the attribute {names[0]!r} keeps something of the examples, which no loss depends on so far: it is "
                "private (a metric, for instance), so don't publish it, or keep it outside of the model"
            )
        return None

    def mixed(self) -> Finding | None:
        """How losses depend on other examples."""
        if self._trial.draws:
            untested = (
                "draws random numbers, so it isn't tested whether losses see the padding, or how many rows there are"
            )
            if self._trial.collate_draws:
                self._say(f"the collate function {untested}")
            else:  # as augmentation in the loss function does, mostly of rows that have one size
                log.info("self-check: the loss function, or a model in eval mode, %s", untested)
            return (self.place() or OF_DATA) if any(self._depends(half) for half in self._halves) else None
        try:
            moved = self._what_moves()
        except Exception as error:  # a loss function need not take batches of every size
            self._say(f"losses of a smaller batch can't be compared ({type(error).__name__}: {error})")
            return None
        if moved is None:
            return None
        self._trial.allow_rounding()
        if not self._repeats(moved) or (moved != self._norms_moved and self._is_rounding(moved.__name__)):
            return None
        if self._each > 1 and not self._moved(in_order=False):
            return OF_ORDER
        return OF_COMPANY if self._is_padded() else self.place() or OF_COMPANY

    def _what_moves(self) -> Any:
        """The method by which something moves, to be repeated; None where nothing does."""
        if self._moved():
            return self._moved
        if self._norms_differ():
            return self._norms_moved
        # Halves may have the statistics of all rows by chance: quantiles of a few, or as many of each class.
        return self._not_found if self._not_found() else None

    def _is_padded(self) -> bool:
        """Whether tensors of the halves have other sizes than those of all rows, each beside its number of rows."""
        rows, every = self._trial.rows, self._trial.every
        whole = rows.load(every).batch
        return not all(have_same_sizes(rows.load(half).batch, len(half), whole, len(every)) for half in self._halves)

    def _moved(self, in_order: bool | None = None) -> bool:
        """Whether losses of the halves differ from the whole's; with users, also those of the users in reverse order.

        A collate function that sorts its rows gives these the same order in which it gave the others.
        """
        in_order = self._each > 1 if in_order is None else in_order
        parts = self._parts(in_order)
        self._outcomes = [self._trial.run(part, norms=True) for part in parts]
        if [tuple(each.losses.shape) for each in self._outcomes] != [(len(part),) for part in parts]:
            self._say("the loss function doesn't give one loss for each row of a smaller batch")
            return False
        found = torch.cat([each.losses for each in self._outcomes])
        return self._differ(self._trial.differ, self._trial.first.losses, found, in_order)

    def _norms_moved(self) -> bool:
        """Whether losses or the norms of their gradients do: gradients may follow the batch where losses don't."""
        return self._moved() or self._norms_differ()

    def _norms_differ(self) -> bool:
        """Whether gradient norms of the parts that were run last differ from the whole's."""
        norms = [each.norms for each in self._outcomes if each.norms is not None]
        first = self._trial.first.norms
        if first is None or len(norms) < len(self._outcomes) or sum(map(len, norms)) < len(self._trial.rows):
            return False
        return self._differ(self._trial.norms_differ, first, torch.cat(norms), self._each > 1)

    def _parts(self, in_order: bool) -> list[list[int]]:
        units = range(len(self._trial.every) // self._each)
        reverse = [[place for unit in reversed(units) for place in self._rows([unit])]]
        return [*self._halves, *(reverse if in_order else [])]

    def _differ(self, test: Callable[[Tensor, Tensor], bool], before: Tensor, after: Tensor, in_order: bool) -> bool:
        """Whether numbers of all parts' rows differ from those before, each in its place or as multisets."""
        before = before[[place for part in self._parts(in_order) for place in part]]
        return test(after, before) if in_order else test(after.sort().values, before.sort().values)

    def _not_found(self) -> bool:
        """Whether a loss among copies of other rows is none of the first losses."""
        index = self._swapped(self._halves[0])
        return index is not None and not self._found_elsewhere(index)

    def _is_rounding(self, test: str) -> bool:
        """Whether the method ``test`` sees nothing move in float64: float32 lost digits, where large sums cancel."""
        trial = self._trial
        try:
            with trying():
                model = copy.deepcopy(trial.model).double()
            other = MixingTest(
                TrialLosses(trial.loss_fn, model, Widened(trial.rows)), len(trial.rows), self._dice, log.info
            )
            other._each, other._halves = self._each, self._halves
            return other._trial.first.losses.dtype == torch.float64 and not getattr(other, test)()
        except Exception as error:
            log.info("losses are not compared in float64: %s: %s", type(error).__name__, error)
            return False

    def _swapped(self, part: Sequence[int]) -> list[int] | None:
        """An index by which the units of ``part`` stay, and one of them stands in all other places; None: none can.

        With users it is one's rows, side by side: losses of a user may depend on all of them.
        """
        losses, each = self._trial.first.losses, self._each
        units = [part[place : place + each] for place in range(0, len(part), each)]
        fine = [rows for rows in units if bool(losses[list(rows)].isfinite().all())]
        if not fine:
            return None
        index = list(self._dice.choice(fine)) * (len(losses) // each)
        for row in part:
            index[row] = row
        return index

    def _depends(self, part: Sequence[int]) -> bool:
        """Whether losses of ``part`` depend on the rows in the other places, with the same random numbers."""
        trial = self._trial
        if (index := self._swapped(part)) is None:
            return False
        swapped = trial.run(index)
        if not trial.moved(swapped.losses, part) or swapped.random_states != trial.first.random_states:
            return False
        if not self._draws_alike(part):
            self._say("other random numbers are drawn for other data")
            return False
        trial.allow_rounding()
        if trial.collate_draws and self._found_elsewhere(index):
            return False  # the collate function sorts its rows
        return self._repeats(lambda: trial.moves(index, part))

    def _found_elsewhere(self, index: Sequence[int]) -> bool:
        """Whether each finite loss of the rows ``index`` is one of the first losses, in whatever place."""
        first, found = self._trial.first.losses, self._trial.run(index).losses
        found = found[found.isfinite()]
        distances = (found.unsqueeze(1) - first).abs().nan_to_num(nan=torch.inf)
        return not len(found) or not self._trial.differ(found, first[distances.argmin(1)])

    def _draws_alike(self, part: Sequence[int]) -> bool:
        """Whether the same random numbers are drawn whichever rows of ``part`` stand in the other places, as far as
        some random choices show."""
        _, expected = self._trial.watched(self._trial.every)
        fixed, places = set(part), self._trial.every
        chosen = [[row if row in fixed else self._dice.choice(part) for row in places] for _ in range(CHOICES)]
        return all(self._trial.watched(index)[1] == expected for index in chosen)

    def _repeats(self, changes: Callable[[], bool]) -> bool:
        """Whether something ``changes`` each time, and the whole batch's losses never do, in an order that is drawn.

        A function that goes by a count of its calls passes with a probability of 2 ** -TOSSES at most.
        """
        if not changes():
            return False
        for _ in range(TOSSES):
            if self._dice.random() < 0.5:
                if self._trial.moves(self._trial.every):
                    self._say("the same rows have other losses when they are tried again")
                    return False
            elif not changes():
                return False
        return True

    def place(self) -> Finding | None:
        """The first operation in which the rows meet when one of them is exchanged for its neighbour."""
        try:
            return mixing_place(self._trial.model, self._trial.losses_again, len(self._trial.every))
        except Exception as error:  # a finding stands without a place
            log.info("the place where examples meet was not found: %s: %s", type(error).__name__, error)
            return None
