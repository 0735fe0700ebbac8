"""Logical batches: sampled anew each time, loaded in physical batches, and charged as what they are."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from ghostclip.errors import PrivacyError
from ghostclip.events import SampledRelease
from ghostclip.sampling.draws import Chunks, Draws, divided
from ghostclip.sampling.loading import (
    check_sampling,
    check_size,
    loader_of,
    loaders_batch_size,
    rows_digest,
    runs_code,
    say_sampler_is_replaced,
    seed_anew,
    size_of,
    warn_of_repeated_rows,
)
from ghostclip.sampling.logical import BatchOwner, BatchState, LogicalBatch, Unowned
from ghostclip.sampling.schemes import CyclicPoisson, Scheme, drawn_groups, scheme_named
from ghostclip.sampling.users import Users
from ghostclip.validate import positive_int, whole

__all__ = ["LogicalBatches"]


class LogicalBatches:
    """Random samples of a data set. `PrivacyEngine.batches` returns one.

    By default each example joins a sample independently with probability ``batch_size / len(dataset)``. One iteration
    is one epoch of ``len()`` logical batches, some of which may be empty. One torch DataLoader loads them.

    Args:
        data: a map-style dataset, or a DataLoader. A loader's dataset, collate_fn, workers and pinning are kept. Its
            sequential or random sampler is replaced, and a warning says so.
        batch_size, max_physical_batch_size, sampling, neighboring, max_batch_size, unit_ids, max_rows_per_unit: as for
            `PrivacyEngine`; with "cyclic_poisson" step t samples group t mod ``bands`` at ``bands`` times the rate.
        bands: the number of groups, with "cyclic_poisson" only; one is Poisson sampling.
        seed: makes the sampling repeatable, which voids privacy; None: the operating system's entropy.
        generator: makes the random generator of an epoch, without a ``seed``.
        share: (rank, size) of processes that draw the same samples; each loads every size-th unit of them.

    Attributes:
        batch_size, sample_rate: the expected number, and share, of the examples (or users) in a logical batch.
        sampling: as given.
        scheme: the way in which a batch is drawn.
        scheme_of: the same for another expected size.
        groups: the group of each example (or user), int32, where they take turns; it stays the same, else None.
        limit: the most examples (or rows of users) in a physical batch; None: no limit.
        owner: the object that takes the steps; it is called with each batch.
        loop: finds the loop that was given the last batch; None once it is gone.
        check_size: raises PrivacyError where the data set's length has changed.
        rows_digest: of the rows that a `Subset` picks.
        reseeds: whether random numbers are seeded anew after each physical batch, since the user's code that loads it
            in this process may have seeded what the forward draws.

    Raises:
        PrivacyError: the data set has no random access, or the loader has a sampler that can't be replaced.
        ValueError, TypeError: an argument is out of range.
    """

    def __init__(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        max_physical_batch_size: int | None = None,
        sampling: str = "poisson",
        neighboring: str = "add_or_remove_one",
        max_batch_size: int | None = None,
        bands: int = 1,
        unit_ids: Iterable[Hashable] | None = None,
        max_rows_per_unit: int | None = None,
        seed: int | None = None,
        generator: Callable[[], Any] = np.random.default_rng,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        given = data if isinstance(data, DataLoader) else None
        dataset = data if given is None else given.dataset
        self.dataset_size = size_of(dataset)
        if given is not None:
            batch_size = loaders_batch_size(given) if batch_size is None else batch_size
            check_sampling(given)
        if batch_size is None:
            raise ValueError(
                "batch_size must be given with a dataset: the expected number of examples in a logical batch"
            )
        if max_physical_batch_size is not None:
            max_physical_batch_size = positive_int(max_physical_batch_size=max_physical_batch_size)
        self.limit = max_physical_batch_size
        self._users = None
        if unit_ids is not None:
            self._users = Users(unit_ids, self.dataset_size, max_rows_per_unit, self.limit)
        elif max_rows_per_unit is not None:
            raise ValueError(f"max_rows_per_unit must be left out without unit_ids; got {max_rows_per_unit!r}")
        self._share = share
        # A function of its own: a method would put the samples into a reference cycle.
        self._divide = partial(divided, self._users, self.limit, share)
        self._seeded = None if seed is None else np.random.default_rng(whole(seed=seed))
        self._generator, self._bands, self.sampling = generator, positive_int(bands=bands), sampling
        self.groups: np.ndarray | None = None
        self.scheme_of = partial(self._scheme, sampling, neighboring, max_batch_size)
        self.scheme = self.scheme_of(batch_size)
        self.batch_size, self.sample_rate = self.scheme.batch_size, self.scheme.sample_rate
        self._largest = self.scheme.largest
        self.owner: BatchOwner = Unowned()
        self._chunks = Chunks()
        self._open = partial(loader_of, dataset, given, self._chunks)
        self._loader = self._open()
        self.check_size = partial(check_size, dataset, self.dataset_size)
        self.rows_digest = partial(rows_digest, dataset)
        self._scheme_at: Callable[[int], Scheme] = lambda _: self.scheme
        self._step_number: Callable[[], int] = lambda: self._epoch * len(self) + self._taken
        self._draws: Draws | None = None
        self.loop: Callable[[], _Loop | None] = lambda: None
        self._process = os.getpid()
        self._epoch, self._taken, self._staged, self._protected, self.reseeds = 0, 0, False, False, False
        if given is not None:
            say_sampler_is_replaced(given, self.scheme.words)
        if self._users is None:
            warn_of_repeated_rows(dataset)

    def _scheme(self, sampling: str, neighboring: str, max_batch_size: int | None, batch_size: int) -> Scheme:
        """The scheme for arguments that go together."""
        units, named = (self.dataset_size, "len(dataset)") if self._users is None else (len(self._users), "users")
        if positive_int(batch_size=batch_size) > units:
            raise ValueError(f"batch_size must be at most {named} = {units}; got {batch_size!r}")
        scheme = scheme_named(
            sampling,
            units,
            positive_int(batch_size=batch_size),
            neighboring=neighboring,
            unit="example" if self._users is None else "user",
            max_batch_size=self.limit if sampling == "truncated" and max_batch_size is None else max_batch_size,
            bands=self._bands,
        )
        if not isinstance(scheme, CyclicPoisson):
            return scheme
        if self.groups is None:
            self.groups = drawn_groups(scheme, self._generator() if self._seeded is None else self._seeded)
        return replace(scheme, groups=self.groups)

    def separate(self, bands: int) -> None:
        """From now on there are so many groups, drawn anew; with ``sampling="cyclic_poisson"``, before the first loop.

        Raises:
            ValueError: the sampling rate within a group would be above 1.
        """
        self._bands, self.groups = bands, None
        self.scheme = self.scheme_of(self.batch_size)

    @property
    def units(self) -> int:
        """How many examples, or users, the data have."""
        return self.scheme.population

    @property
    def units_digest(self) -> str:
        """Tells data sets whose rows belong to other users apart; "" where rows are units of their own."""
        return "" if self._users is None else self._users.digest

    @property
    def largest(self) -> int:
        """About the most units in a logical batch, or in this rank's share of one."""
        return -(-self._largest // self._share[1])

    @property
    def largest_physical(self) -> int:
        """About the most units in a physical batch."""
        return self.largest if self.limit is None else min(self.limit, self.largest)

    def follow(
        self, scheme_at: Callable[[int], Scheme], largest: int, step_number: Callable[[], int], *, staged: bool
    ) -> None:
        """From the next loop on batches are drawn by a schedule.

        Args:
            scheme_at: from a step's number to how its batch is drawn; the same object for all steps of a stage.
            largest: about the most units in a batch.
            step_number: of the next step, asked when a loop begins, and before each batch where they have turns.
            staged: whether there are several stages.
        """
        self._scheme_at, self._largest, self._step_number, self._staged = scheme_at, largest, step_number, staged

    def protect(self, private: bool) -> None:
        """Has each loop begin with random numbers that nobody can repeat: dropout's, a data loader's workers'."""
        if private:
            self._protected, self._open = True, partial(self._open, generator=None)
            self._loader = self._open()
            self.reseeds = runs_code(self._loader)

    def event(self, noise_multiplier: float) -> SampledRelease:
        """What the release of a noisy sum over one logical batch is to be charged as."""
        return self.scheme.event(noise_multiplier)

    def __len__(self) -> int:
        """Steps in an epoch: ``max(1, round(len(dataset) / batch_size))``, of users where they are the units."""
        return max(1, round(self.scheme.population / self.batch_size))

    def limit_physical(self, most: int) -> None:
        """From the next loop on physical batches have at most so many examples; not where users are the units."""
        self.limit = most
        self._divide = partial(divided, None, most, self._share)

    def discard(self) -> None:
        """`LogicalBatch.discard` of the batch handed out last, where it had no step and is out of reach."""
        self.owner.discard(None)

    def __iter__(self) -> Iterator[LogicalBatch]:
        if self._protected:
            seed_anew()
        generator = self._generator() if self._seeded is None else self._seeded
        if self._draws is not None:
            self._epoch, self._taken = self._epoch + 1, 0
        steps = len(self) - self._taken
        draws = Draws(generator, self._scheme_at, self._divide, steps, self._share[1] > 1, self._step_number())
        if self._loader.persistent_workers and self._draws is not None and not self._draws.over:
            # These workers have one iterator for all loops, and an older loop that isn't over may still read from it.
            self._loader = self._open()
        self._draws, self._process = draws, os.getpid()
        self._chunks.draws = draws
        before = torch.get_rng_state()
        loaded = iter(self._loader)  # takes a number for new workers, and none for those that persist
        torch.set_rng_state(before)
        if not self._taken:  # every epoch takes one, at its start
            torch.empty((), dtype=torch.int64, device="cpu").random_()
        return _Loop(_Epoch(draws, loaded, self), self)

    def in_turn(self, draws: Draws) -> bool:
        """Whether the next batch of ``draws`` is of the group, or the stage of a schedule, whose turn it is.

        A batch that wasn't charged had no turn.
        """
        if self.groups is None and not self._staged:
            return True
        step = self._step_number()
        alike = self.groups is None and self._scheme_at(draws.next_step) is self._scheme_at(step)
        return alike or draws.next_step == step

    def position(self, again: bool = False) -> tuple[int, int, Mapping[str, Any] | None]:
        """Where sampling stands: epochs that are over, batches taken in this one, the state of a seeded generator.

        With ``again`` the batch handed out last counts as not taken.
        """
        taken = self._taken - (again and self._taken > 0)
        epoch, taken = (self._epoch + 1, 0) if taken == len(self) else (self._epoch, taken)
        if self._seeded is None:
            return epoch, taken, None
        return epoch, taken, self._seeded.bit_generator.state if self._draws is None else self._draws.state(again)

    def resume(self, epoch: int, taken: int, state: Mapping[str, Any] | None) -> None:
        """Goes on from a `position`: the next loop gives what is left of its epoch. Loops before it are over."""
        self._draws, self._epoch, self._taken = None, epoch, taken
        if self._seeded is not None and state is not None:
            self._seeded.bit_generator.state = state

    def taken_from(self, draws: Draws) -> None:
        """A batch of ``draws`` is handed out; raises PrivacyError when sampling goes on somewhere else since."""
        if self._draws is None:
            raise PrivacyError(
                "engine.restore() was called inside of a loop over engine.batches(), whose batches belong to the "
                "training before it; start a new loop"
            )
        if self._seeded is None and self._process != os.getpid():
            raise PrivacyError(
                "this loop over engine.batches() was begun by the process that this one was forked from, and both "
                "would train on the same samples, which the accounting takes for independent; start a new loop here"
            )
        self._taken += draws is self._draws

    @property
    def source(self) -> tuple[Any, Callable[[Any], Any]]:
        """The data set, and the function that makes batches of its examples."""
        collate: Any = self._loader.collate_fn
        return self._loader.dataset, collate

    def reopened(self, draws: Draws) -> Iterator[Any]:
        """A new data loader for the samples that are still to be handed out."""
        draws.rewind(draws.next_step if self.in_turn(draws) else self._step_number())
        self._chunks.draws = draws
        self._loader = self._open()
        return iter(self._loader)


class _Loop:
    """What a loop over the batches holds, and no batch: it is gone once an exception, or a break, has left the loop."""

    def __init__(self, epoch: _Epoch, plan: LogicalBatches) -> None:
        self._epoch, self._plan = epoch, plan

    def __iter__(self) -> _Loop:
        return self

    def __next__(self) -> LogicalBatch:
        batch = self._epoch.next_batch(self._plan.loop() is not None)
        self._plan.loop = weakref.ref(self)
        return batch


class _Epoch:
    """One pass over the logical batches, which keeps the data loader in step with the training loop.

    Batches refer to it and not the other way round: torch ends its workers promptly only outside of reference cycles.
    """

    def __init__(self, draws: Draws, loaded: Iterator[Any], plan: LogicalBatches) -> None:
        self._draws, self._loaded, self._plan = draws, loaded, plan
        self._turn = 0
        self._waiting = 0
        # False while the loader is moved, and after an exception there (Ctrl-C, a dead worker): nobody knows then which
        # physical batch comes next, and one of another sample could hold an example twice.
        self._in_step = True

    def next_batch(self, in_loop: bool) -> LogicalBatch:
        """Draws the next one, or StopIteration; ``in_loop``: whether the loop of the batch before is still there."""
        # Where one of these refuses, the batch before is as it was and may still have its step.
        self._plan.check_size()
        self._plan.owner.ready(left=self._turn == 0 and not in_loop)
        self._turn += 1
        self._plan.owner.begin(None)
        self._catch_up()
        self._in_step = False
        physical = self._draws.next_batch()
        self._waiting = len(physical or [])
        self._in_step = True
        if physical is None:
            raise StopIteration
        draws, plan = self._draws, self._plan
        batch = LogicalBatch(
            physical, partial(self._load, self._turn), plan.owner, draws.digest, draws.next_step - 1, plan.source
        )
        self._plan.taken_from(self._draws)
        try:
            self._plan.owner.begin(batch)
            return batch
        except BaseException:
            batch.state = BatchState.FAILED
            raise

    def _catch_up(self) -> None:
        """Takes what is left of a batch from the data loader, so that the next one's examples come next."""
        reopen, self._in_step = not self._in_step or not self._plan.in_turn(self._draws), False
        if reopen:
            self._loaded = iter(())
            self._loaded = self._plan.reopened(self._draws)
        else:
            for _ in range(self._waiting):
                self._next()
        self._in_step = True

    def _load(self, turn: int) -> Any:
        if turn != self._turn:
            raise PrivacyError(
                "this logical batch was left when the next one was taken; use the batches of engine.batches() one at a "
                "time, as they come (not from a list)"
            )
        self._in_step = False
        examples = self._next()
        if self._plan.reseeds:
            seed_anew()
        self._waiting -= 1
        self._in_step = True
        return examples

    def _next(self) -> Any:
        """The data loader's next physical batch; raises PrivacyError where it fails because examples are gone."""
        try:
            return next(self._loaded)
        except LookupError:
            self._plan.check_size()
            raise
