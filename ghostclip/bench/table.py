"""A benchmark's results as a Markdown table."""

from __future__ import annotations

from typing import Any

from ghostclip.bench.compare import BASELINE
from ghostclip.bench.machine import in_words

__all__ = ["markdown"]


def markdown(results: dict[str, Any]) -> str:
    """The table of ``results`` as the command writes them, with a line on how to read it and the machine.

    A cell is the median of time over non-private time within a round; in brackets the quartiles.
    """
    names = [name for name in results["contenders"] if name != BASELINE]
    header = ["workload", "batch", f"{BASELINE}, ms", *names]
    with_loop = any("nxbp_over" in work["contenders"].get("cached", {}) for work in results["workloads"].values())
    if with_loop:
        header.append("nxbp / cached")
    rows = [_cells(name, work, names, with_loop) for name, work in results["workloads"].items()]
    lines = [_line(header), _line(["---"] * len(header)), *map(_line, rows)]
    note = (
        "Step time over the non-private step of the same round: median (quartiles). Adam, noise and division included. "
        "Inputs are random tensors."
    )
    return "\n".join([*lines, "", note, f"Machine: {in_words(results['machine'])}.", *_reasons(results)])


def _reasons(results: dict[str, Any]) -> list[str]:
    """A line for each contender that has no figure, with the first line of why."""
    return [
        f"- {name}, {contender} {kind}: {row[kind].splitlines()[0]}"
        for name, work in results["workloads"].items()
        for contender, row in work["contenders"].items()
        for kind in ("missing", "failed")
        if kind in row
    ]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(name: str, work: dict[str, Any], names: list[str], with_loop: bool) -> list[str]:
    found = work["contenders"]
    cells = [name, str(work["batch_size"]), f"{found[BASELINE]['ms']['median']:.3g}"]
    cells += [_cell(found[contender]) for contender in names]
    if with_loop:
        over = found.get("cached", {}).get("nxbp_over")
        cells.append("-" if over is None else _spread(over))
    return cells


def _cell(row: dict[str, Any]) -> str:
    """One contender on one workload."""
    if "missing" in row:
        return "-"
    if "failed" in row:
        return "FAILED"
    wrong = "" if row.get("correct", True) else f" WRONG (off by {row['gradient_error']:.1g})"
    return _spread(row["over_nonprivate"]) + wrong


def _spread(spread: dict[str, float]) -> str:
    return f"{_figure(spread['median'])} ({_figure(spread['low'])} to {_figure(spread['high'])})"


def _figure(value: float) -> str:
    """Three digits where they mean something, whole numbers above a hundred."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 10 else f"{value:.2f}"
