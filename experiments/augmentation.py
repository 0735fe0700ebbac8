"""What K views of each example cost: a private step beside a non-private one on the same views.

The network is the paper's CNN with a batch of 32 examples, so a step has 32 K rows. Steps take turns, and the ratio is
the median of two times of the same round.

    python experiments/augmentation.py [--seconds S] [--no-memory] [--out FOLDER]

writes augmentation.json and augmentation.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "experiments"))

from contenders.views import VIEWS  # noqa: E402

from ghostclip.bench import register  # noqa: E402
from ghostclip.bench.machine import busy_warning, commit, describe, in_words  # noqa: E402
from ghostclip.bench.measure import keep_freed_memory, take_turns, timed  # noqa: E402
from ghostclip.bench.memory import Task, ask  # noqa: E402

WORKLOAD, BATCH = "cnn", 32


def measure(views: int, seconds: float, memory: bool, batch: int = BATCH) -> dict[str, Any]:
    """Time and peak memory of both steps."""
    names = {kind: f"{kind}, {views} views" for kind in ("nonprivate", "private")}
    tasks = {name: Task(WORKLOAD, name, batch) for name in names.values()}
    turns = {name: timed(task.stepper()) for name, task in tasks.items()}
    timings = take_turns(turns, seconds, baseline=names["nonprivate"])
    found: dict[str, Any] = {
        "views": views,
        "ms": {kind: asdict(timings.milliseconds(name)) for kind, name in names.items()},
        "time": asdict(timings.ratio(names["private"], names["nonprivate"])),
    }
    if memory:
        found["peak"] = {kind: ask(tasks[name])["peak"] for kind, name in names.items()}
        found["memory"] = found["peak"]["private"] / found["peak"]["nonprivate"]
    return found


def markdown(results: dict[str, Any]) -> str:
    """A table, one row for each number of views."""
    lines = [
        "| views K | rows in a step | non-private, ms | private, ms | private over non-private | non-private, MiB | "
        "private, MiB | private over non-private |",
        "| --- " * 8 + "|",
    ]
    for row in results["rows"]:
        ms, ratio = row["ms"], row["time"]
        cells = [str(row["views"]), str(results["batch_size"] * row["views"]), f"{ms['nonprivate']['median']:.3g}",
                 f"{ms['private']['median']:.3g}",
                 f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"]  # fmt: skip
        if "peak" in row:
            cells += [f"{row['peak'][kind] / 2**20:.1f}" for kind in ("nonprivate", "private")]
            cells += [f"{row['memory']:.2f}"]
        lines.append("| " + " | ".join([*cells, *[""] * (8 - len(cells))]) + " |")
    return "\n".join(lines) + "\n"


def page(results: dict[str, Any]) -> str:
    """The table with a heading and the machine."""
    place = f"commit {results['commit']}" if results["commit"] else "no commit known"
    return (
        f"# Several views of each example\n\nThe network `{WORKLOAD}` of the benchmark, {results['batch_size']} "
        f"examples a step. Time: median (quartiles).\n\n{markdown(results)}\nMeasured at {place}. Machine: "
        f"{in_words(results['machine'])}.\n\nComputed by `python experiments/augmentation.py`.\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--views", type=int, nargs="+", default=list(VIEWS), choices=VIEWS)
    parser.add_argument("--batch-size", type=int, default=BATCH, help=f"examples (default: {BATCH})")
    parser.add_argument("--seconds", type=float, default=20.0, help="measuring time for each K (default: 20)")
    parser.add_argument("--no-memory", action="store_true", help="time only")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_freed_memory()
    if warning := busy_warning():
        print(warning, file=sys.stderr)
    register("contenders.views")
    results: dict[str, Any] = {"machine": describe(), "commit": commit(), "batch_size": options.batch_size, "rows": []}
    for views in options.views:
        row = measure(views, options.seconds, not options.no_memory, options.batch_size)
        results["rows"].append(row)
        print(row, flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "augmentation.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "augmentation.md").write_text(page(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
