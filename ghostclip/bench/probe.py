"""The peak memory of one contender's steps: what runs in a fresh process, ``python -m ghostclip.bench.probe JSON``.

The process imports everything, makes as many steps on as many examples with a copy of the model, which loads kernels
and code (thousands more, where bytes are counted, which fill Python's caches), gives that memory back, then builds
model, optimizer and batch. There its high-water mark is reset, and the rise over what it held is reported: gradients,
optimizer state, noise, activations, and whatever clipping keeps. On a GPU the same is asked of torch's allocator.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import json
import re
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ghostclip.bench.contenders import Contender
from ghostclip.bench.roster import CONTENDERS
from ghostclip.bench.workloads import WORKLOADS, Workload

__all__ = ["Question", "answer"]

MAX_NORM = 1.0  # what memory does not depend on
# Steps before those that are counted to the byte, and their seconds at most (measured: 3,000 and 10,000 give the same).
SETTLING_STEPS, SETTLING_SECONDS = 3000, 20.0


@dataclass(frozen=True)
class Question:
    """What one process measures.

    Attributes:
        workload, contender: names.
        batch_size: examples.
        device: "cpu" or "cuda".
        threads: processor threads torch may use.
        steps: steps to make; the first is the one in which strategies are chosen.
        allocated: count what the C library allocates, by native/allocated.c, with which the process was started.
    """

    workload: str
    contender: str
    batch_size: int
    device: str = "cpu"
    threads: int = 1
    steps: int = 3
    allocated: bool = False


def answer(question: Question) -> dict[str, int]:
    """Bytes the steps needed at their highest: ``peak`` over all of them, ``steady`` after the first.

    Raises:
        CannotRun, or whatever the contender does: it can't make a step of this workload.
    """
    torch.set_num_threads(question.threads)
    torch.manual_seed(0)
    workload, contender = WORKLOADS[question.workload], CONTENDERS[question.contender]
    # A copy is made here as below, so that nothing of this step is left but what stays loaded.
    rehearsal = _stepper(workload, contender, question.batch_size, question.device)
    for _ in range(question.steps):
        rehearsal()
    if question.allocated:
        _settle(rehearsal)
    del rehearsal
    _give_back()
    step = _stepper(workload, contender, question.batch_size, question.device)
    _give_back()
    gauge = _Cuda() if question.device == "cuda" else _Allocated() if question.allocated else _Resident()
    step()
    first = gauge.rise()
    gauge.reset()
    for _ in range(question.steps - 1):
        step()
    later = gauge.rise() if question.steps > 1 else first
    return {"peak": max(first, later), "steady": later}


def _stepper(workload: Workload, contender: Contender, size: int, device: str) -> Callable[[], None]:
    """A contender on its own copy of a model, and a batch; a step is a call."""
    model, inputs, targets = workload.on(device, size)
    prepared = contender.prepare(copy.deepcopy(model).to(device), workload.losses, MAX_NORM)
    del model
    return lambda: prepared.step(inputs, targets)


def _give_back() -> None:
    """Returns freed memory to the system."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; other C libraries have none
        if trim is not None:
            trim(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _settle(step: Callable[[], None]) -> None:
    """Repeats a step until what it leaves behind in the process has come to an end.

    CPython keeps the names of attributes that were looked up in types, up to 4,096 of them, and torch makes new ones
    for each look: 300 KB after thousands of steps, of which those of three would count 7 to 30 as their own.
    """
    end = time.monotonic() + SETTLING_SECONDS
    for _ in range(SETTLING_STEPS):
        step()
        if time.monotonic() > end:
            break


class _Resident:
    """The process's resident memory, by Linux's resettable high-water mark; elsewhere by the one that only rises."""

    def __init__(self) -> None:
        self._resettable = Path("/proc/self/clear_refs").exists()
        self._floor = self._now("VmRSS") if self._resettable else self._highest()
        self.reset()

    def reset(self) -> None:
        """Starts the high-water mark anew at what is held now; the floor stays."""
        if self._resettable:
            Path("/proc/self/clear_refs").write_text("5")

    def rise(self) -> int:
        """The high-water mark over the floor, in bytes."""
        return (self._now("VmHWM") if self._resettable else self._highest()) - self._floor

    @staticmethod
    def _now(key: str) -> int:
        found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        assert found is not None
        return 1024 * int(found[1])

    @staticmethod
    def _highest() -> int:
        # Kilobytes on Linux, bytes on macOS.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class _Allocated:
    """What malloc and its kin have given out, to the byte; not all of it need ever be touched."""

    def __init__(self) -> None:
        counter = ctypes.CDLL(None)
        self._most = counter.ghostclip_most_allocated
        counter.ghostclip_allocated.restype = self._most.restype = ctypes.c_long
        self._floor = counter.ghostclip_allocated()
        self.reset()

    def reset(self) -> None:
        """Starts the high-water mark anew."""
        self._most()

    def rise(self) -> int:
        """The high-water mark over the floor, in bytes; starts it anew."""
        return self._most() - self._floor


class _Cuda:
    """The bytes in tensors on the GPU, by torch's allocator."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._floor = torch.cuda.memory_allocated()
        self.reset()

    def reset(self) -> None:
        """Starts the high-water mark anew."""
        torch.cuda.reset_peak_memory_stats()

    def rise(self) -> int:
        """The high-water mark over the floor, in bytes."""
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - self._floor


def main() -> int:
    """Answers the question in the first argument on stdout; a failure is one line of it, and status 1."""
    question = Question(**json.loads(sys.argv[1]))
    try:
        print(json.dumps({"question": asdict(question), **answer(question)}))
    except Exception as error:  # whatever a library does, the process that asked must hear why
        print(json.dumps({"failed": f"{type(error).__name__}: {error}"}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
