"""Contenders that take turns, each in a process of its own, as each would train.

In one process they share a heap, and what one contender frees decides how many page faults the next one takes. In
processes of their own chance still decides (a step of the convolutional network took 0 or 6,000, one of the GPT-like
model 0 to 47,000, which is 130 of 700 ms, without privacy or with it): what lies at the heap's end is given back to the
system and taken again. So the C library is told to keep what is freed, in every lane alike.

Every lane is forked from a server that has imported what a fresh process would import and has done nothing else
(multiprocessing's forkserver; it ends with the process that asks). A lane times its own step, so that what passes
between the processes isn't counted.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch

from ghostclip.bench.contenders import CannotRun
from ghostclip.bench.measure import Timings, alternate, timed
from ghostclip.bench.roster import CONTENDERS
from ghostclip.bench.workloads import WORKLOADS

__all__ = ["Entry", "Lane", "Laps", "Retired", "can_be_apart", "in_lanes", "keep_what_is_freed", "serve"]

# OpenMP's threads go on spinning for up to 20 ms after their last work, which would take cores from the next contender.
SPINNING = 0.025
# The second is what the first optimizer of a process imports: a second or two that each lane would spend again.
PRELOADED = [__name__, "torch._dynamo"]
# Seconds that threads are kept busy for before a step is timed.
AWAKE = 0.005
# Seconds that a lane has for ending by itself; one in the midst of a long step is killed.
GRACE = 2.0
# Of glibc's malloc.h: what mallopt sets.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


@dataclass(frozen=True)
class Entry:
    """What a lane runs.

    Attributes:
        workload, contender: names.
        batch_size: examples.
        max_norm: the clipping norm.
        device: "cpu" or "cuda".
        threads: processor threads torch may use.
        cores: those that the process is kept to; empty for any.
    """

    workload: str
    contender: str
    batch_size: int
    max_norm: float = 1.0
    device: str = "cpu"
    threads: int = 1
    cores: tuple[int, ...] = ()

    @classmethod
    def here(cls, workload: str, contender: str, batch_size: int, max_norm: float, device: str = "cpu") -> Entry:
        """An entry with the threads and cores that this process has."""
        cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
        return cls(workload, contender, batch_size, max_norm, device, torch.get_num_threads(), cores)


class Retired(RuntimeError):
    """A contender that can't go on.

    Attributes:
        contender: its name.
        row: ``{"failed": why}`` or ``{"missing": why}``.
    """

    def __init__(self, contender: str, kind: str, why: str) -> None:
        super().__init__(f"{contender} {kind}: {why}")
        self.contender, self.row = contender, {kind: why}


@dataclass
class Laps:
    """What `in_lanes` finds.

    Attributes:
        timings: the turns of those that stayed to the end.
        ready: {name: seconds that preparing and the first step took}.
        retired: {name: row of one that can't run or broke}.
    """

    timings: Timings = field(default_factory=Timings)
    ready: dict[str, float] = field(default_factory=dict)
    retired: dict[str, dict[str, str]] = field(default_factory=dict)


def can_be_apart() -> bool:
    """Whether this system can fork processes from a server."""
    return "forkserver" in multiprocessing.get_all_start_methods()


def in_lanes(entries: Mapping[str, Entry], seconds: float, *, baseline: str) -> Laps:
    """Times contenders against each other as `alternate` does, each in a process of its own.

    When one of them breaks in the midst of it, the others begin anew.

    Args:
        entries: by name.
        seconds, baseline: as for `alternate`.

    Raises:
        Retired: the baseline broke. No process is left behind, whatever is raised.
    """
    laps = Laps()
    with ExitStack() as stack:
        lanes: dict[str, Lane] = {}
        # One after the other: they would slow each other's preparation down.
        for name, entry in entries.items():
            lane = Lane(entry)
            stack.callback(lane.close)
            try:
                laps.ready[name] = lane.ready()
                lanes[name] = lane
            except Retired as gone:
                _let_go(gone, laps, baseline)
        while True:
            try:
                turns = {name: lane.turn for name, lane in lanes.items()}
                laps.timings = alternate(turns, seconds, baseline=baseline)
                return laps
            except Retired as gone:
                _let_go(gone, laps, baseline)
                del lanes[gone.contender]


def _let_go(gone: Retired, laps: Laps, baseline: str) -> None:
    if gone.contender == baseline:
        raise gone
    laps.retired[gone.contender] = gone.row


class Lane:
    """One contender's process, seen from the one that asks for turns. Each call waits for its answer."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(entry, theirs), name=f"lane of {entry.contender}")
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        """The process's number."""
        return self._process.pid

    def ready(self) -> float:
        """Seconds that preparing and the first step took; called once. Raises `Retired`."""
        return self._hear()

    def turn(self) -> float:
        """Seconds that one step takes. Raises `Retired`."""
        if self.entry.threads > 1:
            time.sleep(SPINNING)
        with suppress(OSError):  # a process that is gone: what became of it is heard below
            self._line.send("turn")
        return self._hear()

    def close(self) -> None:
        """Ends the process, at the latest after GRACE seconds."""
        self._line.close()
        try:
            self._process.join(GRACE)
        finally:
            if self._process.is_alive():
                self._process.kill()
                self._process.join()

    def _hear(self) -> float:
        try:
            kind, said = self._line.recv()
        except (EOFError, OSError):
            self._process.join(GRACE)
            kind, said = "failed", f"its process ended with {_ending(self._process.exitcode)}"
        if kind != "seconds":
            raise Retired(self.entry.contender, kind, said)
        return said


def _ending(code: int | None) -> str:
    """How a process ended, in words."""
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"status {code}"


def serve(entry: Entry, line: Connection) -> None:
    """What a lane's process does: prepares, makes a first step, then one for each word that comes by the line.

    Every answer is ``("seconds", how many)``; the last one may be ``("missing", why)`` or ``("failed", why)``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is dealt with by the process that asks
    os.dup2(2, 1)  # what a library prints doesn't belong among the benchmark's figures
    with suppress(BrokenPipeError, ConnectionResetError):  # nobody listens any more
        try:
            _settle(entry)
            workload = WORKLOADS[entry.workload]
            model, inputs, targets = workload.on(entry.device, entry.batch_size)
            started = time.perf_counter()
            prepared = CONTENDERS[entry.contender].prepare(model, workload.losses, entry.max_norm)
            turn = timed(prepared.turn(inputs, targets))
            turn()
            line.send(("seconds", time.perf_counter() - started))
            for _ in _words(line):
                if entry.threads > 1:
                    _wake_threads()
                line.send(("seconds", turn()))
        except CannotRun as error:
            line.send(("missing", str(error)))
        except Exception as error:  # another library may fail in any way; the others' figures still count
            line.send(("failed", f"{type(error).__name__}: {error}"))


def _wake_threads() -> None:
    """Gives torch's threads something to do: in training they are awake from the step before, here they slept."""
    spare, until = torch.zeros(1 << 18), time.perf_counter() + AWAKE
    while time.perf_counter() < until:
        spare.sin_()


def _words(line: Connection) -> Iterator[object]:
    """What comes by the line until the other end is closed."""
    with suppress(EOFError, ConnectionResetError):
        while True:
            yield line.recv()


def _settle(entry: Entry) -> None:
    """Takes the cores and threads of the entry, and the seed that every contender starts from."""
    keep_what_is_freed()
    if entry.cores:
        os.sched_setaffinity(0, entry.cores)
    os.environ["OMP_NUM_THREADS"] = str(entry.threads)
    torch.set_num_threads(entry.threads)
    gc.collect()  # the server's pages that Python writes to become this process's own before the clock runs
    torch.manual_seed(0)


def keep_what_is_freed() -> None:
    """Lets glibc give no memory back, and take none that it would have to give back."""
    if sys.platform != "linux":
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if set_option is not None:
        set_option(M_MMAP_MAX, 0)
        set_option(M_TRIM_THRESHOLD, -1)
