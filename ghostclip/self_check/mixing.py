"""Whether losses, or what a model keeps, depend on the other examples of a batch: rows are tried in other company.

Gradients show where examples meet in what is differentiated. Two things show in losses only: what the loss function
computes without gradients (a weight over the batch's sum), and what the collate function computes (the longest length).

Example: four texts have lengths 5, 9, 3 and 7, padded to 9. Loaded again as halves, 5 and 9 are padded to 9, 3 and 7
to 7. If a loss sees the padding, those of the second half change. The losses of both halves together must be those of
all four, as a multiset, since a collate function may sort its rows; with users, whose rows are found by their places,
each in its place.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ghostclip.graph.data_swap import Mixed, mixed_examples
from ghostclip.self_check.cutting import have_same_sizes
from ghostclip.self_check.model_state import unlike
from ghostclip.self_check.trial_losses import TrialLosses

__all__ = ["REMEDY_OF_KEPT", "Kept", "MixingTest"]

# Times that a difference must come back, in an order by chance, lest it be one from call to call. Only a loss that is
# about to be refused is called so often.
TOSSES = 20
# Random choices of rows for which the same random numbers must be drawn.
CHOICES = 16

REMEDY_OF_KEPT = "don't update it in training (put its module into eval mode, or take the update out)"
OF_COMPANY = Mixed(
    "",
    "losses change when their examples are loaded in a smaller batch",
    "most often they see the padding to the longest text of the batch: mask it, divide by each text's own count of "
    "tokens, or pad to a fixed length; else the collate function or the loss computes something over the batch (a "
    "mean, a count of tokens or classes, MixUp, a division by the batch's size): compute it for each example alone, or "
    "divide by a constant",
)
OF_ORDER = Mixed(
    "",
    "the collate function changes the order of the rows, by which the engine knows with unit_ids whose they are",
    "keep the rows in the order in which the collate function gets them (pack_padded_sequence takes them in any order "
    "with enforce_sorted=False)",
)
OF_DATA = Mixed(
    "",
    "an example's loss depends on the data of another",
    'compute each loss from its own example only (reduction="none"), and mix no examples in the collate function',
)

log = logging.getLogger("ghostclip")


class Kept(NamedTuple):
    """A buffer, or an attribute, that keeps something of the examples: which of both it is, and its full name."""

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
        """Where the forward keeps something of the examples: a buffer, or a tensor that is an attribute of a module.

        A buffer must not have other values after other examples: it is saved and published with the model. An attribute
        that each forward overwrites keeps nothing: it must have the same values after the same rows, whichever came
        before these.
        """
        trial, first = self._trial, self._trial.first
        if (others := self._swapped(self._halves[0])) is None:
            return None
        if first.buffers and not unlike(first.buffers, trial.run(trial.every).buffers):
            for name in unlike(first.buffers, trial.run(others).buffers):
                return Kept("buffer", name)
        if first.touched:
            once, again = (trial.run(trial.every, after=trial.every).attributes for _ in range(2))
            if not unlike(once, again):
                for name in unlike(once, trial.run(trial.every, after=others).attributes):
                    return Kept("attribute", name)
        return None

    def mixed(self) -> Mixed | None:
        """How losses depend on other examples."""
        if self._trial.draws:
            if self._trial.collate_draws:
                self._say(
                    "the collate function draws random numbers, so it isn't tested whether losses see the padding, or "
                    "the number of examples"
                )
            return (self.place() or OF_DATA) if any(self._depends(half) for half in self._halves) else None
        try:
            if not self._moved():
                return None
        except Exception as error:  # a loss function need not take batches of every size
            self._say(f"parts of a batch can't be tried: {type(error).__name__}: {error}")
            return None
        self._trial.allow_rounding()
        if not self._repeats(self._moved):
            return None
        if self._each > 1 and not self._moved(in_order=False):
            return OF_ORDER
        return OF_COMPANY if self._is_padded() else self.place() or OF_COMPANY

    def _is_padded(self) -> bool:
        """Whether tensors of the halves have other sizes than those of all rows, each beside its number of rows."""
        rows, every = self._trial.rows, self._trial.every
        whole = rows.load(every).batch
        return not all(have_same_sizes(rows.load(half).batch, len(half), whole, len(every)) for half in self._halves)

    def _moved(self, in_order: bool | None = None) -> bool:
        """Whether losses of the halves differ from the whole's; with users, also those of the users in reverse order.

        A collate function that sorts its rows gives these the same order in which it gave the others.
        """
        trial, parts = self._trial, self._halves
        in_order = self._each > 1 if in_order is None else in_order
        if in_order:
            units = range(len(trial.every) // self._each)
            parts = [*parts, [place for unit in reversed(units) for place in self._rows([unit])]]
        losses = [trial.run(part).losses for part in parts]
        if [len(each) if each.dim() == 1 else -1 for each in losses] != [len(part) for part in parts]:
            return False  # the loss function takes no batches of this size
        before, after = trial.first.losses[[place for part in parts for place in part]], torch.cat(losses)
        return trial.differ(after, before) if in_order else trial.differ(after.sort().values, before.sort().values)

    def _swapped(self, part: Sequence[int]) -> list[int] | None:
        """An index by which the rows of ``part`` stay, and one of them stands in all other places; None: none can."""
        losses = self._trial.first.losses
        fine = [row for row in part if bool(losses[row].isfinite())]
        if not fine:
            return None
        index = [self._dice.choice(fine)] * len(losses)
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
        """Whether each loss of other rows is one of the first losses, in another place."""
        first = self._trial.first.losses
        near = first[(self._trial.run(index).losses.unsqueeze(1) - first).abs().argmin(1)]
        return not self._trial.differ(self._trial.run(index).losses, near)

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

    def place(self) -> Mixed | None:
        """The first operation in which the rows meet when one of them is exchanged for its neighbour."""
        trial = self._trial

        def loss_fn(model: torch.nn.Module, index: torch.Tensor) -> torch.Tensor:
            batch = trial.rows.load(index.tolist()).batch
            return trial.replayed(lambda: trial.loss_fn(model, batch))

        try:
            found = mixed_examples(trial.model, loss_fn, torch.tensor(trial.every))
        except Exception as error:  # a finding stands without a place
            log.info("the place where examples meet was not found: %s: %s", type(error).__name__, error)
            return None
        return found[0] if found else None
