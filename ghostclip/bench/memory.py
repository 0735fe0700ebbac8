"""Peak memory of contenders, each measured in a fresh process of its own.

The process imports everything and makes some steps on a model and a batch, which loads kernels and code (thousands of
steps, where bytes are counted, which fill Python's caches), gives that memory back, then builds model, optimizer and
batch anew. There its high-water mark is reset, and the rise over what it held is reported: gradients, optimizer state,
noise, activations, and whatever clipping keeps. On a processor what the C library allocates is counted, to the byte
(Linux counts pages in bundles of up to 32 for each processor and kind, and gives back what is freed when it likes); on
a GPU the same is asked of torch's allocator.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ghostclip.bench import methods
from ghostclip.bench.methods import BASELINE, CONTENDERS, register
from ghostclip.bench.workloads import WORKLOADS
from ghostclip.native import library

__all__ = ["Task", "ask", "peaks"]

# Steps before those that are counted, and their seconds at most (measured: 3,000 and 10,000 give the same).
# CPython keeps the names of attributes that were looked up in types, up to 4,096 of them, and torch makes new ones for
# each look: 300 KB after thousands of steps, of which those of three would count 7 to 30 as their own.
SETTLING_STEPS, SETTLING_SECONDS = 3000, 10.0


@dataclass(frozen=True)
class Task:
    """What a process runs: names, the size of the batch, "cpu" or "cuda", how many threads it may use, and

    Attributes:
        modules: whose contenders and workloads are to be registered.
    """

    workload: str
    contender: str
    batch_size: int
    device: str = "cpu"
    threads: int = 1
    modules: tuple[str, ...] = field(default_factory=lambda: tuple(methods.MODULES))

    def stepper(self) -> Callable[[], None]:
        """A contender with a model and a batch of its own; a call is a step."""
        torch.manual_seed(0)  # from which every contender starts
        workload = WORKLOADS[self.workload]
        model, inputs, targets = workload.on(self.device, self.batch_size)
        return CONTENDERS[self.contender].prepare(model, workload.losses, 1.0).turn(inputs, targets)


def peaks(
    workload: str, contenders: Iterable[str], batch_size: int, device: str = "cpu", threads: int = 1
) -> dict[str, dict[str, Any]]:
    """Peak memory of contenders on one workload, and over the non-private one's.

    Returns:
        ``{name: {"peak": bytes, "over_nonprivate": ratio}}``, or ``{"failed": why}``; with
        ``"allocated": True`` where bytes that the C library allocates were counted.
    """
    found = {
        name: ask(Task(workload, name, batch_size, device=device, threads=threads))
        for name in dict.fromkeys([BASELINE, *contenders])
    }
    base = found[BASELINE].get("peak")
    for name, row in found.items():
        if name != BASELINE and "peak" in row and base:
            row["over_nonprivate"] = row["peak"] / base
    return found


def ask(task: Task, steps: int = 3, settling_seconds: float = SETTLING_SECONDS) -> dict[str, Any]:
    """What a fresh process measures: ``peak`` in bytes, whether the C library ``allocated`` them; or ``failed``: why.

    Args:
        task: what it runs.
        steps: how many it makes; the first is the one in which strategies are chosen.
        settling_seconds: at most for the steps before those; fewer will do where 300 KB are nothing.
    """
    settings = {"OMP_NUM_THREADS": str(task.threads), "PYTHONPATH": os.pathsep.join(sys.path)}
    if task.device == "cpu":
        if (counter := _counter()) is None:
            return {"failed": "counting what the C library allocates takes glibc and a C compiler"}
        settings |= {"LD_PRELOAD": f"{counter} {os.environ.get('LD_PRELOAD', '')}", "PYTHONMALLOC": "malloc"}
    asked = json.dumps([asdict(task), steps, settling_seconds])
    # In a session of its own, so that Ctrl-C reaches this process alone, which ends the other.
    done = subprocess.run(
        [sys.executable, "-m", __name__, asked], env=os.environ | settings, stdout=subprocess.PIPE, text=True,
        check=False, start_new_session=True,
    )  # fmt: skip
    if not done.stdout:
        code = done.returncode
        return {"failed": f"its process ended with {f'signal {signal.Signals(-code).name}' if code < 0 else code}"}
    return json.loads(done.stdout)


def _counter() -> str | None:
    """The path of native/allocated.c's library; None where it can't be had, as where the C library isn't glibc."""
    loaded = library("allocated") if sys.platform == "linux" else None
    return None if loaded is None else loaded._name


def _main() -> None:
    """Answers `ask`, in the process."""
    asked, steps, settling_seconds = json.loads(sys.argv[1])
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)  # what a library prints doesn't belong to the answer
        try:
            found = _measure(Task(**asked), steps, settling_seconds)
        except Exception as error:  # another library may fail in any way; the others' figures still count
            found = {"failed": f"{type(error).__name__}: {error}"}
        json.dump(found, answer)


def _measure(task: Task, steps: int, settling_seconds: float) -> dict[str, Any]:
    torch.set_num_threads(task.threads)
    for module in task.modules:
        register(module)
    held, restart, highest = _gauge(task.device)
    step, until = task.stepper(), time.monotonic() + settling_seconds
    for number in range(SETTLING_STEPS):
        step()
        if number >= steps and time.monotonic() > until:
            break
    del step
    _give_back()
    step = task.stepper()
    _give_back()
    floor = held()
    restart()
    for _ in range(steps):
        step()
    return {"peak": highest() - floor, "allocated": task.device == "cpu"}


def _gauge(device: str) -> tuple[Callable[[], int], Callable[[], object], Callable[[], int]]:
    """Functions for the bytes that are held, to start anew, and for the most since then, by torch or by the counter."""
    if device == "cuda":
        return torch.cuda.memory_allocated, torch.cuda.reset_peak_memory_stats, torch.cuda.max_memory_allocated
    counter = ctypes.CDLL(None)
    held, highest = counter.ghostclip_allocated, counter.ghostclip_most_allocated
    held.restype = highest.restype = ctypes.c_long
    return held, highest, highest  # reading the most starts it anew


def _give_back() -> None:
    """Returns what nobody refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    _main()
