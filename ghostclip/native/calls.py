"""Calling the compiled C functions: tensors as pointers, the examples of a batch shared among threads."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ghostclip.native.build import library

__all__ = ["function", "run", "run_examples"]

# A thread of its own is worth it from about this many multiplications on.
SHARE = 4_000_000
# Shares of the batch are multiples of this: the most examples that C takes together.
ROWS = 8
NAMES = {torch.float32: "float", torch.float64: "double"}


@functools.cache
def _function(source: str, name: str, dtype: torch.dtype) -> Callable[..., int]:
    """The C function of that name in ``source``.c for numbers of that type."""
    loaded = library(source)
    assert loaded is not None
    found = getattr(loaded, f"{name}_{NAMES[dtype]}")
    found.restype = ctypes.c_long
    return found


@functools.cache
def function(source: str, name: str, dtype: torch.dtype, arguments: int) -> Callable[..., int] | None:
    """The same for so many whole numbers and addresses, which it takes as Python's ints; None where there is none."""
    if dtype not in NAMES or library(source) is None:
        return None
    found = _function(source, name, dtype)
    found.argtypes = [ctypes.c_ssize_t] * arguments  # type: ignore[attr-defined]
    return found


def _as_c(value: Tensor | float | None) -> ctypes.c_long | ctypes.c_double | ctypes.c_void_p:
    if isinstance(value, int):
        return ctypes.c_long(value)
    if isinstance(value, float):
        return ctypes.c_double(value)
    return ctypes.c_void_p(None if value is None else value.data_ptr())


def run(source: str, name: str, dtype: torch.dtype, arguments: tuple[Any, ...]) -> int:
    """Calls a function for numbers of that type; tensors go as pointers, None as null, integers as C's long."""
    return _function(source, name, dtype)(*map(_as_c, arguments))


def run_examples(source: str, name: str, dtype: torch.dtype, batch: int, work: int, arguments: tuple[Any, ...]) -> None:
    """Calls a function that takes (first, last) of the examples at the end, for all of them.

    They are shared among torch's threads where ``work`` multiplications are many; no result depends on that.

    Raises:
        MemoryError: C had no memory for its workspace.
    """
    blocks = -(-batch // ROWS)
    count = max(1, min(torch.get_num_threads(), work // SHARE, blocks))
    edges = [min(batch, share * blocks // count * ROWS) for share in range(count + 1)]
    failed: list[int] = []

    def share(first: int, last: int) -> None:
        if run(source, name, dtype, (*arguments, first, last)):
            failed.append(first)

    threads = [threading.Thread(target=share, args=edge) for edge in pairwise(edges[1:])]
    for thread in threads:
        thread.start()
    share(edges[0], edges[1])
    for thread in threads:
        thread.join()
    if failed:
        raise MemoryError(f"no memory for the workspace of {name}")
