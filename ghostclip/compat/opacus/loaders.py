"""Opacus's data loader: logical batches as tensors, an empty one as tensors without rows; and BatchMemoryManager."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from ghostclip.compat.opacus.core import CoreEngine
from ghostclip.compat.opacus.optimizer import DPOptimizer
from ghostclip.errors import PrivacyError
from ghostclip.sampling import LogicalBatch
from ghostclip.validate import positive_int

__all__ = ["BatchMemoryManager", "DPDataLoader"]


class DPDataLoader:
    """One epoch of batches each time it is iterated; each needs its ``loss.backward()`` and ``optimizer.step()``.

    Args:
        engine: which draws them.
        given: the loader whose dataset and ``collate_fn`` they have.
        batch_dim: the dimension of the tensors that holds examples.
        limit: the most examples at once; None: all of a logical batch.

    Attributes:
        dataset: as given.
        sample_rate: the expected share of the data in a logical batch.
    """

    def __init__(self, engine: CoreEngine, given: DataLoader[Any], batch_dim: int, limit: int | None = None) -> None:
        self.dataset, self.collate_fn = given.dataset, given.collate_fn
        self.sample_rate = engine.sample_rate
        self._engine, self._given, self._batch_dim, self._limit = engine, given, batch_dim, limit
        self._examples = len(given.dataset)  # type: ignore[arg-type]

    def __len__(self) -> int:
        """Batches in an epoch; with a limit, about how many parts of them."""
        steps = len(self._engine.batches())
        return steps if self._limit is None else math.ceil(steps * self.sample_rate * self._examples / self._limit)

    def __iter__(self) -> Iterator[Any]:
        """Batches as ``collate_fn`` makes them.

        Raises:
            PrivacyError: the batch before had no step; or trained parameters moved outside of charged steps.
        """
        batches = self._engine.batches()
        batches.limit_physical(self._limit or self._examples)
        for batch in batches:
            for examples in batch.physical() if batch.sizes else [self._empty()]:
                yield examples
                if self._engine.batch is not batch:
                    break  # it had its step, or was discarded
                self._check_gathered(batch)

    def limited(self, most: int) -> DPDataLoader:
        """This loader, with parts of at most so many examples."""
        return DPDataLoader(self._engine, self._given, self._batch_dim, most)

    def discard(self) -> None:
        """Abandons the batch handed out last, on purpose: nothing of it is released, and its step is charged."""
        self._engine.batches().discard()

    def _check_gathered(self, batch: LogicalBatch) -> None:
        """Raises PrivacyError where the batch, or part of one, that was handed out last had no step."""
        if batch.handed == len(batch.sizes) or self._engine.gathered < batch.handed:
            raise PrivacyError(
                "the batch before this one had no loss.backward() with optimizer.step(), so it was neither charged nor "
                "released; leave neither out, or call data_loader.discard(), which charges the batch, before the next"
            )

    def _empty(self) -> Any:
        """The tensors of a batch of one example, without their rows."""
        return tree_map(self._without_rows, self.collate_fn([self.dataset[0]]))

    def _without_rows(self, value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            raise TypeError(
                f"a batch holds a {type(value).__name__}, of which an empty batch can't be made; have collate_fn "
                "return tensors in tuples, lists and dicts only"
            )
        dim = self._batch_dim if value.dim() > self._batch_dim else 0
        return value.narrow(dim, 0, 0)


class BatchMemoryManager:
    """Splits logical batches into parts that fit in memory: ``with BatchMemoryManager(...) as loader:``.

    Each part has its forward, ``loss.backward()`` and ``optimizer.step()``, which updates after the last one only.

    Args:
        data_loader: from ``make_private``.
        max_physical_batch_size: the most examples in a part.
        optimizer: from ``make_private``.
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
