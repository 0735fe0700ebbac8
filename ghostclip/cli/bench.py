"""ghostclip bench: step times on this machine, and beside other libraries ``python -m experiments.peers``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ghostclip.bench.compare import compare
from ghostclip.bench.machine import busy_warning, commit, describe
from ghostclip.bench.measure import keep_freed_memory
from ghostclip.bench.memory import peaks
from ghostclip.bench.methods import BASELINE, CONTENDERS, OWN
from ghostclip.bench.table import full_markdown, markdown
from ghostclip.bench.workloads import SETS, WORKLOADS
from ghostclip.cli.arguments import UsageError, as_path, print_json
from ghostclip.validate import positive, positive_int

__all__ = ["add_bench", "run_bench"]

DESCRIPTION = (
    "Times training steps with per-example clipping beside ordinary ones, in turns, on random data. Before the\n"
    "clock starts, each contender's clipped sum is compared with a plain loop's."
)
NOT_ALL_RIGHT, INTERRUPTED = 1, 130
MEMORY = [BASELINE, "reweight", "cached", "per-layer"]


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Describes the benchmark and adds its options; what they hold is for `run_bench`."""
    parser.description = DESCRIPTION
    parser.epilog = "example: ghostclip bench --workloads mlp,cnn --seconds 5"
    add = parser.add_argument
    sets = {**SETS, "all": tuple(WORKLOADS)}
    usual = [name for name, contender in CONTENDERS.items() if contender.usual]
    contenders = _names(CONTENDERS, {"usual": usual, "all": tuple(CONTENDERS)}, always=(BASELINE,))
    add("--workloads", type=_names(WORKLOADS, sets), default=list(SETS["usual"]), metavar="NAME,NAME",
        help=f"which to run: {', '.join(WORKLOADS)}; or a set: {', '.join(sets)} (default: usual)")  # fmt: skip
    add("--contenders", type=contenders, default=usual, metavar="NAME,NAME",
        help=f"which to time: {', '.join(CONTENDERS)}; or usual, all (default: usual, which is all but "
        f"{', '.join(name for name in CONTENDERS if name not in usual)})")  # fmt: skip
    add("--seconds", type=float, default=10.0, help="measuring time a workload (default: 10)")
    add("--minutes", type=float, default=None, help="start no further workload after so long (default: run all)")
    add("--threads", type=int, default=1, help="processor threads, and cores where the system can pin (default: 1)")
    add("--batch-size", type=int, default=None, metavar="B", help="examples a batch (default: each workload's own)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to run (default: cpu)")
    add("--memory", type=contenders, nargs="?", const=MEMORY, default=[], metavar="NAME,NAME",
        help=f"measure peak memory too, each in a fresh process (alone: of {', '.join(MEMORY)})")  # fmt: skip
    add("--out", type=as_path, metavar="FILE.json", help="write all figures as JSON, and beside it FILE.md, after "
        "every workload")  # fmt: skip


def run_bench(options: argparse.Namespace) -> int:
    """Runs the benchmark and prints its table, with what there is when Ctrl-C ends it.

    Returns:
        The exit status: 0, 1 when a contender of ours FAILED or its gradients were WRONG, or 130 when interrupted.
        Another library that fails or is wrong is a finding, and in the table.
    """
    _check(options)
    if options.device == "cpu":
        keep_freed_memory()
    if warning := busy_warning():
        print(warning, file=sys.stderr, flush=True)
    interrupted = False
    with _on_threads(options.threads):
        results: dict[str, Any] = {
            "machine": describe(options.device),
            "commit": commit(),
            "seconds": options.seconds,
            "kept": options.device == "cpu",
            "contenders": {name: CONTENDERS[name].about for name in options.contenders},
            "workloads": {},
        }
        try:
            _measure_all(results, options)
        except KeyboardInterrupt:
            interrupted = True
            print(f"interrupted: {len(results['workloads'])} workloads were measured", file=sys.stderr)
    if results["workloads"]:
        print_json(results) if options.json else print(markdown(results))
    rows = [work["contenders"].get(name, {}) for work in results["workloads"].values() for name in OWN]
    wrong = any("failed" in row or not row.get("correct", True) for row in rows)
    return INTERRUPTED if interrupted else NOT_ALL_RIGHT if wrong else 0


def _check(options: argparse.Namespace) -> None:
    """Everything that can be told before anything runs."""
    positive(seconds=options.seconds)
    positive_int(threads=options.threads)
    if options.minutes is not None:
        positive(minutes=options.minutes)
    if options.batch_size is not None:
        positive_int(batch_size=options.batch_size)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("torch finds no CUDA device here; leave out --device cuda to measure on the processor")


def _measure_all(results: dict[str, Any], options: argparse.Namespace) -> None:
    """Fills in one workload after the other, and writes the files after each."""
    started = time.monotonic()
    chosen = {name: CONTENDERS[name] for name in options.contenders}
    present = [name for name in options.memory if CONTENDERS[name].missing() is None]
    for name in options.workloads:
        over = options.minutes is not None and time.monotonic() - started > 60 * options.minutes
        if over and results["workloads"]:
            print(f"{name}: left out, {options.minutes:g} minutes are over", file=sys.stderr, flush=True)
            continue
        work, device = WORKLOADS[name], options.device
        # On one core they are the same, but that other programs don't lengthen the processor's seconds.
        clock = time.process_time if device == "cpu" and options.threads == 1 else time.perf_counter
        print(f"{name}: {work.about}", file=sys.stderr, flush=True)
        # Functions that were compiled for eight networks would run uncompiled for the others.
        torch.compiler.reset()
        found = compare(work, chosen, options.seconds, device, options.batch_size, clock=clock)
        if present:
            found["memory"] = peaks(name, present, found["batch_size"], device, options.threads)
        results["workloads"][name] = found
        if options.out is not None:
            _write(results, options.out)


def _write(results: dict[str, Any], out: Path) -> None:
    """The figures so far as JSON and as Markdown."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    out.with_suffix(".md").write_text(full_markdown(results) + "\n")


@contextlib.contextmanager
def _on_threads(threads: int) -> Iterator[None]:
    """Keeps torch to so many threads, and every library to so many cores, where the system can; undone at the end."""
    before, pinned = torch.get_num_threads(), None
    if hasattr(os, "sched_setaffinity"):
        pinned = os.sched_getaffinity(0)
        os.sched_setaffinity(0, sorted(pinned)[-threads:])
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if pinned is not None:
            os.sched_setaffinity(0, pinned)


def _names(
    known: Mapping[str, object], sets: Mapping[str, Sequence[str]], always: Sequence[str] = ()
) -> Callable[[str], list[str]]:
    """A parser of comma-separated names and names of sets; those ``always`` there come first if they aren't."""

    def parse(text: str) -> list[str]:
        words = [word.strip() for word in text.split(",") if word.strip()]
        unknown = [word for word in words if word not in known and word not in sets]
        if unknown or not words:
            wrong = ", ".join(unknown) or "nothing"
            raise argparse.ArgumentTypeError(f"expected names among {', '.join([*known, *sets])}; got {wrong}")
        names = dict.fromkeys(name for word in words for name in sets.get(word, (word,)))
        return [*(name for name in always if name not in names), *names]

    return parse
