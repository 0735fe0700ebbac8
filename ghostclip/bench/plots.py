"""A benchmark's results as a picture; needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ghostclip.bench.machine import in_words
from ghostclip.bench.methods import BASELINE

__all__ = ["plot_ratios"]

OURS = {"reweight": "#56b4e9", "cached": "#0072b2", "per-layer": "#009e73", "compiled": "#cc79a7"}
OURS |= {f"{name}-backward": color for name, color in OURS.items() if name != "compiled"}
OTHERS = ("#d55e00", "#e69f00", "#8c564b", "#7f7f7f", "#bcbd22", "#17becf", "#9467bd", "#e377c2", "#aaaa00", "#555555")
MARKERS = "s^vD<>pPX*"
NARROW = 2.5  # axes over less than this factor have a tick at each tenth


def plot_ratios(results: dict[str, Any], path: Path) -> None:
    """One line of marks for each workload: time over non-private on a logarithmic axis, quartiles as whiskers.

    Args:
        results: as the command writes them.
        path: where the picture goes.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    works = {name: work["contenders"] for name, work in results["workloads"].items()}
    names = [n for n in results["contenders"] if any("over_nonprivate" in rows.get(n, {}) for rows in works.values())]
    looks = OURS | dict(zip((n for n in names if n not in OURS), 2 * OTHERS, strict=False))
    figure, axes = pyplot.subplots(figsize=(10, 1.6 + 0.62 * len(works)), layout="constrained")
    axes.axvline(1.0, color="black", linewidth=1.2)
    for number, name in enumerate(names):
        shift = 0.7 * ((number + 0.5) / len(names) - 0.5)
        marks = [(place + shift, work[name]["over_nonprivate"]) for place, work in enumerate(works.values())
                 if "over_nonprivate" in work.get(name, {}) and work[name].get("correct", True)]  # fmt: skip
        whiskers = [[s["median"] - s["low"] for _, s in marks], [s["high"] - s["median"] for _, s in marks]]
        marker = "o" if name in OURS else MARKERS[number % len(MARKERS)]
        axes.errorbar([s["median"] for _, s in marks], [place for place, _ in marks], xerr=whiskers, linestyle="none",
                      elinewidth=0.8, label=name, color=looks[name], marker=marker, markersize=5)  # fmt: skip
    _finish(axes, results, list(works))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _finish(axes: Any, results: dict[str, Any], works: list[str]) -> None:
    """Axes, lines between workloads, names."""
    from matplotlib.ticker import FuncFormatter, MultipleLocator, NullLocator

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    if high < NARROW * low:
        axes.xaxis.set_major_locator(MultipleLocator(0.1))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "235" else ""))
    axes.set_yticks(range(len(works)), works)
    axes.set_ylim(len(works) - 0.5, -0.5)
    for place in range(1, len(works)):
        axes.axhline(place - 0.5, color="#dddddd", linewidth=0.6)
    axes.grid(axis="x", which="both", linewidth=0.3)
    axes.set_xlabel(f"time of a step over {BASELINE}, log scale; median and quartiles")
    axes.set_title(in_words(results["machine"]), fontsize=8)
    axes.legend(ncols=6, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.06 - 0.5 / len(works)), frameon=False)
