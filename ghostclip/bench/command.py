"""The benchmark as a command: ``ghostclip bench``, and beside other libraries ``python -m experiments.peers``."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import get_all_start_methods
from pathlib import Path
from typing import Any

import torch

from ghostclip.bench.compare import compare
from ghostclip.bench.machine import busy_warning, commit, describe
from ghostclip.bench.memory import peaks
from ghostclip.bench.methods import BASELINE, CONTENDERS, OWN
from ghostclip.bench.table import full_markdown, markdown, plot_ratios
from ghostclip.bench.workloads import SETS, WORKLOADS

__all__ = ["add_arguments", "main", "run"]

DESCRIPTION = (
    "Times training steps with per-example clipping beside ordinary ones, in turns, on random data. Before the\n"
    "clock starts, each contender's clipped sum is compared with a plain loop's."
)
NOT_ALL_RIGHT, INTERRUPTED = 1, 130
MEMORY = [BASELINE, "reweight", "cached", "per-layer"]


def main(arguments: Sequence[str] | None = None, command: str = "ghostclip bench") -> int:
    """Runs the benchmark; returns the exit status, as `run` does.

    Args:
        arguments: as on the command line; None for the process's own.
        command: what is run, for the help.
    """
    parser = argparse.ArgumentParser(prog=command)
    add_arguments(parser)
    return run(parser.parse_args(arguments))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describes the benchmark and adds its options; what they hold is for `run`."""
    parser.description = DESCRIPTION
    parser.epilog = f"example: {parser.prog} --workloads mlp,cnn --seconds 5"
    add = parser.add_argument
    positive, count = _number(float, "a number > 0"), _number(int, "a whole number >= 1")
    sets = {**SETS, "all": tuple(WORKLOADS)}
    usual = [name for name, contender in CONTENDERS.items() if contender.usual]
    contenders = _names(CONTENDERS, {"usual": usual, "all": tuple(CONTENDERS)}, always=(BASELINE,))
    add("--workloads", type=_names(WORKLOADS, sets), default=list(SETS["usual"]), metavar="NAME,NAME",
        help=f"which to run: {', '.join(WORKLOADS)}; or a set: {', '.join(sets)} (default: usual)")  # fmt: skip
    add("--contenders", type=contenders, default=usual, metavar="NAME,NAME",
        help=f"which to time: {', '.join(CONTENDERS)}; or usual, all (default: usual, which is all but "
        f"{', '.join(name for name in CONTENDERS if name not in usual)})")  # fmt: skip
    add("--seconds", type=positive, default=10.0, help="measuring time a workload (default: 10)")
    add("--minutes", type=positive, default=None, help="start no further workload after so long (default: run all)")
    add("--threads", type=count, default=1, help="processor threads, and cores where the system can pin (default: 1)")
    add("--batch-size", type=count, default=None, metavar="B", help="examples a batch (default: each workload's own)")
    add("--device", type=_device, default="cpu", metavar="cpu|cuda", help="where to run (default: cpu)")
    add("--together", action="store_true", help="time all contenders in one process, as on a GPU (default: each in a "
        "process of its own)")  # fmt: skip
    add("--memory", type=contenders, nargs="?", const=MEMORY, default=[], metavar="NAME,NAME",
        help=f"measure peak memory too, each in a fresh process (alone: of {', '.join(MEMORY)})")  # fmt: skip
    add("--out", type=Path, metavar="FILE.json", help="write all figures as JSON, and beside it FILE.md and FILE.png, "
        "after every workload")  # fmt: skip
    add("--json", action="store_true", help="print one JSON object instead of the table")


def run(options: argparse.Namespace) -> int:
    """Runs the benchmark and prints its table, with what there is when Ctrl-C ends it.

    Returns:
        The exit status: 0, 1 when a contender of ours FAILED or its gradients were WRONG, or 130 when interrupted.
        Another library that fails or is wrong is a finding, and in the table.
    """
    if warning := busy_warning():
        print(warning, file=sys.stderr, flush=True)
    interrupted = False
    with _on_threads(options.threads):
        results: dict[str, Any] = {
            "machine": describe(options.device),
            "commit": commit(),
            "seconds": options.seconds,
            # On a GPU each process would hold a context in the memory that they share.
            "apart": options.device == "cpu" and not options.together and "forkserver" in get_all_start_methods(),
            "contenders": {name: CONTENDERS[name].about for name in options.contenders},
            "workloads": {},
        }
        try:
            _measure_all(results, options)
        except KeyboardInterrupt:
            interrupted = True
            print(f"interrupted: {len(results['workloads'])} workloads were measured", file=sys.stderr)
    if results["workloads"]:
        print(json.dumps(results, indent=1) if options.json else markdown(results))
    rows = [work["contenders"].get(name, {}) for work in results["workloads"].values() for name in OWN]
    wrong = any("failed" in row or not row.get("correct", True) for row in rows)
    return INTERRUPTED if interrupted else NOT_ALL_RIGHT if wrong else 0


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
        print(f"{name}: {work.about}", file=sys.stderr, flush=True)
        found = compare(work, chosen, options.seconds, device, options.batch_size, apart=results["apart"])
        if present:
            found["memory"] = peaks(name, present, found["batch_size"], device, options.threads)
        results["workloads"][name] = found
        if options.out is not None:
            _write(results, options.out)


def _write(results: dict[str, Any], out: Path) -> None:
    """The figures so far as JSON, Markdown and a picture."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    out.with_suffix(".md").write_text(full_markdown(results) + "\n")
    try:
        plot_ratios(results, out.with_suffix(".png"))
    except ModuleNotFoundError as error:
        print(f'no picture: {error.name} is not installed; run in a checkout: pip install ".[cli]"', file=sys.stderr)


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


def _number(convert: Callable[[str], float], expected: str) -> Callable[[str], float]:
    """A parser of finite numbers > 0."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if 0 < convert(text) < math.inf:
                return convert(text)
        raise argparse.ArgumentTypeError(f"expected {expected}; got {text}")

    return parse


def _device(text: str) -> str:
    if text not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected cpu or cuda; got {text}")
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch finds no CUDA device here; leave it out to measure on the processor")
    return text
