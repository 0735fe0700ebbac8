"""Cases one after another, in processes of one thread each."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import queue
import signal
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .batches import batch_case
from .data_pairs import data_case
from .outcome import Outcome, in_short
from .pairs import pair_case

__all__ = ["DATA_EVERY", "PAIRS_EVERY", "outcomes", "run_case"]

# One case in so many is one of pairs, and one of data sets that are collated.
PAIRS_EVERY, DATA_EVERY = 4, 8
# Seconds a case may take, before it counts as one that doesn't end.
MOST_SECONDS = 300


class NoEnd(Exception):
    """A case takes too long."""


def run_case(seed: int, show: bool = False) -> Outcome:
    """What came of one case, whatever it raised."""
    case = pair_case if seed % PAIRS_EVERY == 0 else data_case if seed % DATA_EVERY == 3 else batch_case
    handler = signal.signal(signal.SIGALRM, _no_end)
    signal.alarm(MOST_SECONDS)
    try:
        return case(seed, show)
    except NoEnd:
        return Outcome(seed, findings=[f"no end within {MOST_SECONDS} s"])
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        if show:
            traceback.print_exc()
        return Outcome(seed, findings=[f"raised {in_short(error)} at {Path(where.filename).name}:{where.lineno}"])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


def _no_end(*_: Any) -> None:
    raise NoEnd


def _work(first: int, step: int, found: Any, started: Any, stop: Any) -> None:
    """Cases ``first``, ``first + step``, ... until told to stop; the number of the one in work is in ``started``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    seed = first
    while not stop.is_set():
        started.value = seed
        found.put(run_case(seed))
        seed += step


def outcomes(seed: int, seconds: float, processes: int) -> Iterator[Outcome]:
    """What came of cases from ``seed`` on, as they end; a process that dies is an outcome too."""
    context = multiprocessing.get_context("spawn")
    found, stop = context.Queue(), context.Event()
    numbers = [context.Value("q", seed + place) for place in range(processes)]
    workers = [
        context.Process(target=_work, args=(seed + place, processes, found, numbers[place], stop), daemon=True)
        for place in range(processes)
    ]
    for worker in workers:
        worker.start()
    end = time.monotonic() + seconds
    dead: set[int] = set()
    try:
        while time.monotonic() < end and len(dead) < processes:
            with contextlib.suppress(queue.Empty):
                yield found.get(timeout=1.0)
            for place, worker in enumerate(workers):
                if worker.exitcode is not None and place not in dead:
                    dead.add(place)
                    yield Outcome(numbers[place].value, findings=[f"the process died with status {worker.exitcode}"])
    finally:
        stop.set()
        for worker in workers:
            worker.join(5.0)
            worker.terminate()
