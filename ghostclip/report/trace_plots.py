"""Plots of a trace as PNG bytes. They show private data, as their titles say: don't publish them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ghostclip import traces
from ghostclip.report.plots import COLOURS, GREY, NOT_PRIVATE, RESOLUTION, _axes, _label, _log_ticks, _png
from ghostclip.validate import one_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["heatmap", "histograms", "threshold_paths", "write"]

# What a heatmap can show of each group and step: its name on the colour bar, and the colours' range where it is fixed.
SHOWN: dict[str, tuple[str, tuple[float, float] | None]] = {
    "median_norm": ("median gradient norm", None),
    "fraction_clipped": ("fraction clipped", (0.0, 1.0)),
    "cosine": ("cosine of clipped and unclipped sum", None),
    "snr": ("signal to noise", None),
}
LOGARITHMIC = ("median_norm", "snr")


def heatmap(found: Mapping[str, Any], value: str = "median_norm") -> bytes:
    """A heatmap of one value, with a row for each group and a column for each traced step.

    Args:
        found: the result of `ghostclip.traces.read`.
        value: "median_norm" (of the examples), "fraction_clipped", "cosine" (of clipped and unclipped sum) or "snr"
            (norm of the clipped sum over that of the noise).

    Returns:
        A PNG file's bytes.

    Raises:
        ValueError: ``value`` is none of these.
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure

    about, limits = SHOWN[one_of(tuple(SHOWN), value=value)]
    groups, steps = found["groups"], found["step"]
    values = (_medians(found) if value == "median_norm" else found[value]).T
    figure = Figure(figsize=(7.2, 1.6 + 0.3 * min(len(groups), 60)), dpi=RESOLUTION, layout="constrained")
    axes = figure.add_subplot()
    shown = values[np.isfinite(values) & (values > 0 if value in LOGARITHMIC else True)]
    low, high = limits or ((shown.min(), shown.max()) if len(shown) else (0.1, 1.0))
    logarithmic = value in LOGARITHMIC and high > 2 * low
    scale: Any = (LogNorm if logarithmic else Normalize)(low, high)
    # A column reaches half-way to its neighbours, so that steps stand where they belong.
    image = axes.pcolormesh(_edges(steps), np.arange(len(groups) + 1), values, norm=scale, cmap="viridis")
    axes.set_yticks(np.arange(len(groups)) + 0.5, [name or "(the model)" for name in groups], fontsize=8)
    axes.invert_yaxis()
    _label(axes, f"{about[0].upper()}{about[1:]}\n({NOT_PRIVATE})", "step", "")
    axes.grid(visible=False)
    axes.locator_params(axis="x", integer=True)
    bar = figure.colorbar(image, ax=axes, label=about)
    if logarithmic:
        _log_ticks(bar.ax.yaxis, low, high)
    return _png(figure)


def histograms(found: Mapping[str, Any], groups: Sequence[str] | None = None) -> bytes:
    """A histogram for each group of its examples' norms in all traced steps, with the range of its thresholds.

    Args:
        found: the result of `ghostclip.traces.read`.
        groups: the groups to show; None: "all" and the first five others.

    Returns:
        A PNG file's bytes.

    Raises:
        ValueError: a group is not in the trace.
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    names = [found["groups"][-1], *found["groups"][:-1][:5]] if groups is None else list(groups)
    if unknown := set(names) - set(found["groups"]):
        raise ValueError(f"groups must be among {found['groups']}; got {sorted(unknown)}")
    columns, rows = min(3, len(names)), -(-len(names) // 3)
    figure = Figure(figsize=(1.2 + 3.0 * columns, 0.8 + 2.6 * rows), dpi=RESOLUTION, layout="constrained")
    figure.suptitle(f"Per-example gradient norms of {len(found['step'])} traced steps\n({NOT_PRIVATE})", fontsize=11)
    for number, name in enumerate(names, 1):
        place = found["groups"].index(name)
        norms = np.concatenate([each[place] for each in found["norms"]]).astype(float)
        thresholds = found["threshold"][:, place]
        axes = figure.add_subplot(rows, columns, number)
        _label(
            axes, name or "(the model)", "gradient norm", "examples" if number % columns == 1 or columns == 1 else ""
        )
        _histogram(axes, norms[np.isfinite(norms) & (norms > 0)], thresholds[np.isfinite(thresholds)])
    return _png(figure)


def _histogram(axes: Axes, norms: np.ndarray, thresholds: np.ndarray) -> None:
    """Bars on a logarithmic axis, and the thresholds as a line, or as a band between the least and the greatest."""
    every = np.concatenate([norms, thresholds])
    if not len(every):
        return
    edges = np.geomspace(every.min() * 0.95, every.max() * 1.05, 41).tolist()
    counts, _, _ = axes.hist(norms, bins=edges, color=COLOURS[0])
    axes.set_xscale("log")
    _log_ticks(axes.xaxis, edges[0], edges[-1])
    axes.set_ylim(0, max(1.0, float(np.max(counts, initial=0))) * 1.3)  # the legend has its place above the bars
    if len(thresholds):
        low, high = thresholds.min(), thresholds.max()
        moved = f"C: {low:.3g} to {high:.3g}, {thresholds[-1]:.3g} at last"
        label = moved if high > 1.001 * low else f"C = {high:.3g}"
        axes.axvspan(low, high, color=COLOURS[1], alpha=0.2, linewidth=0, zorder=0.5)
        axes.axvline(thresholds[-1], color=COLOURS[1], linewidth=1.4, linestyle="--", label=label)
        axes.legend(loc="upper left", fontsize=8, frameon=False, borderaxespad=0.2)


def threshold_paths(found: Mapping[str, Any]) -> bytes:
    """Thresholds over the steps, one line per group, with a thin line of the same colour for its median norm.

    Args:
        found: the result of `ghostclip.traces.read`.

    Returns:
        A PNG file's bytes.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure, axes = _axes(f"Clipping thresholds\n({NOT_PRIVATE})", "step", "norm")
    medians = _medians(found)
    clipped = [place for place in range(len(found["groups"])) if np.isfinite(found["threshold"][:, place]).any()]
    # Dashed in turns, so that of equal thresholds each is seen.
    for colour, dashes, place in zip(cycle(COLOURS), cycle(("-", "--", ":")), clipped, strict=False):
        name = found["groups"][place] or "(the model)"
        axes.plot(
            found["step"], found["threshold"][:, place], dashes, color=colour, linewidth=1.8, marker=".", label=name
        )
        axes.plot(found["step"], medians[:, place], color=colour, linewidth=0.8, alpha=0.6)
    axes.plot([], [], color=GREY, linewidth=0.8, label="thin: median norm")
    axes.set_yscale("log")
    _log_ticks(axes.yaxis, *axes.get_ylim())
    axes.locator_params(axis="x", integer=True)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9, frameon=False)
    return _png(figure)


def write(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> list[Path]:
    """Writes all plots of a trace as PNG files.

    Args:
        path: of the trace.
        folder: for the files; made if it doesn't exist.

    Returns:
        The files' paths.

    Raises:
        ValueError: there is no trace at ``path``, or it has no step yet.
        OSError: a file can't be written.
        ModuleNotFoundError: matplotlib, or pyarrow for a trace of Parquet files, is not installed.
    """
    found, place = traces.read(path), Path(folder)
    plots = {f"{value}.png": heatmap(found, value) for value in SHOWN}
    plots |= {"norms.png": histograms(found), "thresholds.png": threshold_paths(found)}
    place.mkdir(parents=True, exist_ok=True)
    for name, png in plots.items():
        (place / name).write_bytes(png)
    return [place / name for name in plots]


def _medians(found: Mapping[str, Any]) -> np.ndarray:
    """Median norm of each step and group, [S, G], over the finite ones; nan without any."""
    rows = []
    for norms in found["norms"]:
        finite = [each[np.isfinite(each)] for each in norms]
        rows.append([float(np.median(each)) if len(each) else math.nan for each in finite])
    return np.array(rows)


def _edges(steps: np.ndarray) -> np.ndarray:
    """Borders of columns around increasing steps, [S + 1]."""
    middles = (steps[:-1] + steps[1:]) / 2
    first = steps[0] - (middles[0] - steps[0] if len(middles) else 0.5)
    last = steps[-1] + (steps[-1] - middles[-1] if len(middles) else 0.5)
    return np.concatenate([[first], middles, [last]])
