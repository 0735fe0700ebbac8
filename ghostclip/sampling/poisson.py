"""Poisson sampling: which examples are in a batch, how they are loaded in physical batches, what that is charged as."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from ghostclip.errors import PrivacyError
from ghostclip.events import SampledGaussian
from ghostclip.sampling.loading import check_sampling, loader_of, loaders_batch_size, say_sampler_is_replaced, size_of
from ghostclip.validate import positive_int

__all__ = ["LogicalBatch", "PoissonLoader"]


class LogicalBatch:
    """One Poisson sample of the data set, handed out in physical batches. Which examples it holds is private data.

    Attributes:
        sizes: the number of examples in each physical batch; no numbers for an empty sample.
        handed: how many physical batches were handed out so far.
    """

    def __init__(self, sizes: list[int], load: Callable[[], Any], left: Callable[[LogicalBatch], None]) -> None:
        self.sizes = sizes
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

    def _hand_out(self) -> Iterator[Any]:
        try:
            for _ in self.sizes:
                examples = self._load()
                self.handed += 1
                yield examples
        finally:
            if self.handed < len(self.sizes):
                self._left(self)


class PoissonLoader:
    """Logical batches that hold each example with probability ``batch_size / len(dataset)``, independently of the rest.

    Iterating gives one epoch: ``len()`` logical batches, empty ones among them, loaded through one torch DataLoader.

    Args:
        data: a map-style dataset, or a DataLoader, whose dataset, collate_fn, workers and pinning are kept and whose
            sequential or random sampler is replaced (a warning says so).
        batch_size: the expected size of a logical batch; None takes the loader's.
        max_physical_batch_size: the most examples loaded at once; None: the whole logical batch.
        seed: makes the sampling repeatable, and worthless for privacy; None: the operating system's entropy.
        begin: told of each logical batch that is handed out, and with None when the one before is over.
        left: told of a logical batch whose physical ones were not all taken.

    Raises:
        PrivacyError: the examples can't be drawn at random, or the loader samples in a way that is not ours to replace.
        ValueError, TypeError: an argument is out of range.
    """

    def __init__(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        max_physical_batch_size: int | None = None,
        seed: int | None = None,
        begin: Callable[[LogicalBatch | None], None] = lambda batch: None,
        left: Callable[[LogicalBatch], None] = lambda batch: None,
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
        self.batch_size = positive_int(batch_size=batch_size)
        if self.batch_size > self.dataset_size:
            raise ValueError(f"batch_size must be at most len(dataset) = {self.dataset_size}; got {batch_size!r}")
        if max_physical_batch_size is not None:
            max_physical_batch_size = positive_int(max_physical_batch_size=max_physical_batch_size)
        self.limit = max_physical_batch_size or self.dataset_size
        self.begin, self.left = begin, left
        self._seeded = None if seed is None else np.random.default_rng(seed)
        self._chunks = _Chunks()
        self._open = partial(loader_of, dataset, given, self._chunks)
        self._loader = self._open()
        self._draws: _Draws | None = None
        self._epoch = self._taken = self._skip = 0
        if given is not None:
            say_sampler_is_replaced(given, self.sample_rate)

    @property
    def sample_rate(self) -> float:
        """The probability of each example to be in a logical batch."""
        return self.batch_size / self.dataset_size

    def event(self, noise_multiplier: float) -> SampledGaussian:
        """What the release of a noisy sum over one logical batch is to be charged as."""
        return SampledGaussian(self.sample_rate, noise_multiplier)

    def __len__(self) -> int:
        """Steps in an epoch: ``max(1, round(len(dataset) / batch_size))``."""
        return max(1, round(self.dataset_size / self.batch_size))

    def __iter__(self) -> Iterator[LogicalBatch]:
        generator = np.random.default_rng() if self._seeded is None else self._seeded
        if self._draws is not None:
            self._epoch += 1
        self._taken, self._skip = self._skip, 0
        draws = _Draws(generator, self.dataset_size, self.sample_rate, self.limit, len(self) - self._taken)
        self._draws = self._chunks.draws = draws
        return _Epoch(draws, iter(self._loader), self)

    def position(self, again: bool = False) -> tuple[int, int, Mapping[str, Any] | None]:
        """Where sampling stands: epochs that are over, batches taken in this one, the state of a seeded generator.

        Args:
            again: the batch handed out last counts as not taken.
        """
        taken = self._taken - (again and self._taken > 0)
        epoch, taken = (self._epoch + 1, 0) if taken == len(self) else (self._epoch, taken)
        if self._seeded is None:
            return epoch, taken, None
        return epoch, taken, self._seeded.bit_generator.state if self._draws is None else self._draws.state(again)

    def resume(self, epoch: int, taken: int, state: Mapping[str, Any] | None) -> None:
        """Goes on from a `position`: the next loop gives what is left of its epoch. Loops before it are over."""
        self._draws, self._epoch, self._taken, self._skip = None, epoch, taken, taken
        if self._seeded is not None and state is not None:
            self._seeded.bit_generator.state = state

    def taken_from(self, draws: _Draws) -> None:
        """A batch of ``draws`` is handed out; raises PrivacyError when sampling goes on somewhere else since."""
        if self._draws is None:
            raise PrivacyError(
                "engine.restore() was called inside of a loop over engine.batches(), whose batches belong to the "
                "training before it; start a new loop"
            )
        self._taken += draws is self._draws

    def reopened(self, draws: _Draws) -> Iterator[Any]:
        """A new data loader for the samples that are still to be handed out."""
        draws.rewind()
        self._chunks.draws = draws
        self._loader = self._open()
        return iter(self._loader)


class _Draws:
    """The samples of one epoch, each drawn when the data loader or the training loop first needs to know it."""

    def __init__(self, generator: np.random.Generator, population: int, rate: float, limit: int, steps: int) -> None:
        self._generator, self._population, self._rate = generator, population, rate
        self._limit, self._steps, self._handed = limit, steps, 0
        self._to_load: deque[list[list[int]]] = deque()
        self._to_hand_out: deque[list[int]] = deque()
        # The generator's state before the sample handed out last, and before each one that is still to be.
        self._last = generator.bit_generator.state
        self._before: deque[Any] = deque()

    def _draw(self) -> bool:
        """Draws a sample: a binomial number of distinct examples, which is a coin for each; False after the last."""
        if self._handed + len(self._before) >= self._steps:
            return False
        self._before.append(self._generator.bit_generator.state)
        count = self._generator.binomial(self._population, self._rate)
        chosen = np.sort(self._generator.choice(self._population, count, replace=False, shuffle=False)).tolist()
        chunks = [chosen[start : start + self._limit] for start in range(0, count, self._limit)]
        self._to_load.append(chunks)
        self._to_hand_out.append([len(chunk) for chunk in chunks])
        return True

    def indices(self) -> Iterator[list[int]]:
        """The epoch's physical batches one after another, for the data loader, which may run ahead."""
        while self._to_load or self._draw():
            yield from self._to_load.popleft()

    def next_sizes(self) -> list[int] | None:
        """The sizes of the next logical batch's physical ones, for the training loop; None after the last."""
        if not self._to_hand_out and not self._draw():
            return None
        sizes = self._to_hand_out.popleft()
        self._last = self._before.popleft()
        self._handed += 1
        return sizes

    def state(self, again: bool) -> Mapping[str, Any]:
        """The generator's state before the next sample to hand out, or before the last one ``again``."""
        if again:
            return self._last
        return self._before[0] if self._before else self._generator.bit_generator.state

    def rewind(self) -> None:
        """Takes back what was drawn ahead; the same samples will be drawn again."""
        if self._before:
            self._generator.bit_generator.state = self._before[0]
        for ahead in (self._before, self._to_load, self._to_hand_out):
            ahead.clear()


class _Chunks:
    """The data loader's batch sampler: the physical batches of the epoch that is being started."""

    draws: _Draws

    def __iter__(self) -> Iterator[list[int]]:
        return self.draws.indices()


class _Epoch:
    """One pass over the logical batches, which keeps the data loader in step with the training loop.

    Batches refer to it and not the other way round: torch ends its workers promptly only outside of reference cycles.
    """

    def __init__(self, draws: _Draws, loaded: Iterator[Any], plan: PoissonLoader) -> None:
        self._draws, self._loaded, self._plan = draws, loaded, plan
        self._turn = 0
        self._waiting = 0
        # False while the loader is moved, and after an exception there (Ctrl-C, a dead worker): nobody knows then which
        # physical batch comes next, and one of another sample could hold an example twice.
        self._in_step = True

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> LogicalBatch:
        self._turn += 1
        self._plan.begin(None)
        self._catch_up()
        self._in_step = False
        sizes = self._draws.next_sizes()
        self._waiting = len(sizes or [])
        self._in_step = True
        if sizes is None:
            raise StopIteration
        batch = LogicalBatch(sizes, partial(self._load, self._turn), self._plan.left)
        self._plan.taken_from(self._draws)
        self._plan.begin(batch)
        return batch

    def _catch_up(self) -> None:
        """Takes what is left of a batch from the data loader, so that the next one's examples come next."""
        reopen, self._in_step = not self._in_step, False
        if reopen:
            self._loaded = iter(())
            self._loaded = self._plan.reopened(self._draws)
        else:
            for _ in range(self._waiting):
                next(self._loaded)
        self._in_step = True

    def _load(self, turn: int) -> Any:
        if turn != self._turn:
            raise PrivacyError(
                "this logical batch was left when the next one was taken; use the batches of engine.batches() one at a "
                "time, as they come (not from a list)"
            )
        self._in_step = False
        examples = next(self._loaded)
        self._waiting -= 1
        self._in_step = True
        return examples
