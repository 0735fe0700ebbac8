"""A benchmark's results as Markdown: a table that fits a page, and one with everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ghostclip.bench.compare import BASELINE
from ghostclip.bench.machine import in_words
from ghostclip.bench.roster import PEERS

__all__ = ["full_markdown", "markdown"]

LookupGrads = dict[str, dict[str, Any]]
NOTE = (
    "Step time over the non-private step of the same round: median (quartiles). Adam, noise and division included. "
    "Inputs are random tensors."
)
APART = (
    " Contenders take turns, each in a process of its own, where the C library keeps freed memory (by itself it lets"
    " chance decide how much of it a step gives back and takes again, private or not)."
)
MEMORY_NOTE = (
    "Peak memory of a step over the non-private one's, each in a fresh process: what it rises by above model and data."
)
ALLOCATED_NOTE = (
    " {}: bytes that the C library allocates, once up to 3,000 other steps have filled Python's own caches; for so few"
    " the system's count of pages is too coarse."
)


def markdown(results: dict[str, Any]) -> str:
    """The table of ``results`` as the command writes them, with a line on how to read it, and the machine.

    A cell is the median of time over non-private time within a round; in brackets the quartiles. Of the other ways
    to train only the loop has a column; of the rest there is the fastest that is right.
    """
    shown = [name for name in _with_figures(results) if name == "nxbp" or name not in PEERS]
    others = [name for name in _with_figures(results) if name not in shown]
    columns: dict[str, Callable[[LookupGrads], str]] = {name: _column(name) for name in shown}
    if others:
        columns["fastest other"] = lambda rows: _fastest(rows, others)
    if any("nxbp_over" in work["contenders"].get("cached", {}) for work in results["workloads"].values()):
        columns["nxbp / cached"] = _loop_over_cached
    return "\n".join(
        [*_times(results, columns), "", _note(results), _machine(results), *_reasons(results), *_memory(results, shown)]
    )


def full_markdown(results: dict[str, Any]) -> str:
    """The same with a column for every contender that has a figure, and what each of them does."""
    names = _with_figures(results)
    lines = [*_times(results, {name: _column(name) for name in names}), "", _note(results), _machine(results)]
    about = [f"- {name}: {results['contenders'][name]}" for name in (BASELINE, *names)]
    return "\n".join([*lines, "", *about, *_reasons(results), *_memory(results, names)])


def _with_figures(results: dict[str, Any]) -> list[str]:
    """Contenders with something to show, the baseline not among them."""
    works = results["workloads"].values()
    names = (name for name in results["contenders"] if name != BASELINE)
    return [name for name in names if any("missing" not in work["contenders"].get(name, {}) for work in works)]


def _times(results: dict[str, Any], columns: dict[str, Callable[[LookupGrads], str]]) -> list[str]:
    """A row of step times for each workload."""
    header = ["workload", "batch", f"{BASELINE}, ms", *columns]
    rows = []
    for name, work in results["workloads"].items():
        found = work["contenders"]
        first = [name, str(work["batch_size"]), f"{found[BASELINE]['ms']['median']:.3g}"]
        rows.append([*first, *(cell(found) for cell in columns.values())])
    return _table(header, rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]


def _note(results: dict[str, Any]) -> str:
    """How the step times were taken."""
    return NOTE + (APART if results.get("apart") else "")


def _machine(results: dict[str, Any]) -> str:
    place = f" Measured at commit {results['commit']}." if results.get("commit") else ""
    return f"Machine: {in_words(results['machine'])}.{place}"


def _reasons(results: dict[str, Any]) -> list[str]:
    """A line for each contender without a figure, with the first line of why; one where it's the same everywhere."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for name, work in results["workloads"].items():
        for contender, row in work["contenders"].items():
            for kind in ("missing", "failed"):
                if kind in row:
                    reason = (row[kind].splitlines() or ["no reason given"])[0]
                    places.setdefault((contender, kind, reason), []).append(name)
    found = []
    for (contender, kind, reason), names in places.items():
        everywhere = len(names) == len(results["workloads"]) > 1
        found.append(f"- {'everywhere' if everywhere else ', '.join(names)}, {contender} {kind}: {reason}")
    return found


def _column(name: str) -> Callable[[LookupGrads], str]:
    return lambda rows: _cell(rows.get(name, {"missing": ""}))


def _cell(row: dict[str, Any]) -> str:
    """One contender on one workload."""
    if "missing" in row:
        return "-"
    if "failed" in row:
        return "FAILED"
    wrong = "" if row.get("correct", True) else f" WRONG (off by {row['gradient_error']:.1g})"
    return _spread(row["over_nonprivate"]) + wrong


def _fastest(rows: LookupGrads, names: Sequence[str]) -> str:
    """The fastest of the contenders that are right, with its name."""
    right = {
        name: rows[name]["over_nonprivate"]
        for name in names
        if "over_nonprivate" in rows.get(name, {}) and rows[name].get("correct", True)
    }
    if not right:
        return "-"
    best = min(right, key=lambda name: right[name]["median"])
    return f"{best} {_spread(right[best])}"


def _loop_over_cached(rows: LookupGrads) -> str:
    over = rows.get("cached", {}).get("nxbp_over")
    return "-" if over is None else _spread(over)


def _memory(results: dict[str, Any], names: Sequence[str]) -> list[str]:
    """A table of peak memory, where it was measured."""
    works = {name: work["memory"] for name, work in results["workloads"].items() if "memory" in work}
    measured = [name for name in names if any(name in rows for rows in works.values())]
    if not measured:
        return []
    rows = [
        [name, _mebibytes(found[BASELINE]), *(_memory_cell(found.get(other, {})) for other in measured)]
        for name, found in works.items()
    ]
    allocated = [name for name, found in works.items() if found[BASELINE].get("allocated")]
    note = MEMORY_NOTE + (ALLOCATED_NOTE.format(", ".join(allocated)) if allocated else "")
    return ["", *_table(["workload", f"{BASELINE}, MiB", *measured], rows), "", note]


def _mebibytes(row: dict[str, Any]) -> str:
    if "peak" not in row:
        return "FAILED"
    peak = row["peak"] / 2**20
    return f"{peak:.1f}" if peak < 10 else f"{peak:.0f}"


def _memory_cell(row: dict[str, Any]) -> str:
    return "FAILED" if "failed" in row else f"{row['over_nonprivate']:.2f}" if "over_nonprivate" in row else "-"


def _spread(spread: dict[str, float]) -> str:
    return f"{_figure(spread['median'])} ({_figure(spread['low'])} to {_figure(spread['high'])})"


def _figure(value: float) -> str:
    """Three digits where they mean something, whole numbers above a hundred."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 10 else f"{value:.2f}"
