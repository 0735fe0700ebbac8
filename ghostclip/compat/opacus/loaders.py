"""Opacus's data loader: logical batches as collated, an empty one without rows; and BatchMemoryManager."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NoReturn

from torch.utils.data import DataLoader

from ghostclip.compat.opacus.core import CoreEngine
from ghostclip.compat.opacus.empty_batch import empty_batch
from ghostclip.compat.opacus.optimizer import MADE, DPOptimizer
from ghostclip.errors import PrivacyError
from ghostclip.sampling import LogicalBatch
from ghostclip.validate import positive_int

__all__ = ["BatchMemoryManager", "DPDataLoader"]

# What programs read of a DataLoader, and is as it was given.
OF_THE_GIVEN = (
    "batch_size",
    "drop_last",
    "num_workers",
    "persistent_workers",
    "pin_memory",
    "prefetch_factor",
    "timeout",
)
OF_OPACUS = """data_loader draws its batches itself, so it has no {0}; to split them, import BatchMemoryManager from \
ghostclip.compat.opacus in place of opacus.utils.batch_memory_manager"""


class DPDataLoader:
    """The data loader that ``make_private`` returns: each iteration over it is one epoch of random batches.

    A batch is what ``collate_fn`` returns. An empty batch has the same structure without rows (see `empty_batch`).
    Every batch, even an empty one, needs its ``loss.backward()`` and ``optimizer.step()``, or `discard`. The next batch
    raises PrivacyError otherwise.

    Args:
        engine: draws the batches.
        given: the user's loader, whose dataset and ``collate_fn`` are kept.
        one_row: whether a batch of one row of ones takes the place of an empty one; its gradients are dropped.
        limit: the most examples in a physical batch; None: all of a logical batch.

    Attributes:
        given: the user's loader.
        dataset: as given.
        collate_fn: as given.
        sample_rate: the probability with which each example joins a logical batch.
    """

    def __init__(self, engine: CoreEngine, given: DataLoader[Any], one_row: bool, limit: int | None = None) -> None:
        self.dataset, self.collate_fn = given.dataset, given.collate_fn
        self.sample_rate = engine.sample_rate
        self._engine, self.given, self._one_row, self._limit = engine, given, one_row, limit
        self._examples = len(given.dataset)  # type: ignore[arg-type]

    @classmethod
    def from_data_loader(cls, *_: Any, **__: Any) -> NoReturn:
        """Raises TypeError: such a loader belongs to an engine."""
        raise TypeError(f"DPDataLoader has no from_data_loader; use {MADE}")

    def __len__(self) -> int:
        """The number of batches in an epoch; with a limit, the expected number of physical batches."""
        steps = len(self._engine.batches())
        return steps if self._limit is None else math.ceil(steps * self.sample_rate * self._examples / self._limit)

    def __iter__(self) -> Iterator[Any]:
        """The batches of an epoch.

        Raises:
            PrivacyError: the batch before had no step, or trained parameters changed outside of steps.
            TypeError: a batch is empty, and holds something of which `empty_batch` can't make an empty one.
        """
        batches = self._engine.batches()
        batches.limit_physical(self._limit or self._examples)
        for batch in batches:
            empty = [] if batch.sizes else [empty_batch(self.dataset, self.collate_fn, self._one_row)]
            for examples in empty or batch.physical():
                yield examples
                if self._engine.batch is not batch:
                    break  # it had its step, or was discarded
                self._check_gathered(batch)

    def __getattr__(self, name: str) -> Any:
        if name in OF_THE_GIVEN and "given" in vars(self):
            return getattr(self.given, name)
        if name in ("batch_sampler", "sampler"):
            raise AttributeError(OF_OPACUS.format(name))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def limited(self, most: int) -> DPDataLoader:
        """The same loader with physical batches of at most ``most`` examples."""
        return DPDataLoader(self._engine, self.given, self._one_row, most)

    def discard(self) -> None:
        """Leaves the last batch out on purpose. Nothing of it is released, and its step is charged.

        The charge is needed because the choice of a batch may depend on the data. It does nothing if the batch had its
        step.
        """
        self._engine.batches().discard()

    def _check_gathered(self, batch: LogicalBatch) -> None:
        """Raises PrivacyError where the batch, or part of one, that was handed out last had no step."""
        if batch.handed == len(batch.sizes) or self._engine.gathered < batch.handed:
            raise PrivacyError(
                "the batch before this one had no loss.backward() with optimizer.step(), so it was neither charged nor "
                "released; leave neither out, or call data_loader.discard(), which charges the batch, before the next. "
                "To accumulate gradients, give the DataLoader the whole batch_size, and use BatchMemoryManager. To "
                "evaluate, loop over the DataLoader that was given"
            )


class BatchMemoryManager:
    """Splits logical batches into physical batches that fit in memory: ``with BatchMemoryManager(...) as loader:``.

    Each physical batch needs its forward, ``loss.backward()`` and ``optimizer.step()``. Only the last step of a logical
    batch adds noise, updates the parameters and is charged.

    Args:
        data_loader, optimizer: as returned by ``make_private``.
        max_physical_batch_size: the most examples in a physical batch, >= 1.

    Raises:
        TypeError: ``data_loader`` or ``optimizer`` didn't come from ``make_private``.
        ValueError: ``max_physical_batch_size`` is less than 1.
    """

    def __init__(self, *, data_loader: DPDataLoader, max_physical_batch_size: int, optimizer: DPOptimizer) -> None:
        if not isinstance(data_loader, DPDataLoader) or not isinstance(optimizer, DPOptimizer):
            raise TypeError("data_loader and optimizer must be those that make_private() returned")
        self._loader = data_loader.limited(positive_int(max_physical_batch_size=max_physical_batch_size))

    def __enter__(self) -> DPDataLoader:
        return self._loader

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is left to be undone."""
