"""Calling the compiled C functions: tensors as pointers, the examples of a batch shared among torch's threads."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ghostclip.native.build import library

__all__ = ["function", "run", "run_examples", "share_out"]

# One of torch's threads is worth it from about this many multiplications on.
SHARE = 500_000
# What share.c has room for.
MOST_WORDS = 20
NAMES = {torch.float32: "float", torch.float64: "double"}


class _Forks:
    """Whether this process was forked from one that had threads, of which it has none.

    A runtime that had some would wait for them for ever, as torch's own operations do.
    """

    def __init__(self) -> None:
        self.lost_threads = self._had_threads = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._before, after_in_child=self._after)

    def _before(self) -> None:
        try:
            self._had_threads = len(os.listdir("/proc/self/task")) > 1
        except OSError:
            self._had_threads = True  # where the system doesn't say

    def _after(self) -> None:
        self.lost_threads = self.lost_threads or self._had_threads


_forks = _Forks()


@functools.cache
def function(source: str, name: str, dtype: torch.dtype) -> Callable[..., int]:
    """The C function of that name in ``source``.c for numbers of that type."""
    loaded = library(source, NAMES[dtype])
    assert loaded is not None
    found = getattr(loaded, f"{name}_{NAMES[dtype]}")
    found.restype = ctypes.c_int
    return found


def run(source: str, name: str, dtype: torch.dtype, arguments: tuple[Any, ...]) -> int:
    """Calls a function for numbers of that type; tensors go as pointers, None as null, integers as C's long."""
    return function(source, name, dtype)(*map(ctypes.c_ssize_t, _words(arguments)))


def run_examples(
    source: str, name: str, dtype: torch.dtype, batch: int, work: int, arguments: tuple[Any, ...], together: int = 1
) -> None:
    """Calls a function that takes (first, last) of the examples at the end, for all of them, as `share_out` does.

    Raises:
        MemoryError: C had no memory for its workspace.
    """
    if share_out(function(source, name, dtype), batch, together, work, arguments):
        raise MemoryError(f"no memory for the workspace of {name}")


def share_out(function: Callable[..., int], size: int, unit: int, work: int, arguments: tuple[Any, ...]) -> bool:
    """Calls ``function(*arguments, first, last)`` for parts of ``range(size)``; whether a call returned other than 0.

    Parts begin at multiples of ``unit``, and are shared among torch's threads where these can be had and ``work``
    multiplications are many. Numbers that aren't whole go as their bits.
    """
    words, threads = _words(arguments), torch.get_num_threads()
    blocks = -(-size // unit)
    shares = max(1, min(threads, blocks, work // SHARE))
    runtime = None if shares == 1 or _forks.lost_threads else _runtime()
    if runtime is None:
        return bool(function(*map(ctypes.c_ssize_t, (*words, 0, size))))
    share = library("share")
    assert share is not None
    assert len(words) <= MOST_WORDS
    given = array("q", words)
    edges = array("q", [min(size, part * blocks // shares * unit) for part in range(shares + 1)])
    # As many threads as torch asks for: another number would have the runtime end some of them, or start new ones.
    return bool(share.ghostclip_share(
        ctypes.c_void_p(runtime), function, ctypes.c_void_p(given.buffer_info()[0]), ctypes.c_long(len(words)),
        ctypes.c_void_p(edges.buffer_info()[0]), ctypes.c_long(shares), threads,
    ))  # fmt: skip


def _words(arguments: tuple[Any, ...]) -> list[int]:
    """What C is given, as whole numbers: tensors by their addresses, other numbers by their bits, None as 0."""
    words = []
    for value in arguments:
        if isinstance(value, int):
            words.append(value)
        elif isinstance(value, Tensor):
            words.append(value.data_ptr())
        elif isinstance(value, float):
            words.append(struct.unpack("q", struct.pack("d", value))[0])
        elif value is None:
            words.append(0)
        else:
            raise TypeError(f"expected a tensor, a number or None; got {type(value).__name__}")
    return words


@functools.cache
def _runtime() -> int | None:
    """The address of GOMP_parallel in the OpenMP runtime that torch's own threads are of; None where there is none."""
    if library("share") is None or "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    suffix = "dylib" if sys.platform == "darwin" else "so"
    # Where the loader looked for torch: what is preloaded, then what torch's library depends on.
    for name in (None, str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}")):
        try:
            loaded = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LOCAL | os.RTLD_NOW)
            return ctypes.cast(loaded.GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None
