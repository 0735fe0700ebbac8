"""Whether losses, or what a model keeps, depend on the other examples of a batch: rows are tried in other company.

The graph shows where examples meet in what is differentiated. Two things don't show there: what the loss function
computes without gradients (a weight over the batch's sum), and what the collate function computes (the longest length).
They show in losses, or in the norms of their gradients, when the batch is another one.

Example: four texts have lengths 5, 9, 3 and 7, padded to 9. Loaded again as halves, 3 and 5 are padded to 5, 7 and 9
to 9. If a loss sees the padding, those of the first half change. The losses of both halves together must be those of
all four, as a multiset, since a collate function may sort its rows; with users, whose rows are found by their places,
each in its place. A statistic that both halves share with the whole shows where 3 and 5 stay, and 7 and 9 are replaced
by copies of one of them.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

from ghostclip.clipper.cutting import sizes_of, tensors_of
from ghostclip.self_check.loading import ReadRows
from ghostclip.self_check.mixing_place import mixing_place
from ghostclip.self_check.trial_losses import TrialLosses, attempted, same, unlike
from ghostclip.wrap import Finding

__all__ = ["MixingTest"]

# How often a test is repeated, in random order with runs of the unchanged batch: it rules out losses that change from
# call to call. Only a loss that is about to be refused is called so often.
TOSSES = 40
# How many random parts, of half of its units, are tried of a batch whose collate function draws random numbers, besides
# the two parts that are tried of any batch.
MORE_PARTS = 6
# Random choices of rows for which the same random numbers must be drawn.
CHOICES = 16

REMEDY_OF_KEPT = "don't update it in training (put its module into eval mode, or take the update out)"
OF_COMPANY = Finding(
    "",
    "losses change when their examples are loaded in another batch",
    "most often they see padding: mask it, and divide by each text's own count of tokens; else compute what the "
    "collate function or the loss takes from the batch (a mean, a count, its size) for each example alone",
)
OF_OTHERS = Finding(
    "",
    "losses stay as they are when other examples take the places of theirs: the loss function doesn't use its batch",
    "compute them from the batch that it is called with",
)
OF_READING = Finding(
    "",
    "the data set gives another example for a row when it reads other rows with it (in __getitems__, or a transform)",
    "let it compute nothing over several rows (a mean, a permutation, MixUp)",
)
OF_ORDER = "keep each user's rows in the collate function's order (enforce_sorted=False in pack_padded_sequence)"
UNTESTED = "draws random numbers, so it isn't tested whether losses see the padding, or how many rows there are"

log = logging.getLogger("ghostclip")

Test = Callable[[TrialLosses], bool]


class MixingTest:
    """Tries the rows of a batch, of at least two units, in other company, chosen by no random numbers of the user's.

    ``say`` is told why something can't be tested.

    Attributes:
        compared: whether `mixed` could compare losses of the rows in other company, or norms of their gradients. Not
            where all are alike, as in a batch of zeros, or where the same rows have other losses each time.
    """

    def __init__(self, trial: TrialLosses, say: Callable[[str], None]) -> None:
        self._trial, self._say, self._dice = trial, say, random.Random()
        # Which unit stands in other places: the same each time that a test is repeated.
        self._pick, self.compared = self._dice.getrandbits(32), False
        rows, lengths = trial.rows, trial.first.loaded.lengths
        # From short to long, so that a half has no long ones; at random if alike.
        order = self._dice.sample(range(rows.units), rows.units)
        if lengths:
            order.sort(key=lambda unit: max(lengths[place] for place in rows.places([unit])))
        half = rows.units // 2
        self._halves = [rows.places(sorted(units)) for units in (order[:half], order[half:])]

    def kept(self) -> Finding | None:
        """What keeps something of the examples, and passes it on without noise."""
        if (keeper := self._keeper()) is None:
            return None
        kind, name = keeper
        problem = f"the forward keeps something of the examples in the {kind} {name!r}, which gets no noise"
        return Finding(name.rpartition(".")[0], problem, REMEDY_OF_KEPT)

    def _keeper(self) -> tuple[str, str] | None:
        """Kind and name of it.

        A frozen parameter must not be written at all. A buffer must not have other values after other examples: it is
        saved and published with the model. An attribute is kept for nobody if it changes no later loss.
        """
        trial, first = self._trial, self._trial.untouched
        kinds = {kind for kind, _ in trial.changed}
        if "frozen parameter" in kinds:
            return trial.changed[0]  # they come first
        if not kinds or (others := self._swapped(self._halves[0])) is None:
            return None
        if "buffer" in kinds:
            again, swapped = (trial.run(rows, quiet=False) for rows in (trial.every, others))
            if not unlike(first.left, again.left, "buffer") and swapped.states[1] == first.states[1]:
                for name in (*unlike(first.left, swapped.left, "buffer"), *self._counting()):
                    return "buffer", name
        return None if kinds == {"buffer"} else self._remembered(others)

    def _counting(self) -> list[str]:
        """Buffers with other values after fewer of the same rows: they count examples, of which nobody may know."""
        trial = self._trial
        if trial.draws:
            return []
        with attempted("buffers are not compared after fewer rows"):  # loss functions need not take every size
            found = unlike(trial.first.left, trial.run(self._halves[0]).left, "buffer")
            return [name for name in found if name in trial.model.state_dict()]  # others are published by nobody
        return []

    def _remembered(self, others: Sequence[int]) -> tuple[str, str] | None:
        """The attribute by which losses of the same rows follow the rows of the batch before."""
        trial = self._trial
        once, again, after = (trial.run(rows, trial.every) for rows in (trial.every, trial.every, others))
        if trial.differ(once.losses, again.losses) or unlike(once.left, again.left, "attribute"):
            return None
        names = unlike(once.left, after.left, "attribute")
        if trial.differ(once.losses, after.losses):
            # A list or the like is named before a number, which may be a count.
            kinds = "attribute", "container", "object"
            names += [name for kind in kinds for own, name in trial.changed if own == kind]
            return "attribute", names[0]
        if names:
            self._say(
                f"the attribute {names[0]!r} keeps something of the examples, which no loss depends on so far: it is "
                "private (a metric, for instance), so don't publish it, or keep it outside of the model"
            )
        return None

    def read(self) -> Finding | None:
        """Whether a data set that draws random numbers for several rows at once makes an example of other rows, too.

        Losses can't tell, since rows of such a data set are read one by one for them. Half of the rows, at random, are
        replaced by one of the others, which must stay where as many random numbers are drawn. Where another number is
        drawn for other rows, these move the random numbers of all after them, and nothing can be told. Padded rows
        aren't compared.
        """
        rows, every = self._trial.rows, self._trial.every
        with attempted("rows of the data set are not compared"):  # it need not give a row twice
            if not rows.reads_several or not (whole := rows.read_together(every)).needs_single_reads:
                return None
            kept = self._dice.sample(every, max(1, len(every) // 2))
            read, again = rows.read_together(self._replaced(kept)), rows.read_together(every)
            if _changed(whole, again, every) or not _changed(whole, read, kept) or read.states != whole.states:
                return None
            if self._draws_alike(kept, lambda index: rows.read_together(index).states, whole.states):
                return OF_READING
        return None

    def _replaced(self, kept: Sequence[int]) -> list[int]:
        """All places, those that aren't ``kept`` by random ones of these."""
        stay = set(kept)
        return [row if row in stay else self._dice.choice(kept) for row in self._trial.every]

    def mixed(self) -> Finding | None:
        """How losses depend on other examples."""
        trial = self._trial
        try:
            test = self._what_moves()
        except Exception as error:  # a loss function need not take copies of a row
            self._say(f"losses can't be compared where rows are exchanged ({type(error).__name__}: {error})")
            self.compared = False
            return None
        if test is None:
            return None
        trial.allow_rounding()
        if not self._repeats(test) or self._is_rounding(test):
            return None
        company = OF_COMPANY
        if trial.rows.each > 1:
            company = replace(OF_COMPANY, remedy=f"{OF_COMPANY.remedy}; {OF_ORDER}")
        return company if self._batch_moves() else self.place() or company

    def ignored(self) -> Finding | None:
        """Whether losses that differ from row to row stay when copies of one row replace all others."""
        trial, first = self._trial, self._trial.first.losses
        if self.compared or first.dim() != 1 or not len(first):
            return None
        index = self._replaced(self._halves[0][:1])
        other = first[index] if len(first) == len(index) else first[:1].expand_as(first)
        with attempted("losses of copies of a row can't be had"):
            found = trial.run(index, norms=trial.draws)
            stay = trial.differ(first, other) and not trial.differ(first, found.losses)
            if stay and trial.draws:  # losses of a head of zeros follow random numbers alone, their gradients don't
                stay = False
                if trial.first.norms is not None and found.norms is not None:
                    stay = bool(torch.isclose(trial.first.norms, found.norms, rtol=1e-5, atol=0).all())
            return OF_OTHERS if stay else None
        return None

    def _batch_moves(self) -> bool:
        """Whether the collate function gives rows of a half other sizes or values than in the whole batch.

        It pads or sorts them, for instance. The first layer gives them another output then, and would be blamed.
        """
        rows, first = self._trial.rows, self._trial.first.loaded
        whole, halves = rows.load(self._trial.every).batch, [rows.load(part).batch for part in self._halves]
        parts = list(zip(halves, self._halves, strict=True))
        if any(sizes_of(half, len(part)) != sizes_of(whole, len(rows)) for half, part in parts):
            return True
        if first.drew:
            return False
        known = _by_row(whole, len(rows))
        return any(
            name in known and not same(known[name][part], tensor)
            for half, part in parts
            for name, tensor in _by_row(half, len(part)).items()
        )

    def _what_moves(self) -> Test | None:
        """The first test that finds something; None where none does."""
        trial, parts = self._trial, self._halves
        if not trial.draws:
            try:
                if self._halves_move(trial):
                    return self._halves_move
                parts = parts[:1]
            except Exception as error:  # a loss function need not take batches of every size
                self._say(f"losses of a smaller batch can't be compared ({type(error).__name__}: {error})")
        elif trial.first.loaded.drew:
            self._say(f"the collate function, or the data set for several rows at once, {UNTESTED}")
        else:  # as augmentation in the loss function does, mostly of rows that have one size
            log.info("self-check: the loss function, or a model in eval mode, %s", UNTESTED)
        if trial.first.loaded.drew:
            # A row that comes twice, in the place of another one, is seen where one of them is in a part, and one not.
            units = range(trial.rows.units)
            parts = [*parts, *(trial.rows.places(self._dice.sample(units, len(units) // 2)) for _ in range(MORE_PARTS))]
        for part in parts:
            test = partial(self._copies_move, part=part)
            if test(trial):
                if self._draws_alike(part, lambda index: trial.seen(index)[1], trial.seen(trial.every)[1]):
                    return test
                self._say("other random numbers are drawn for other data")
                self.compared = False
        return None

    def _halves_move(self, trial: TrialLosses) -> bool:
        """Whether losses of the halves, or norms of their gradients, differ from the whole's.

        With users also those of the users in reverse order: a collate function that sorts its rows gives these the same
        order in which it gave the others.
        """
        rows, first = trial.rows, trial.first
        parts = [*self._halves, *([rows.places(reversed(range(rows.units)))] if rows.each > 1 else [])]
        outcomes = [trial.run(part, norms=True) for part in parts]
        if [tuple(each.losses.shape) for each in outcomes] != [(len(part),) for part in parts]:
            self._say("the loss function doesn't give one loss for each row of a smaller batch")
            return False
        places, in_order = [place for part in parts for place in part], rows.each > 1
        losses = torch.cat([each.losses for each in outcomes])
        self.compared |= trial.differ(losses, losses[:1].expand_as(losses))
        if trial.differ(*_comparable(first.losses[places], losses, in_order)):
            return True
        # Gradients may follow the batch where losses don't.
        norms = [each.norms for each in outcomes if each.norms is not None]
        if first.norms is None or sum(map(len, norms)) < len(places):
            return False
        self.compared |= trial.norms_differ(first.norms, first.norms[:1].expand_as(first.norms))
        return trial.norms_differ(*_comparable(first.norms[places], torch.cat(norms), in_order))

    def _copies_move(self, trial: TrialLosses, part: Sequence[int]) -> bool:
        """Whether losses of ``part`` change when copies of one of its rows replace all others: 1 2 3 4 becomes 1 2 1 1.

        They differ by the rows, not by the random numbers, of which as many must be drawn. Where a collate function may
        put rows elsewhere (it sorts, or draws an order), not those of users, the losses of rows that stay must be among
        those of the others, and none may be a new one. A function that repeats rows in the place of others has fewer.
        """
        if (index := self._swapped(part)) is None:
            return False
        found, first, places = trial.run(index), trial.first, list(part)
        if found.losses.shape != first.losses.shape or found.states != first.states:
            return False
        self.compared |= trial.differ(first.losses, found.losses)
        moved = trial.differ(first.losses[places], found.losses[places])
        if trial.rows.each > 1 or (trial.draws and not first.loaded.drew):
            return moved
        before, after = (each.losses[each.losses.isfinite()] for each in (first, found))
        if trial.common(before, after) < len(places) - (len(index) - len(before)):
            return True
        distances = (after.unsqueeze(1) - first.losses).abs().nan_to_num(nan=torch.inf)
        return moved and bool(len(after)) and trial.differ(after, first.losses[distances.argmin(1)])

    def _swapped(self, part: Sequence[int]) -> list[int] | None:
        """An index by which the units of ``part`` stay, and one of them stands in all other places; None: none can.

        With users it is one's rows, side by side: losses of a user may depend on all of them.
        """
        losses, each = self._trial.first.losses, self._trial.rows.each
        units = [part[place : place + each] for place in range(0, len(part), each)]
        fine = [rows for rows in units if bool(losses[list(rows)].isfinite().all())]
        if not fine:
            return None
        index = list(fine[self._pick % len(fine)]) * (len(losses) // each)
        for row in part:
            index[row] = row
        return index

    def _draws_alike(self, kept: Sequence[int], drawn_for: Callable[[Sequence[int]], Any], expected: Any) -> bool:
        """Whether the same random numbers are drawn whichever of the rows ``kept`` stand in the other places."""
        return all(drawn_for(self._replaced(kept)) == expected for _ in range(CHOICES))

    def _repeats(self, test: Test) -> bool:
        """Whether a test finds something each time, and runs of the unchanged batch, in random order, never do.

        A function that goes by a count of its calls passes with a probability of 2 ** -TOSSES at most.
        """
        trial = self._trial
        for toss in range(1 + TOSSES):
            if toss and self._dice.random() < 0.5:
                if trial.differ(trial.run(trial.every).losses, trial.first.losses):
                    self._say(
                        "the same rows have other losses when they are tried again, so that losses aren't compared: if "
                        "a loss depends on other examples, or keeps anything of earlier batches, epsilon doesn't hold; "
                        "let random numbers be torch's, Python's or numpy's own, without a generator of yours"
                    )
                    self.compared = False
                    return False
            elif not test(trial):
                return False
        return True

    def _is_rounding(self, test: Test) -> bool:
        """Whether a test finds nothing in float64: float32 lost digits, where large sums cancel."""
        with attempted("losses are not compared in float64"):
            trial = self._trial.widened()
            return trial is not None and not test(trial)
        return False

    def place(self) -> Finding | None:
        """The first operation in which the rows meet when one of them is exchanged for its neighbour."""
        trial = self._trial
        with attempted("the place where examples meet was not found"):  # the finding stands without it
            return mixing_place(trial.model, lambda index: trial.run(index).losses, len(trial.every))
        return None


def _by_row(batch: Any, rows: int) -> dict[str, Tensor]:
    """The tensors of a batch with a row for each example, by name; not those of lists with an entry for each."""
    found = ((name, each) for name, each in tensors_of(batch, rows) if "*" not in name and not each.is_nested)
    return {name: each for name, each in found if each.layout == torch.strided and each.shape[:1] == (rows,)}


def _tensors_in(example: Any) -> dict[tuple[str, torch.Size], Tensor]:
    """{(name, shape): tensor} of an example's tensors, arrays, images, texts and numbers."""
    leaves = [(str(path), leaf) for path, leaf in tree_flatten_with_path(example)[0]]
    leaves += [(path + name, each) for path, leaf in leaves for name, each in tensors_of(leaf, 0)]
    found = ((name, _as_tensor(leaf)) for name, leaf in leaves)
    return {(name, each.shape): each for name, each in found if each is not None}


def _as_tensor(leaf: Any) -> Tensor | None:
    """A tensor that is another one where the leaf is; None for objects that can't be compared."""
    if not isinstance(leaf, Tensor | int | float | str | bytes) and hasattr(leaf, "__array_interface__"):
        leaf = np.asarray(leaf)  # an image
        leaf = tuple(leaf.flat) if leaf.dtype.kind not in "biufc" else leaf
    if isinstance(leaf, str | bytes | tuple):
        leaf = hash(leaf)
    return torch.as_tensor(leaf) if isinstance(leaf, Tensor | np.ndarray | int | float) else None


def _changed(these: ReadRows, those: ReadRows, places: Iterable[int]) -> bool:
    """Whether a tensor of an example in one of these places is another one, of the same shape."""
    both = ((_tensors_in(these.examples[place]), _tensors_in(those.examples[place])) for place in places)
    pairs = ((one[key], other[key]) for one, other in both for key in one.keys() & other)
    return not all(same(*pair) for pair in pairs)


def _comparable(before: Tensor, after: Tensor, in_order: bool) -> tuple[Tensor, Tensor]:
    return (before, after) if in_order else (before.sort().values, after.sort().values)
