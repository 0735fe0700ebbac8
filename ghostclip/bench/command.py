"""The benchmark as a command: options and run of ``ghostclip bench`` and of ``python -m ghostclip.bench``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ghostclip.bench.compare import BASELINE, compare
from ghostclip.bench.lanes import can_be_apart
from ghostclip.bench.machine import busy_warning, commit, describe
from ghostclip.bench.memory import peaks
from ghostclip.bench.roster import CONTENDERS, PEERS, USUAL
from ghostclip.bench.table import full_markdown, markdown
from ghostclip.bench.workloads import SETS, WORKLOADS

__all__ = ["add_arguments", "run"]

NOT_ALL_RIGHT, INTERRUPTED = 1, 130
MEMORY = [BASELINE, "reweight", "cached", "per-layer"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options; what they hold is for `run`."""
    add = parser.add_argument
    sets = {**SETS, "all": tuple(WORKLOADS)}
    add("--workloads", type=_names(WORKLOADS, sets), default=list(SETS["usual"]), metavar="NAME,NAME",
        help=f"which to run: {', '.join(WORKLOADS)}; or a set: {', '.join(sets)} (default: usual)")  # fmt: skip
    add("--contenders", type=_contenders, default=list(USUAL), metavar="NAME,NAME",
        help=f"which to time: {', '.join(CONTENDERS)}; or usual, all (default: usual, which is all but "
        f"{', '.join(name for name in CONTENDERS if name not in USUAL)})")  # fmt: skip
    add("--seconds", type=_positive, default=10.0, help="measuring time a workload (default: 10)")
    add("--minutes", type=_positive, default=None, help="start no further workload after so long (default: run all)")
    add("--threads", type=_count, default=1, help="processor threads, and cores where the system can pin (default: 1)")
    add("--batch-size", type=_count, default=None, metavar="B", help="examples a batch (default: each workload's own)")
    add("--device", type=_device, default="cpu", metavar="cpu|cuda", help="where to run (default: cpu)")
    add("--together", action="store_true", help="time all contenders in one process, as on a GPU (default: each in a "
        "process of its own)")  # fmt: skip
    add("--memory", type=_contenders, nargs="?", const=MEMORY, default=[], metavar="NAME,NAME",
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
    results: dict[str, Any] = {
        "machine": {},
        "commit": commit(),
        "seconds": options.seconds,
        "apart": _apart(options),
        "contenders": {name: CONTENDERS[name].about for name in options.contenders},
        "workloads": {},
    }
    interrupted = False
    with _on_threads(options.threads):
        results["machine"] = describe(options.device)
        try:
            _measure_all(results, options)
        except KeyboardInterrupt:
            interrupted = True
            print(f"interrupted: {len(results['workloads'])} workloads were measured", file=sys.stderr)
    if results["workloads"]:
        print(json.dumps(results, indent=1) if options.json else markdown(results))
    if interrupted:
        return INTERRUPTED
    return 0 if _all_correct(results) else NOT_ALL_RIGHT


def _measure_all(results: dict[str, Any], options: argparse.Namespace) -> None:
    """Fills in one workload after the other, and writes the files after each."""
    started = time.monotonic()
    for name in options.workloads:
        over = options.minutes is not None and time.monotonic() - started > 60 * options.minutes
        if over and results["workloads"]:
            print(f"{name}: left out, {options.minutes:g} minutes are over", file=sys.stderr, flush=True)
            continue
        print(f"{name}: {WORKLOADS[name].about}", file=sys.stderr, flush=True)
        results["workloads"][name] = _measure(name, options)
        _write(results, options.out)


def _measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One workload's figures, with memory where it was asked for."""
    chosen = {contender: CONTENDERS[contender] for contender in options.contenders}
    found = compare(WORKLOADS[name], chosen, options.seconds, options.device, options.batch_size, apart=_apart(options))
    present = [contender for contender in options.memory if CONTENDERS[contender].missing() is None]
    if present:
        found["memory"] = peaks(name, present, found["batch_size"], options.device, options.threads)
    return found


def _apart(options: argparse.Namespace) -> bool:
    """Not on a GPU, where each process would hold a context in the memory that they share."""
    return options.device == "cpu" and can_be_apart() and not options.together


def _write(results: dict[str, Any], out: Path | None) -> None:
    """The figures so far as JSON, Markdown and a picture."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    out.with_suffix(".md").write_text(full_markdown(results) + "\n")
    try:
        from ghostclip.bench.plots import plot_ratios

        plot_ratios(results, out.with_suffix(".png"))
    except ModuleNotFoundError as error:
        print(f'no picture: {error.name} is not installed; run: pip install "ghostclip[cli]"', file=sys.stderr)


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


def _names(known: Collection[str], sets: Mapping[str, Collection[str]]) -> Callable[[str], list[str]]:
    """A parser of comma-separated names and names of sets."""

    def parse(text: str) -> list[str]:
        words = [word.strip() for word in text.split(",") if word.strip()]
        unknown = [word for word in words if word not in known and word not in sets]
        if unknown or not words:
            wrong = ", ".join(unknown) or "nothing"
            raise argparse.ArgumentTypeError(f"expected names among {', '.join([*known, *sets])}; got {wrong}")
        return list(dict.fromkeys(name for word in words for name in sets.get(word, (word,))))

    return parse


def _contenders(text: str) -> list[str]:
    """Names of contenders; the baseline is put first where it is missing."""
    names = _names(CONTENDERS, {"usual": USUAL, "all": tuple(CONTENDERS)})(text)
    return names if BASELINE in names else [BASELINE, *names]


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number > 0; got {text}")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1; got {text}")
    return int(text)


def _device(text: str) -> str:
    if text not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected cpu or cuda; got {text}")
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch finds no CUDA device here; leave it out to measure on the processor")
    return text


def _all_correct(results: dict[str, Any]) -> bool:
    tables = (work["contenders"] for work in results["workloads"].values())
    rows = [row for table in tables for name, row in table.items() if name not in PEERS or name == "nxbp"]
    return all(row.get("correct", True) and "failed" not in row for row in rows)
