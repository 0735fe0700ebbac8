"""Peak memory of contenders, each measured in a fresh process of its own, and the largest batch within a limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

from ghostclip.bench.compare import BASELINE
from ghostclip.native import library

__all__ = ["ask", "largest_batch", "peaks", "within"]

# glibc keeps freed memory for later use, more of it the longer a process runs. With a fixed threshold every larger
# tensor is returned as it is freed, so that what is measured are living tensors, whoever allocated them.
# With a larger one (128 KiB was tried) the holes between small tensors come and go: 0.6 of 4 MB from run to run.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "16384"}
# Of less than this, chance has a share (which tensors fall into memory that the heap has at hand): the median of three.
SMALL = 16 << 20
# Linux counts pages in bundles of up to 32 for each processor and kind; its high-water mark was found 0.1 to 0.2 MiB
# below the truth (of 200 KiB it saw none). Where a step takes less than this, what the C library allocates is counted.
COARSE = 4 << 20
CLOSE = 1.05  # the bisection ends when the smallest batch too large is within this of the largest that fits


def ask(
    workload: str,
    contender: str,
    batch_size: int,
    device: str = "cpu",
    threads: int = 1,
    steps: int = 3,
    counter: str | None = None,
) -> dict[str, Any]:
    """What `ghostclip.bench.probe` finds in a fresh process: ``peak`` and ``steady`` bytes, or ``failed`` with why.

    Args:
        workload, contender, batch_size, device, threads, steps: as for its `Question`.
        counter: native/allocated.c's library, to count what the C library allocates; None for resident memory.
    """
    question = {"workload": workload, "contender": contender, "batch_size": batch_size, "device": device,
                "threads": threads, "steps": steps, "allocated": counter is not None}  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if counter is None:
        environment.update(ALLOCATOR)
    else:
        before = [counter, environment.get("LD_PRELOAD", "")]
        environment.update({"LD_PRELOAD": " ".join(filter(None, before)), "PYTHONMALLOC": "malloc"})
    command = [sys.executable, "-m", "ghostclip.bench.probe", json.dumps(question)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        reason = (done.stderr.strip().splitlines() or [f"the process ended with status {done.returncode}"])[-1]
        return {"failed": reason}


def peaks(
    workload: str, contenders: Iterable[str], batch_size: int, device: str = "cpu", threads: int = 1
) -> dict[str, dict[str, Any]]:
    """Peak memory of contenders on one workload, and over the non-private one's.

    Returns:
        ``{name: {"peak": bytes, "steady": bytes, "over_nonprivate": ratio}}``, or ``{"failed": why}``; the median of
        three processes where that is little; with ``"allocated": True`` where bytes that the C library allocates were
        counted, since pages are too coarse.
    """
    names = dict.fromkeys([BASELINE, *contenders])
    found = {BASELINE: _settled(workload, BASELINE, batch_size, device, threads)}
    counter = _counter() if device == "cpu" and found[BASELINE].get("peak", COARSE) < COARSE else None
    for name in names:
        if counter is not None:
            found[name] = {**ask(workload, name, batch_size, device, threads, counter=counter), "allocated": True}
        elif name not in found:
            found[name] = _settled(workload, name, batch_size, device, threads)
    base = found[BASELINE]
    for name, row in found.items():
        row.pop("question", None)
        if name != BASELINE and "peak" in row and base.get("peak"):
            row["over_nonprivate"] = row["peak"] / base["peak"]
    return found


def _counter() -> str | None:
    """The path of native/allocated.c's library; None where it can't be had, as where the C library isn't glibc."""
    loaded = library("allocated") if sys.platform == "linux" else None
    return None if loaded is None else loaded._name


def _settled(*asked: Any) -> dict[str, Any]:
    """What `ask` finds; the median of three where it is little."""
    found = [ask(*asked)]
    if found[0].get("peak", SMALL) < SMALL:
        found += [ask(*asked), ask(*asked)]
    if any("peak" not in row for row in found):
        return next(row for row in found if "peak" not in row)
    return sorted(found, key=lambda row: row["peak"])[len(found) // 2]


def largest_batch(fits: Callable[[int], bool], start: int) -> int:
    """The largest batch that fits, to within CLOSE, by doubling or halving, then bisection; 0 when not even one does.

    Args:
        fits: batch size -> whether it does; called once a size.
        start: where to begin, at least 1.
    """
    low, high = 0, start
    while fits(high):
        low, high = high, 2 * high
    while low == 0 and high > 1:
        middle = high // 2
        low, high = (middle, high) if fits(middle) else (0, middle)
    while high - low > 1 and high > CLOSE * low:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def within(limit: int, workload: str, contender: str, device: str = "cpu", threads: int = 1) -> Callable[[int], bool]:
    """A ``fits`` for `largest_batch`: two steps of the contender rise by at most ``limit`` bytes."""

    def fits(batch_size: int) -> bool:
        found = ask(workload, contender, batch_size, device, threads, steps=2)
        if "failed" in found:
            raise RuntimeError(f"{contender} on {workload}, batch {batch_size}: {found['failed']}")
        return found["peak"] <= limit

    return fits
