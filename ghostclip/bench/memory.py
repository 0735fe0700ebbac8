"""Peak memory of contenders, each measured in a fresh process of its own.

The process imports everything and makes some steps on a model and a batch, which loads kernels and code (thousands of
steps, where bytes are counted, which fill Python's caches), gives that memory back, then builds model, optimizer and
batch anew. There its high-water mark is reset, and the rise over what it held is reported: gradients, optimizer state,
noise, activations, and whatever clipping keeps. On a GPU the same is asked of torch's allocator.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import sys
import time
from collections.abc import Iterable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ghostclip.bench.methods import BASELINE
from ghostclip.bench.processes import ContenderProcess, ProcessFailed, Task
from ghostclip.native import library

__all__ = ["ask", "peaks"]

# glibc keeps freed memory for later use, more of it the longer a process runs. With a fixed threshold every larger
# tensor is returned as it is freed, so that what is measured are living tensors, whoever allocated them.
# With a larger one (128 KiB was tried) the holes between small tensors come and go: 0.6 of 4 MB from run to run.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "16384"}
# Of less than this, chance has a share (which tensors fall into memory that the heap has at hand): the median of three.
SMALL = 16 << 20
# Linux counts pages in bundles of up to 32 for each processor and kind; its high-water mark was found 0.1 to 0.2 MiB
# below the truth (of 200 KiB it saw none). Where a step takes less than this, what the C library allocates is counted.
COARSE = 4 << 20
# Steps before those that are counted to the byte, and their seconds at most (measured: 3,000 and 10,000 give the same).
# CPython keeps the names of attributes that were looked up in types, up to 4,096 of them, and torch makes new ones for
# each look: 300 KB after thousands of steps, of which those of three would count 7 to 30 as their own.
SETTLING_STEPS, SETTLING_SECONDS = 3000, 20.0


def peaks(
    workload: str, contenders: Iterable[str], batch_size: int, device: str = "cpu", threads: int = 1
) -> dict[str, dict[str, Any]]:
    """Peak memory of contenders on one workload, and over the non-private one's.

    Returns:
        ``{name: {"peak": bytes, "steady": bytes, "over_nonprivate": ratio}}``, or ``{"failed": why}``; the median of
        three processes where that is little; with ``"allocated": True`` where bytes that the C library allocates were
        counted, since pages are too coarse.
    """
    tasks = {name: Task(workload, name, batch_size, device=device, threads=threads) for name in [BASELINE, *contenders]}
    found = {BASELINE: _median(tasks[BASELINE])}
    counter = _counter() if device == "cpu" and found[BASELINE].get("peak", COARSE) < COARSE else None
    for name, task in tasks.items():
        if counter is not None:
            found[name] = {**ask(task, counter=counter), "allocated": True}
        elif name != BASELINE:
            found[name] = _median(task)
    base = found[BASELINE]
    for name, row in found.items():
        if name != BASELINE and "peak" in row and base.get("peak"):
            row["over_nonprivate"] = row["peak"] / base["peak"]
    return found


def _median(task: Task) -> dict[str, Any]:
    """What `ask` finds; the median of three where it is little."""
    found = [ask(task)]
    if found[0].get("peak", SMALL) < SMALL:
        found += [ask(task), ask(task)]
    failed = [row for row in found if "peak" not in row]
    return failed[0] if failed else sorted(found, key=lambda row: row["peak"])[len(found) // 2]


def ask(task: Task, steps: int = 3, counter: str | None = None) -> dict[str, Any]:
    """What a fresh process measures: bytes, ``peak`` over all steps and ``steady`` after the first; or ``failed``: why.

    Args:
        task: what it runs.
        steps: how many it makes; the first is the one in which strategies are chosen.
        counter: native/allocated.c's library, to count what the C library allocates; None for resident memory.
    """
    settings = ALLOCATOR
    if counter is not None:
        settings = {"LD_PRELOAD": f"{counter} {os.environ.get('LD_PRELOAD', '')}", "PYTHONMALLOC": "malloc"}
    # In the environment of a new process, which can't set them for itself.
    with mock.patch.dict(os.environ, {**settings, "OMP_NUM_THREADS": str(task.threads)}):
        process = ContenderProcess(task, _measure, steps, counter is not None, start="spawn")
    try:
        return process.answer()
    except ProcessFailed as error:
        return {"failed": error.why}
    finally:
        process.close()


def _counter() -> str | None:
    """The path of native/allocated.c's library; None where it can't be had, as where the C library isn't glibc."""
    loaded = library("allocated") if sys.platform == "linux" else None
    return None if loaded is None else loaded._name


def _measure(task: Task, line: Connection, steps: int, allocated: bool) -> None:
    """Answers `ask`, in the process."""
    step, until = task.stepper(), time.monotonic() + SETTLING_SECONDS
    for number in range(SETTLING_STEPS if allocated else steps):
        step()
        if number >= steps and time.monotonic() > until:
            break
    del step
    _give_back()
    step = task.stepper()
    _give_back()
    gauge = _Cuda() if task.device == "cuda" else _Allocated() if allocated else _Resident()
    floor, highest = gauge.held(), []
    for count in (1, steps - 1):
        gauge.reset()
        for _ in range(count):
            step()
        highest.append(gauge.highest() - floor)
    line.send(("done", {"peak": max(highest), "steady": highest[-1]}))


def _give_back() -> None:
    """Returns freed memory to the system."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's; other C libraries have none
        trim(0)


class _Resident:
    """The process's resident memory, by Linux's resettable high-water mark; elsewhere by the one that only rises."""

    def __init__(self) -> None:
        self._resettable = Path("/proc/self/clear_refs").exists()

        self.held, self.highest = partial(self._read, "VmRSS"), partial(self._read, "VmHWM")

    def reset(self) -> None:
        if self._resettable:
            Path("/proc/self/clear_refs").write_text("5")

    def _read(self, key: str) -> int:
        if not self._resettable:  # kilobytes on Linux, bytes on macOS
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        assert found is not None
        return 1024 * int(found[1])


class _Allocated:
    """What malloc and its kin have given out, to the byte; not all of it need ever be touched."""

    def __init__(self) -> None:
        counter = ctypes.CDLL(None)
        self.held, self.highest = counter.ghostclip_allocated, counter.ghostclip_most_allocated
        self.held.restype = self.highest.restype = ctypes.c_long
        self.reset = self.highest  # which starts anew when it is read


class _Cuda:
    """The bytes in tensors on the GPU, by torch's allocator."""

    held = staticmethod(torch.cuda.memory_allocated)
    highest, reset = staticmethod(torch.cuda.max_memory_allocated), staticmethod(torch.cuda.reset_peak_memory_stats)
