"""Contenders that take turns, each in a process of its own, as each would train.

In one process they share a heap, and what one contender frees decides how many page faults the next one takes. Alone
chance still decides (a step of the GPT-like model takes 0 to 47,000, which is 130 of 700 ms, private or not): what lies
at the heap's end is given back to the system and taken again. So in every process the C library keeps what is freed.

Every process is forked from a server that has imported what a fresh one would import and has done nothing else
(multiprocessing's forkserver). It times its own step, so that what passes between the processes isn't counted.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from ghostclip.bench import methods
from ghostclip.bench.measure import Timings, take_turns, timed
from ghostclip.bench.methods import CONTENDERS, register
from ghostclip.bench.workloads import WORKLOADS

__all__ = ["ContenderProcess", "ProcessFailed", "Task", "in_processes", "keep_freed_memory"]

# OpenMP's threads go on spinning for up to 20 ms after their last work, which would take cores from the next contender.
SPINNING = 0.025
# The second is what the first optimizer of a process imports: a second or two that each process would spend again.
PRELOADED = [__name__, "torch._dynamo"]
AWAKE = 0.005  # seconds that threads are kept busy for before a step is timed
GRACE = 2.0  # seconds that a process has for ending by itself; one in the midst of a long step is killed
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h: what mallopt sets


def _cores() -> tuple[int, ...]:
    """Those this process may use; empty where the system doesn't say."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


@dataclass(frozen=True)
class Task:
    """What a process runs: names, the size of the batch, the clipping norm, "cpu" or "cuda", and

    Attributes:
        threads, cores: that it may use, no cores for any; by default those of this process.
        modules: whose contenders are to be registered.
        clock: what steps are timed by, a function that can be imported by name.
    """

    workload: str
    contender: str
    batch_size: int
    max_norm: float = 1.0
    device: str = "cpu"
    threads: int = field(default_factory=torch.get_num_threads)
    cores: tuple[int, ...] = field(default_factory=_cores)
    modules: tuple[str, ...] = field(default_factory=lambda: tuple(methods.MODULES))
    clock: Callable[[], float] = time.perf_counter

    def stepper(self) -> Callable[[], None]:
        """A contender with a model and a batch of its own; a call is a step."""
        workload = WORKLOADS[self.workload]
        model, inputs, targets = workload.on(self.device, self.batch_size)
        return CONTENDERS[self.contender].prepare(model, workload.losses, self.max_norm).turn(inputs, targets)


class ProcessFailed(RuntimeError):
    """A contender that broke, and why."""

    def __init__(self, contender: str, why: str) -> None:
        super().__init__(f"{contender} failed: {why}")
        self.contender, self.why = contender, why


def in_processes(
    tasks: Mapping[str, Task], seconds: float, *, baseline: str
) -> tuple[Timings, dict[str, float], dict[str, str]]:
    """Times contenders against each other by `take_turns`, each in a process of its own.

    When one of them breaks in the midst of it, the others begin anew.

    Args:
        tasks: by name.
        seconds, baseline: as for `take_turns`.

    Returns:
        The turns of those that stayed to the end; {name: seconds that preparing and the first step took}; and
        {name: why} of those that broke.

    Raises:
        ProcessFailed: the baseline broke. No process is left behind, whatever is raised.
    """
    running: dict[str, ContenderProcess] = {}
    ready: dict[str, float] = {}
    failed: dict[str, str] = {}
    with ExitStack() as stack:
        while True:
            try:
                # One after the other: they would slow each other's preparation down.
                for name in (name for name in tasks if name not in ready and name not in failed):
                    running[name] = ContenderProcess(tasks[name])
                    stack.callback(running[name].close)
                    ready[name] = running[name].answer()
                turns = {name: process.turn for name, process in running.items()}
                return take_turns(turns, seconds, baseline=baseline), ready, failed
            except ProcessFailed as error:
                if error.contender == baseline:
                    raise
                failed[error.contender] = error.why
                del running[error.contender]


def take_steps(task: Task, line: Connection) -> None:
    """Prepares, makes a first step, then one for each word that comes by the line; answers with the seconds of each."""
    keep_freed_memory()
    gc.collect()  # the server's pages that Python writes to become this process's own before the clock runs
    started = time.perf_counter()
    turn = timed(task.stepper(), task.clock)
    turn()
    line.send(("done", time.perf_counter() - started))
    while True:
        line.recv()  # raises when the other end is closed
        if task.threads > 1:
            _wake_threads()
        line.send(("done", turn()))


class ContenderProcess:
    """One contender's process, seen from the one that asks it. Each call waits for its answer.

    Args:
        task: what it runs.
        work: (task, line, *arguments) -> None, called there; sends ``("done", value)`` for each answer.
        start: multiprocessing's way to start it; "spawn" for a fresh one, with the environment that there is now.
    """

    def __init__(
        self, task: Task, work: Callable[..., None] = take_steps, *arguments: object, start: str = "forkserver"
    ) -> None:
        self.task = task
        context: Any = multiprocessing.get_context(start)
        context.set_forkserver_preload(PRELOADED)
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(task, theirs, work, arguments))
        # Ctrl-C waits; processes that are started meanwhile don't get it, nor complain about it while they import.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        theirs.close()

    def turn(self) -> float:
        """Seconds that one step takes. Raises `ProcessFailed`."""
        if self.task.threads > 1:
            time.sleep(SPINNING)
        with suppress(OSError):  # a process that is gone: what became of it is heard below
            self._line.send("turn")
        return self.answer()

    def answer(self) -> Any:
        """The process's next answer, at first that it is ready. Raises `ProcessFailed`."""
        try:
            kind, said = self._line.recv()
        except (EOFError, OSError):
            self._process.join(GRACE)
            code = self._process.exitcode
            ending = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"status {code}"
            kind, said = "failed", f"its process ended with {ending}"
        if kind != "done":
            raise ProcessFailed(self.task.contender, said)
        return said

    def close(self) -> None:
        """Ends the process, at the latest after GRACE seconds."""
        self._line.close()
        try:
            self._process.join(GRACE)
        finally:
            if self._process.is_alive():
                self._process.kill()
                self._process.join()


def _serve(task: Task, line: Connection, work: Callable[..., None], arguments: tuple[object, ...]) -> None:
    """What a process does; its last answer may be ``("failed", why)``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is dealt with by the process that asks
    os.dup2(2, 1)  # what a library prints doesn't belong among the benchmark's figures
    if task.cores:
        os.sched_setaffinity(0, task.cores)
    os.environ["OMP_NUM_THREADS"] = str(task.threads)
    torch.set_num_threads(task.threads)
    torch.manual_seed(0)  # from which every contender starts
    with suppress(BrokenPipeError, ConnectionResetError):  # nobody listens any more
        try:
            for module in task.modules:
                register(module)
            work(task, line, *arguments)
        except Exception as error:  # another library may fail in any way; the others' figures still count
            line.send(("failed", f"{type(error).__name__}: {error}"))


def _wake_threads() -> None:
    """Gives torch's threads something to do: in training they are awake from the step before, here they slept."""
    spare, until = torch.zeros(1 << 18), time.perf_counter() + AWAKE
    while time.perf_counter() < until:
        spare.sin_()


def keep_freed_memory() -> None:
    """Lets glibc give no memory back, and take none that it would have to give back."""
    # Other C libraries have none.
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None:
        set_option(M_MMAP_MAX, 0)
        set_option(M_TRIM_THRESHOLD, -1)
