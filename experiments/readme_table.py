"""Writes the tables of the committed benchmarks: the short one into README.md, all others into docs/speed.md.

    python experiments/readme_table.py [--older]

Run it after `make bench`. On each page the block between the two markers is replaced; a test compares them. Tables that
are older than the last change of what a step runs are refused, since they may say nothing of today's code; --older
takes them. Each table names its commit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ghostclip.bench import markdown
from ghostclip.bench.machine import in_words

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
# {file: what its tables are about}, in the order of the page.
SPEED = {
    "bench.json": "## Step time and memory, one core",
    "bench-published.json": "## Models of transformers, one core",
    "bench-sizes.json": "## Other image sizes and longer texts, one core",
    "bench-backward.json": "## Losses computed by the caller, one core",
    "bench-two-threads.json": "## Two threads",
}
# {workload: its name in README.md}
SHORT = {
    "cnn": "CNN, 28 x 28 images",
    "lstm": "LSTM, 28 steps",
    "transformer": "Transformer block, 128 words",
    "gpt-128": "GPT-2-like, 8.3 M parameters, 128 words",
    "resnet18-64px": "ResNet-18 with GroupNorm, 64 x 64 images",
    "embedding": "word embedding and a linear layer, 256 words",
}
# {contender: its column}: uncompiled ones, then compiled ones.
COLUMNS = {
    "cached": "GhostClip",
    "reweight": "GhostClip, reweight",
    "opacus-ghost": "Opacus, ghost clipping",
    "opacus-hooks": "Opacus, hooks",
    "vmap": "torch.func",
    "nonprivate-compiled": "ordinary, compiled",
    "compiled": "GhostClip, compiled",
    "vmap-compiled": "torch.func, compiled",
}
# What a step runs.
FOLDERS = ("clipper", "clipping", "compiled", "graph", "nn", "norms", "native/*.c", "native/*.h")
CORE = [f"ghostclip/{name}" for name in FOLDERS]
START = "<!-- tables written by experiments/readme_table.py from experiments/results, do not edit -->"
END = "<!-- end of tables -->"


def read(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """A file of the benchmark's results."""
    return json.loads((folder / name).read_text())


def speed_tables(folder: Path = RESULTS) -> str:
    """All tables of the benchmark's files that are in ``folder``, each under its heading, after one of the networks."""
    files = {name: read(name, folder) for name in SPEED if (folder / name).exists()}
    tables = [f"{SPEED[name]}\n\nFrom `{name}`.\n\n{markdown(results)}" for name, results in files.items()]
    return "\n\n".join([networks(list(files.values())), *tables])


def networks(files: Sequence[dict[str, Any]]) -> str:
    """What each workload of the results is."""
    works = {name: work for results in files for name, work in results["workloads"].items()}
    rows = [f"| {name} | {work['about']} | {work['parameters']:,} |" for name, work in works.items()]
    return "\n".join(
        ["## Networks", "", "| workload | network and inputs | trained parameters |", "| --- | --- | --- |", *rows]
    )


def short_table(folder: Path = RESULTS) -> str:
    """Six networks beside Opacus and torch.func: medians of step time over the ordinary step of the same round."""
    results = read("bench.json", folder)
    header = ["network", "batch", "ordinary step, ms", *COLUMNS.values()]
    rows = [header, ["---"] * len(header)]
    for name, title in SHORT.items():
        work = results["workloads"][name]
        found = work["contenders"]
        ratios = [_ratio(found.get(column, {})) for column in COLUMNS]
        rows.append([title, str(work["batch_size"]), f"{found['nonprivate']['ms']['median']:.3g}", *ratios])
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    source = f"Measured at commit {results['commit']} on {in_words(results['machine'])}."
    return "\n".join([*lines, "", source])


def _ratio(row: dict[str, Any]) -> str:
    """A contender's cell."""
    if "over_nonprivate" not in row:
        return "can't run"
    return f"{row['over_nonprivate']['median']:.2f}" + ("" if row.get("correct", True) else ", wrong sum")


def with_table(text: str, tables: str) -> str:
    """``text`` with what is between the markers replaced; ValueError when a marker isn't there exactly once."""
    if text.count(START) != 1 or text.count(END) != 1:
        raise ValueError(f"expected one line {START!r} and one line {END!r}")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{tables}\n\n{END}{after}"


PAGES = {"README.md": short_table, "docs/speed.md": speed_tables}


def changed_since(commit: str) -> list[str]:
    """The commits after this one that changed what a step runs, "hash title" each."""
    git = ["git", "-C", str(ROOT), "log", "--format=%h %s", f"{commit}..HEAD", "--", *CORE]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.splitlines()


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrites both pages; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--older", action="store_true", help="take tables that are older than the code of a step")
    older = parser.parse_args(arguments).older
    for name in SPEED if not older else ():
        if (RESULTS / name).exists() and (later := changed_since(read(name)["commit"])):
            print(f"{name} is of {read(name)['commit']}, before {later[-1]!r} and {len(later) - 1} more commits that "
                  "changed what a step runs; run make bench first", file=sys.stderr)  # fmt: skip
            return 1
    for name, tables in PAGES.items():
        page = ROOT / name
        page.write_text(with_table(page.read_text(), tables()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
