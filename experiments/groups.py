"""What clipping group by group costs beside flat clipping: time and memory of a step, on the benchmark's workloads.

All are GhostClipper with its default second pass, and take the same noise and Adam. Their
steps take turns, and each is reported as the median of its time over the flat step's of the same round.

    python experiments/groups.py [--workloads NAME ...] [--seconds S] [--no-memory] [--out FOLDER]

writes groups.json and groups.md.
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

from contenders.groups import CONTENDERS, DEFAULT  # noqa: E402

from ghostclip.bench import WORKLOADS, register  # noqa: E402
from ghostclip.bench.machine import busy_warning, commit, describe, in_words  # noqa: E402
from ghostclip.bench.measure import keep_freed_memory, take_turns, timed  # noqa: E402
from ghostclip.bench.memory import Task, ask  # noqa: E402

NAMES = tuple(contender.name for contender in CONTENDERS)
USUAL = ("mlp", "cnn", "lstm", "transformer", "cifar-cnn", "gpt-128")
LIMIT = 1.05


def measure(workload: str, seconds: float, memory: bool) -> dict[str, Any]:
    """Time and peak memory of each policy, and over flat clipping's."""
    size = WORKLOADS[workload].batch_size
    tasks = {name: Task(workload, name, size) for name in NAMES}
    timings = take_turns({name: timed(task.stepper()) for name, task in tasks.items()}, seconds, baseline=DEFAULT)
    found: dict[str, Any] = {}
    for name in NAMES:
        found[name] = {"ms": asdict(timings.milliseconds(name)), "time": asdict(timings.ratio(name, DEFAULT))}
        if memory:
            found[name] |= ask(tasks[name])
    for row in found.values():
        if "peak" in row and "peak" in found[DEFAULT]:
            row["memory"] = row["peak"] / found[DEFAULT]["peak"]
    return {"batch_size": size, "policies": {name: found[name] for name in NAMES}}


def missed(results: dict[str, Any]) -> list[str]:
    """Where a policy takes more than LIMIT times the time or memory of flat clipping."""
    said = []
    for workload, found in results["workloads"].items():
        for name, row in found["policies"].items():
            ratios = {"time": row.get("time", {}).get("median", 0.0), "memory": row.get("memory", 0.0)}
            said += [f"{workload}, {name}: {ratio:.2f} times the {of}" for of, ratio in ratios.items() if ratio > LIMIT]
    return said


def markdown(results: dict[str, Any]) -> str:
    """Two tables, and what passes the limit."""
    others = [name for name in NAMES if name != DEFAULT]
    head = ["workload", "batch", "flat", *others]
    lines = ["# Clipping group by group beside flat clipping", ""]
    for title, of in (("Time of a step over the flat step's, median (quartiles)", "time"), ("Peak memory over the flat "
                      "step's", "memory")):  # fmt: skip
        lines += [f"{title}:", "", "| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
        for workload, found in results["workloads"].items():
            rows = found["policies"]
            cells = [workload, str(found["batch_size"]), _flat(rows[DEFAULT], of)]
            lines.append("| " + " | ".join([*cells, *(_ratio(rows[name], of) for name in others)]) + " |")
        lines.append("")
    said = missed(results)
    lines += [f"More than {LIMIT - 1:.0%} above flat clipping: {'; '.join(said) if said else 'none'}.", ""]
    place = f"commit {results['commit']}" if results["commit"] else "no commit known"
    lines += [f"Measured at {place}. Machine: {in_words(results['machine'])}.", "",
              "Computed by `python experiments/groups.py`."]  # fmt: skip
    return "\n".join([*lines, ""])


def _flat(row: dict[str, Any], of: str) -> str:
    if of == "time":
        return f"{row['ms']['median']:.3g} ms"
    return f"{row['peak'] / 2**20:.1f} MiB" if "peak" in row else ""


def _ratio(row: dict[str, Any], of: str) -> str:
    if of not in row:
        return "failed" if "failed" in row else ""
    ratio = row[of]
    return f"{ratio:.3f}" if of == "memory" else f"{ratio['median']:.3f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", default=list(USUAL), choices=tuple(WORKLOADS))
    parser.add_argument("--seconds", type=float, default=15.0, help="measuring time a workload (default: 15)")
    parser.add_argument("--no-memory", action="store_true", help="time only")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_freed_memory()
    if warning := busy_warning():
        print(warning, file=sys.stderr)
    register("contenders.groups")
    results: dict[str, Any] = {"machine": describe(), "commit": commit(), "workloads": {}}
    for workload in options.workloads:
        results["workloads"][workload] = measure(workload, options.seconds, not options.no_memory)
        print(workload, {name: row.get("time", row) for name, row in
                         results["workloads"][workload]["policies"].items()}, flush=True)  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "groups.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "groups.md").write_text(markdown(results))
    print("\n".join(missed(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
