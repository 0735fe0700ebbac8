"""A benchmark's results as Markdown: a table that fits a page, and one with everything."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from ghostclip.bench.machine import in_words
from ghostclip.bench.methods import BASELINE, OWN

__all__ = ["full_markdown", "markdown"]

Rows = dict[str, dict[str, Any]]
NOTE = (
    "Step time over the non-private step of the same round: median (quartiles). Adam, noise and division included. "
    "Inputs are random tensors."
)
HEAP = (
    " Contenders take turns, {}, where the C library keeps freed memory (by itself it lets chance decide how much of it"
    " a step gives back and takes again, private or not)."
)
MEMORY_NOTE = (
    "Peak memory of a step over the non-private one's, each in a fresh process: what it rises by above model and data."
)
ALLOCATED_NOTE = (
    " {}: bytes that the C library allocates, once up to 3,000 other steps have filled Python's own caches."
)


def markdown(results: dict[str, Any]) -> str:
    """The table of ``results`` as the command writes them, with a line on how to read it, and the machine.

    A cell is the median of time over non-private time within a round; in brackets the quartiles. Of the other ways
    to train only the loop has a column; of the rest there is the fastest that is right.
    """
    names = _with_figures(results)
    shown, others = ([name for name in names if (name in OWN) is own] for own in (True, False))
    columns = {name: _column(name) for name in shown}
    if others:
        columns["fastest other"] = lambda rows: _fastest(rows, others)
    if any("nxbp_over" in work["contenders"].get("cached", {}) for work in results["workloads"].values()):
        columns["nxbp / cached"] = lambda rows: _spread(rows.get("cached", {}).get("nxbp_over"))
    return "\n".join([*_times(results, columns), *_reasons(results), *_memory(results, shown)])


def full_markdown(results: dict[str, Any]) -> str:
    """The same with a column for every contender that has a figure, and what each of them does."""
    names = _with_figures(results)
    about = [f"- {name}: {results['contenders'][name]}" for name in (BASELINE, *names)]
    times = _times(results, {name: _column(name) for name in names})
    return "\n".join([*times, "", *about, *_reasons(results), *_memory(results, names)])


def _with_figures(results: dict[str, Any]) -> list[str]:
    """Contenders with something to show, the baseline not among them."""
    works = results["workloads"].values()
    names = (name for name in results["contenders"] if name != BASELINE)
    return [name for name in names if any("missing" not in work["contenders"].get(name, {}) for work in works)]


def _times(results: dict[str, Any], columns: dict[str, Callable[[Rows], str]]) -> list[str]:
    """A row of step times for each workload, and how they were taken."""
    rows = []
    for name, work in results["workloads"].items():
        found = work["contenders"]
        first = [name, str(work["batch_size"]), f"{found[BASELINE]['ms']['median']:.3g}"]
        rows.append([*first, *(cell(found) for cell in columns.values())])
    header = ["workload", "batch", f"{BASELINE}, ms", *columns]
    place = f" Measured at commit {results['commit']}." if results.get("commit") else ""
    place_of_heap = {"apart": "each in a process of its own", "kept": "in one process"}
    notes = [NOTE, *(HEAP.format(words) for key, words in place_of_heap.items() if results.get(key))]
    return [*_table(header, rows), "", "".join(notes), f"Machine: {in_words(results['machine'])}.{place}"]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]


def _reasons(results: dict[str, Any]) -> list[str]:
    """A line for each contender without a figure, with the first line of why; one where it's the same everywhere."""
    places: dict[str, list[str]] = {}
    for name, work in results["workloads"].items():
        for contender, row in work["contenders"].items():
            for kind in row.keys() & {"missing", "failed"}:
                reason = textwrap.shorten((row[kind].splitlines() or ["no reason given"])[0], 160, placeholder=" ...")
                places.setdefault(f"{contender} {kind}: {reason}", []).append(name)
    whole = len(results["workloads"])
    return [f"- {'everywhere' if len(n) == whole > 1 else ', '.join(n)}, {why}" for why, n in places.items()]


def _column(name: str) -> Callable[[Rows], str]:
    """A contender's cells: its row on one workload as text."""

    def cell(rows: Rows) -> str:
        row = rows.get(name, {})
        if "failed" in row:
            return "FAILED"
        wrong = "" if row.get("correct", True) else f" WRONG (off by {row['gradient_error']:.1g})"
        return _spread(row.get("over_nonprivate")) + wrong

    return cell


def _fastest(rows: Rows, names: Sequence[str]) -> str:
    """The fastest of the contenders that are right, with its name."""
    found = ((name, rows.get(name, {})) for name in names)
    right = {n: row["over_nonprivate"] for n, row in found if "over_nonprivate" in row and row.get("correct", True)}
    best = min(right, key=lambda name: right[name]["median"], default=None)
    return "-" if best is None else f"{best} {_spread(right[best])}"


def _memory(results: dict[str, Any], names: Sequence[str]) -> list[str]:
    """A table of peak memory, where it was measured."""
    works = {name: work["memory"] for name, work in results["workloads"].items() if "memory" in work}
    measured = [name for name in names if any(name in rows for rows in works.values())]
    if not measured:
        return []
    rows = [
        [name, *(_memory_cell(found.get(other, {})) for other in (BASELINE, *measured))]
        for name, found in works.items()
    ]
    allocated = [name for name, found in works.items() if found[BASELINE].get("allocated")]
    note = MEMORY_NOTE + (ALLOCATED_NOTE.format(", ".join(allocated)) if allocated else "")
    return ["", *_table(["workload", f"{BASELINE}, MiB", *measured], rows), "", note]


def _memory_cell(row: dict[str, Any]) -> str:
    """The baseline's peak in MiB, another's over the baseline's."""
    if "over_nonprivate" in row:
        return f"{row['over_nonprivate']:.2f}"
    if "peak" not in row:
        return "FAILED" if "failed" in row else "-"
    return f"{row['peak'] / 2**20:.{1 if row['peak'] < 10 * 2**20 else 0}f}"


def _spread(spread: dict[str, float] | None) -> str:
    """Median and quartiles: two decimals below ten, whole numbers from a hundred on; a dash where there are none."""
    if spread is None:
        return "-"
    median, low, high = (
        f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 10 else f"{value:.2f}"
        for value in (spread["median"], spread["low"], spread["high"])
    )
    return f"{median} ({low} to {high})"
