"""Times the benchmark's contenders in the papers' settings, and says in a table's cells what came of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ghostclip.bench import BASELINE, CONTENDERS, WORKLOADS, compare, register
from ghostclip.bench.machine import busy_warning, commit, describe
from ghostclip.bench.measure import keep_freed_memory
from ghostclip.bench.methods import OWN

__all__ = [
    "COLOURS",
    "Setting",
    "absent",
    "curves",
    "epoch",
    "legend",
    "median",
    "over",
    "plain",
    "plain_axis",
    "ratio",
    "spread",
    "start",
    "time_all",
]

COLOURS = {
    BASELINE: "#999999", "nonprivate-compiled": "#444444", "nxbp": "#d55e00", "multiloss": "#e69f00",
    "reweight": "#56b4e9", "cached": "#0072b2", "compiled": "#004466", "authors": "#cc79a7", "authors-multiloss":
    "#f0a0c8", "opacus-hooks": "#009e73", "opacus-ghost": "#66c2a5", "jax": "#f0e442", "vmap": "#8c564b",
    "vmap-compiled": "#c49c94", "gram": "#d55e00", "direct": "#e69f00", "auto": "#009e73",
}  # fmt: skip
MODULES = ("experiments.papers.workloads", "experiments.peers")


@dataclass(frozen=True)
class Setting:
    """What is timed.

    Attributes:
        label: as on the page.
        workload: by name.
        batch_size: examples in a batch.
        place: of a curve, on the x-axis; None where settings aren't numbers.
        curve: which one.
    """

    label: str
    workload: str
    batch_size: int
    place: float | None = None
    curve: str = ""


def start(paper: bool, modules: Sequence[str] = MODULES) -> dict[str, Any]:
    """One thread, the papers' workloads and other libraries made known; the results so far: machine and commit."""
    torch.set_num_threads(1)
    keep_freed_memory()
    for module in modules:
        register(module)
    if warning := busy_warning():
        print(warning, file=sys.stderr, flush=True)
    return {"machine": describe(), "commit": commit(), "setting": "paper" if paper else "small"}


def time_all(settings: Sequence[Setting], names: Sequence[str], seconds: float) -> dict[str, Any]:
    """What `compare` gives for each setting, by label, in seconds of the processor.

    There are as many cores as threads, one, so they are those of a clock on the wall where nothing else runs.

    Raises:
        SystemExit: one of ours, or a naive loop, is wrong or broke: no figure is published of it.
    """
    found = {}
    for setting in settings:
        contenders = {name: CONTENDERS[name] for name in names}
        row = compare(
            WORKLOADS[setting.workload], contenders, seconds, batch_size=setting.batch_size, clock=time.process_time,
        )  # fmt: skip
        _refuse_wrong(setting.label, row["contenders"])
        medians = {name: f"{r['over_nonprivate']['median']:.2f}" for name, r in row["contenders"].items()
                   if "over_nonprivate" in r}  # fmt: skip
        print(f"{setting.label}: {medians}", file=sys.stderr, flush=True)
        found[setting.label] = row | {"workload": setting.workload, "place": setting.place, "curve": setting.curve}
    return found


def _refuse_wrong(label: str, rows: Mapping[str, Any]) -> None:
    own = {name: row for name, row in rows.items() if name in OWN or name == "multiloss"}
    wrong = [name for name, row in own.items() if "failed" in row or not row.get("correct", True)]
    if wrong:
        raise SystemExit(f"{label}: wrong or broken: { {name: own[name] for name in wrong} }")


def median(row: Mapping[str, Any], name: str) -> float | None:
    """A contender's milliseconds a step in one setting; None without a figure."""
    found = row["contenders"].get(name, {})
    return found["ms"]["median"] if "ms" in found else None


def ratio(row: Mapping[str, Any], name: str, key: str = "over_nonprivate") -> float | None:
    """The median of paired ratios: a contender over non-private, or (``nxbp_over``) the loop over the contender."""
    found = row["contenders"].get(name, {})
    return found[key]["median"] if key in found else None


def over(row: Mapping[str, Any], name: str) -> str:
    """A cell: time over non-private with quartiles, FAILED, WRONG, or nothing."""
    found = row["contenders"].get(name, {})
    if "failed" in found:
        return "fails"
    text = spread(found["over_nonprivate"]) if "over_nonprivate" in found else ""
    return text if found.get("correct", True) else f"{text} WRONG by {found['gradient_error']:.2g}"


def spread(values: Mapping[str, float]) -> str:
    """Median and quartiles."""
    median, low, high = (plain(values[key]) for key in ("median", "low", "high"))
    return f"{median} ({low} to {high})"


def plain(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def epoch(row: Mapping[str, Any], name: str, examples: int) -> float | None:
    """Seconds that the steps of one epoch take: milliseconds a step x examples / batch size."""
    step = median(row, name)
    return None if step is None else step / 1e3 * examples / row["batch_size"]


def absent(found: Mapping[str, Any]) -> list[str]:
    """A sentence for each contender without a figure, and why."""
    reasons: dict[str, list[str]] = {}
    for label, row in found.items():
        for name, outcome in row["contenders"].items():
            for kind in outcome.keys() & {"missing", "failed"}:
                why = (outcome[kind].splitlines() or ["no reason given"])[0]
                reasons.setdefault(f"{name}: {why}".rstrip(": "), []).append(label)
    everywhere = len(found)
    return [f"{why} ({'everywhere' if len(labels) == everywhere else ', '.join(labels)})." for why, labels in
            reasons.items()]  # fmt: skip


def curves(
    axes: Any, found: Mapping[str, Any], names: Sequence[str], value: Callable[[Any, str], float | None]
) -> None:
    """Lines over the settings' places, a colour for each contender; into one panel."""
    for name in names:
        points = [(row["place"], value(row, name)) for row in found.values()]
        points = [point for point in points if point[1] is not None]
        if points:
            axes.plot(*zip(*points, strict=True), "-o", color=COLOURS.get(name), markersize=4, label=name)
    axes.set_xscale("log", base=2)
    plain_axis(axes)
    places = [row["place"] for row in found.values()]
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
    axes.grid(which="major", linewidth=0.3)


def plain_axis(axes: Any) -> None:
    """A logarithmic y-axis with plain numbers."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter("")


def legend(canvas: Any) -> None:
    """One legend for all panels, below them."""
    handles = {label: handle for axes in canvas.axes for handle, label in zip(*axes.get_legend_handles_labels(),
                                                                             strict=True)}  # fmt: skip
    canvas.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=8, fontsize=8, frameon=False)
