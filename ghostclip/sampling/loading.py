"""How physical batches are loaded: through one DataLoader that keeps everything of the user's but the sampling."""

from __future__ import annotations

import hashlib
import os
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from ghostclip.errors import PrivacyError

__all__ = [
    "check_sampling",
    "check_size",
    "loader_of",
    "loaders_batch_size",
    "rows_digest",
    "runs_code",
    "say_sampler_is_replaced",
    "seed_anew",
    "size_of",
    "warn_of_repeated_rows",
]

# What a DataLoader is told besides its dataset and its sampling.
KEPT = (
    "collate_fn",
    "generator",
    "multiprocessing_context",
    "num_workers",
    "persistent_workers",
    "pin_memory",
    "pin_memory_device",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)

# Of a block of an Arrow table: two to this power.
MOST_ROWS = 40

REMEDY = "pass a plain DataLoader (shuffle=True or False), or the dataset itself with batch_size=..."
PART = ". For a part of the data give torch.utils.data.Subset(dataset, indices)"
INSTEAD: dict[Any, str] = {
    DistributedSampler: ". Each process needs the whole dataset: the engine shares every logical batch out itself",
    SubsetRandomSampler: PART,
    WeightedRandomSampler: ". For rare classes weight the losses: cross_entropy(..., weight=weights, reduction='none')",
}


def size_of(dataset: Any) -> int:
    """The number of examples; raises PrivacyError when they can't be drawn at random, TypeError for bare columns."""
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise PrivacyError(
            f"{type(dataset).__name__} can't be read at random, but the privacy guarantee needs single examples drawn "
            "at random; give a map-style dataset (with __len__ and __getitem__), for instance by reading the "
            "stream into a list first"
        )
    if _are_columns(dataset):
        shapes, kind = ", ".join(str(list(part.shape)) for part in dataset), type(dataset[0]).__name__.lower()
        raise TypeError(
            f"data is a {type(dataset).__name__} of {len(dataset)} {kind}s ({shapes}), "
            "each of which would be one example; for tensors that hold all examples in dimension 0 give "
            "torch.utils.data.TensorDataset(inputs, targets), for arrays after torch.as_tensor"
        )
    if hasattr(dataset, "iloc") or (
        isinstance(dataset, Mapping) and any(row not in dataset for row in range(len(dataset)))
    ):
        raise TypeError(
            f"data is a {type(dataset).__name__} of columns, which has no examples by number: dataset[0] must be one; "
            "give torch.utils.data.TensorDataset(inputs, targets), or a list of dicts, one for each example"
        )
    if len(dataset) == 0:
        raise ValueError("the dataset is empty; its length must be at least 1")
    return len(dataset)


def _are_columns(dataset: Any) -> bool:
    """Whether it is a tuple of tensors or arrays, or a list of such that differ but for a length above the list's."""
    several = isinstance(dataset, tuple | list) and len(dataset) > 0
    if not several or not all(isinstance(part, Tensor | np.ndarray) for part in dataset):
        return False
    if isinstance(dataset, tuple):
        return True
    lengths, shapes = {part.shape[:1] for part in dataset}, {part.shape for part in dataset}
    return len(lengths) == 1 < len(shapes) and dataset[0].shape[0] > len(dataset)


def check_size(dataset: Any, size: int) -> None:
    """Raises PrivacyError unless the data set has ``size`` examples, as it had when the sampling was made for it."""
    if (now := len(dataset)) != size:
        raise PrivacyError(
            f"the data set has {now} examples and had {size} when the engine was built, from which sampling rate and "
            "epsilon are computed; keep it as it is while you train (give a copy, list(data)), and build a new engine "
            "for other data, with the same ledger=... so that both count"
        )


def loaders_batch_size(loader: DataLoader[Any]) -> int:
    """The loader's own batch size; raises PrivacyError when it has none."""
    if not isinstance(size := getattr(loader.batch_sampler, "batch_size", None), int):
        raise PrivacyError(f"the DataLoader has no batch_size to take over, so its batches aren't samples; {REMEDY}")
    return size


def check_sampling(loader: DataLoader[Any]) -> None:
    """Raises PrivacyError unless the loader takes any of its examples, in order or at random, which can be replaced."""
    if loader.batch_sampler is None:
        raise PrivacyError(f"the DataLoader has batch_size=None: it makes no batches of single examples; {REMEDY}")
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    choices: list[tuple[Any, tuple[Any, ...]]] = [
        (type(loader).__iter__, (DataLoader.__iter__,)),
        (type(loader.batch_sampler), (BatchSampler,)),
        (type(sampler), (SequentialSampler, RandomSampler)),
    ]
    for found, accepted in choices:
        if found not in accepted:
            raise PrivacyError(
                f"the DataLoader chooses its examples by {found.__qualname__}, which the privacy accounting doesn't "
                f"know, and the engine's own sampling in its place might not be what it is meant to do; {REMEDY}"
                + INSTEAD.get(found, "")
            )
    source: Any = sampler
    if (taken := len(source.data_source)) != (size := size_of(loader.dataset)):
        raise PrivacyError(
            f"the DataLoader's {type(sampler).__name__} takes the first {taken} of {size} examples, and the engine's "
            f"own sampling in its place would take any of them; {REMEDY}{PART}"
        )


def say_sampler_is_replaced(loader: DataLoader[Any], words: str) -> None:
    """Warns at the line that built the engine; ``words`` say by what it is replaced."""
    sampler = type(getattr(loader.batch_sampler, "sampler", loader.sampler)).__name__
    warnings.warn(
        f"the DataLoader's {sampler} is replaced by {words}, which the privacy accounting is about; its dataset, "
        "collate_fn, workers and pinning are kept"
        + ("; its drop_last has no effect: len(engine.batches()) is the steps of an epoch" if loader.drop_last else ""),
        stacklevel=4,
    )


def warn_of_repeated_rows(dataset: Any) -> None:
    """Warns where a data set has a row several times, each of which counts as an example of its own."""
    if _has_row_twice(dataset):
        warnings.warn(
            f"the {type(dataset).__name__} has rows several times, and each time counts as an example of its own: a "
            "person whose row comes k times may move each sum k times as far as epsilon says. Give every row once, or "
            "unit_ids=[...] with the same number for all times that a row comes",
            stacklevel=4,
        )


def _parts(dataset: Any) -> Iterator[tuple[Any, np.ndarray | None]]:
    """The data sets within `ConcatDataset` and `Subset`, each with the rows of it that are picked; None: all.

    Of a ``datasets.Dataset`` the rows are those of its Arrow table, from which it picks some in an order of its own.
    """
    if isinstance(dataset, ConcatDataset):
        for each in dataset.datasets:
            yield from _parts(each)
        return
    picked = None
    while isinstance(dataset, Subset):
        own = np.asarray(dataset.indices)
        picked, dataset = own if picked is None else own[picked], dataset.dataset
    if (own_rows := _of_table(dataset)) is not None:
        picked = own_rows if picked is None else own_rows[picked]
    yield dataset, picked


def _of_table(dataset: Any) -> np.ndarray | None:
    """The rows that a ``datasets.Dataset`` picks from its table; None: all of them, or data of another kind."""
    indices: Any = getattr(dataset, "_indices", None)
    if not hasattr(indices, "column") or not hasattr(dataset, "_data"):
        return None
    return indices.column(0).to_numpy().astype(np.int64)


def _stored_rows(table: Any, rows: np.ndarray | None, blocks: dict[Any, int]) -> np.ndarray:
    """Numbers for rows of an Arrow table (None: for all), by where they lie in memory: what two tables hold has one.

    A table of several others has their blocks, which it doesn't copy. ``blocks`` are those seen so far, by number.
    """
    starts, firsts, total = [], [], 0
    for batch in table.to_batches():
        first = batch.columns[0].offset
        block = tuple(
            (each.offset - first, *(buffer and buffer.address for buffer in each.buffers())) for each in batch.columns
        )
        starts.append(total)
        firsts.append((blocks.setdefault(block, len(blocks)) << MOST_ROWS) + first - total)
        total += len(batch)
    rows = np.arange(total) if rows is None else np.where(rows < 0, rows + total, rows)
    return rows + np.asarray(firsts)[np.searchsorted(starts, rows, "right") - 1]


def _has_row_twice(dataset: Any) -> bool:
    """Whether a row can be seen to come several times; indices may be of any kind."""
    whole, picked, blocks = set[int](), dict[int, list[np.ndarray]](), dict[Any, int]()
    with suppress(Exception):
        for inner, rows in _parts(dataset):
            if hasattr(table := getattr(inner, "_data", None), "to_batches"):
                picked.setdefault(id(blocks), []).append(_stored_rows(table, rows, blocks))
            elif rows is not None:
                picked.setdefault(id(inner), []).append(rows)
            elif id(inner) in whole:
                return True
            else:
                whole.add(id(inner))
        joined = {inner: np.concatenate(rows) for inner, rows in picked.items()}
        return any(len(np.unique(rows)) < len(rows) or (inner in whole and len(rows)) for inner, rows in joined.items())
    return False


def rows_digest(dataset: Any) -> str:
    """Tells data sets that pick other rows apart, as `torch.utils.data.random_split` does; "" for other data."""
    if not isinstance(dataset, Subset | ConcatDataset) and _of_table(dataset) is None:
        return ""
    digest = hashlib.sha256()
    for _, rows in _parts(dataset):
        if rows is None:
            digest.update(b"all")
        elif rows.dtype == object:
            digest.update(repr(rows.tolist()).encode())
        else:
            digest.update(rows.dtype.str.encode() + rows.tobytes())
        digest.update(b"; ")
    return digest.hexdigest()


def seed_anew() -> None:
    """Torch's, NumPy's and Python's random numbers go on from the operating system's entropy."""
    if torch.accelerator.is_available():
        torch.seed()
    else:
        torch.default_generator.seed()  # torch.seed takes 2 ms where there is no GPU
    np.random.seed(int.from_bytes(os.urandom(4), "little"))  # by itself it takes 0.2 ms
    random.seed(int.from_bytes(os.urandom(16), "little"))


def runs_code(loader: DataLoader[Any]) -> bool:
    """Whether loading runs a data set's or a collate function's own code in this process."""
    return loader.num_workers == 0 and not isinstance(loader.dataset, _TensorRows)


def loader_of(
    dataset: Any, given: DataLoader[Any] | None, chunks: Iterable[list[int]], **other: Any
) -> DataLoader[Any]:
    """The one DataLoader all physical batches come from, with all but the sampling, and ``other``, as it was given."""
    kept = {} if given is None else {name: getattr(given, name) for name in KEPT} | other
    plain = given is None or (given.collate_fn is default_collate and given.num_workers == 0)
    if type(dataset) is TensorDataset and plain:
        return DataLoader(_TensorRows(dataset), batch_sampler=chunks, **{**kept, "collate_fn": list})
    return DataLoader(dataset, batch_sampler=chunks, **kept)


class _TensorRows(Dataset[Any]):
    """A TensorDataset that gives a physical batch by indexing, which is far faster than collating single examples."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        rows = torch.tensor(indices, device="cpu")
        return [tensor[rows] for tensor in self._dataset.tensors]
