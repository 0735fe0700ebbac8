"""The largest batch whose step fits into a fixed limit of memory, beside non-private training.

The limit is FACTOR times what a non-private step of the workload's usual batch needs beyond model and data. Every trial
is a fresh process (see `ghostclip.bench.memory`); sizes are found to within five percent.

    python experiments/largest_batch.py [--workloads NAME ...] [--contenders NAME ...] [--out FOLDER]

writes largest_batch.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ghostclip.bench import BASELINE, WORKLOADS
from ghostclip.bench.machine import describe
from ghostclip.bench.memory import ask
from ghostclip.bench.processes import Task

FACTOR = 4.0
METHODS = ("reweight", "cached", "per-layer")
CLOSE = 1.05  # the bisection ends when the smallest batch too large is within this of the largest that fits


def peak(name: str, contender: str, batch_size: int) -> int:
    """Bytes that two steps need at their highest; RuntimeError when the contender can't make them."""
    found = ask(Task(name, contender, batch_size, threads=1), steps=2)
    if "failed" in found:
        raise RuntimeError(f"{contender} on {name}, batch {batch_size}: {found['failed']}")
    return found["peak"]


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


def sizes(name: str, contenders: Sequence[str], factor: float) -> dict[str, Any]:
    """The limit in bytes, and each contender's largest batch within it, as it is and over non-private's."""
    usual = WORKLOADS[name].batch_size
    limit = round(factor * peak(name, BASELINE, usual))
    found: dict[str, Any] = {"limit_bytes": limit, "batch": {}, "over_nonprivate": {}}
    for contender in (BASELINE, *contenders):
        start = found["batch"].get(BASELINE, round(factor * usual))
        found["batch"][contender] = largest_batch(partial(_within, limit, name, contender), max(1, start))
        found["over_nonprivate"][contender] = found["batch"][contender] / found["batch"][BASELINE]
        print(f"{name} {contender}: {found['batch'][contender]}", flush=True)
    return found


def _within(limit: int, name: str, contender: str, batch_size: int) -> bool:
    return peak(name, contender, batch_size) <= limit


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the search and writes its file; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--workloads", nargs="+", default=["cifar-cnn", "transformer", "gpt-128"], help="which to search"
    )
    parser.add_argument("--contenders", nargs="+", default=list(METHODS), help="beside the non-private step")
    parser.add_argument(
        "--factor", type=float, default=FACTOR, help=f"of the usual batch's memory (default: {FACTOR:g})"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the result")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"machine": describe(), "factor": options.factor, "workloads": {}}
    for name in options.workloads:
        results["workloads"][name] = sizes(name, options.contenders, options.factor)
        (options.out / "largest_batch.json").write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
