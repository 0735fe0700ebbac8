"""Plots of reports and audits as PNG bytes. What is computed from training data without noise says so in its title."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ghostclip.report.record import NormSnapshot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "AuditPanel",
    "accuracy_by_epsilon_plot",
    "accuracy_plot",
    "audit_plot",
    "dark",
    "epsilon_plot",
    "loss_plot",
    "norm_plot",
    "picture",
]

# Okabe & Ito's colours, told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# The same without the dark blue, on dark ground.
ON_DARK = ("#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#F0E442")
# Seen on light and on dark ground.
GREY = "#808080"
INK, GROUND = "#e8e8ea", "#1c1c1e"  # of dark plots; the page has the same
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
NOT_PRIVATE = "not private: computed from training data without noise"
RESOLUTION = 144  # dots an inch


@contextmanager
def dark() -> Iterator[None]:
    """Plots made while it lasts have light lines and letters on dark ground."""
    import matplotlib

    colours: dict[Any, str] = {"figure.facecolor": GROUND, "axes.facecolor": GROUND, **dict.fromkeys(INKED, INK)}
    with matplotlib.rc_context(colours):
        yield


def _colours() -> tuple[str, ...]:
    """Of lines and bars on the ground that `dark` sets, or on light ground."""
    import matplotlib

    return ON_DARK if matplotlib.rcParams["figure.facecolor"] == GROUND else COLOURS


def accuracy_plot(accuracies: Mapping[str, Sequence[Sequence[float]]]) -> bytes:
    """Test accuracy after each epoch: a line for the mean of a training's runs, a band from the least to the greatest.

    Args:
        accuracies: {training: one sequence for each run, all of one length}; NaN leaves a gap.
    """
    figure, axes = _axes("Test accuracy by epoch", "epoch", "test accuracy (%)")
    for colour, (name, runs) in zip(cycle(_colours()), accuracies.items(), strict=False):
        shares = 100 * np.asarray(runs, dtype=float)
        epochs = np.arange(1, shares.shape[1] + 1)
        axes.fill_between(epochs, shares.min(0), shares.max(0), color=colour, alpha=0.2, linewidth=0)
        axes.plot(epochs, shares.mean(0), color=colour, linewidth=1.8, label=name)
    axes.set_ylim(top=100)
    axes.locator_params(axis="x", integer=True)
    _legend(axes)
    return _png(figure)


def accuracy_by_epsilon_plot(
    accuracies: Mapping[str, Mapping[float, Sequence[float]]], baseline: Sequence[float] = ()
) -> bytes:
    """Test accuracy at the end of training over the epsilon spent: a dot for each run, a line through the means.

    Dots of several networks stand beside each other, a twentieth of their epsilon apart.

    Args:
        accuracies: {network: {epsilon: of each run}}; epsilons are finite and > 0.
        baseline: of runs without privacy, whose mean is a dashed line.
    """
    figure, axes = _axes("Test accuracy by privacy spent", "epsilon (log scale)", "test accuracy (%)")
    for place, (colour, (name, found)) in enumerate(zip(cycle(_colours()), accuracies.items(), strict=False)):
        epsilons, shift = sorted(found), 1.05 ** (place - (len(accuracies) - 1) / 2)
        means = [100 * float(np.mean(found[epsilon])) for epsilon in epsilons]
        axes.plot(epsilons, means, color=colour, linewidth=1.8, label=f"{name}: mean of the runs")
        for epsilon in epsilons:
            shares = [100 * share for share in found[epsilon]]
            axes.plot([epsilon * shift] * len(shares), shares, "o", color=colour, markersize=4)
    if baseline:
        axes.axhline(100 * float(np.mean(baseline)), color=GREY, linewidth=1.2, linestyle="--", label="without privacy")
    axes.set_xscale("log")
    ticks = {f"{epsilon:.3g}": epsilon for found in accuracies.values() for epsilon in found}
    axes.set_xticks(list(ticks.values()), list(ticks))
    axes.minorticks_off()
    axes.set_ylim(top=100)
    _legend(axes)
    return _png(figure)


def loss_plot(losses: Mapping[str, tuple[int, Sequence[float]]]) -> bytes:
    """Mean training loss of every step's batch, by run: a thin line as it was, a strong one smoothed.

    Args:
        losses: {run: (epochs, loss of each step)}; a loss that is not finite (an empty batch has none) leaves a gap.
    """
    figure, axes = _axes(f"Training loss\n({NOT_PRIVATE})", "epoch", "mean cross-entropy (nats)")
    for colour, (run, (epochs, values)) in zip(cycle(_colours()), losses.items(), strict=False):
        passed = epochs * (np.arange(len(values)) + 1) / max(len(values), 1)
        axes.plot(passed, values, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(passed, _smoothed(values), color=colour, linewidth=1.8, label=run)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    _legend(axes)
    return _png(figure)


def epsilon_plot(
    steps: Sequence[int],
    epsilons: Mapping[str, Sequence[float]],
    delta: float,
    target: float | None,
    forecast: tuple[Sequence[int], Mapping[str, Sequence[float]]] | None = None,
    about: str = "",
) -> bytes:
    """Epsilon spent after so many steps, by accountant; ``target`` is drawn as a line.

    Args:
        steps: numbers of steps.
        epsilons: {accountant: epsilon after each number}; values that are not finite leave a gap.
        delta: at which they hold.
        target: what the noise was calibrated to.
        forecast: the same two for steps that would follow, from the last one taken on; dashed.
        about: a line under the title, of up to 65 characters.
    """
    title = f"Privacy spent (delta = {delta:g})" + (f"\n{about}" if about else "")
    figure, axes = _axes(title, "steps", "epsilon")
    for colour, (accountant, values) in zip(cycle(_colours()), epsilons.items(), strict=False):
        axes.plot(steps, values, color=colour, linewidth=1.8, marker="o", markersize=3, label=accountant)
        if forecast is not None:
            axes.plot(forecast[0], forecast[1][accountant], color=colour, linewidth=1.4, linestyle=":")
    if forecast is not None:
        axes.plot([], [], color=GREY, linewidth=1.4, linestyle=":", label="if training went on")
    if target is not None:
        axes.axhline(target, color=GREY, linewidth=1, linestyle="--", label=f"target: {target:g}")
    axes.locator_params(axis="x", integer=True)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    _legend(axes)
    return _png(figure)


def norm_plot(norms: Sequence[float], max_norm: float) -> bytes:
    """Histogram of per-example gradient norms, the clipping norm C marked and the share above it written beside it.

    Norms far below C count in the first bar; those that aren't finite count as clipped, and have no bar.
    """
    finite = np.asarray([norm for norm in norms if math.isfinite(norm)])
    figure, axes = _axes(f"Per-example gradient norms\n({NOT_PRIVATE})", "gradient norm before clipping", "examples")
    edges = _log_edges(finite, max_norm)
    counts, _ = np.histogram(np.maximum(finite, edges[0]), bins=edges)
    below, above = _colours()[:2]
    colours = [below if left < max_norm * 0.999 else above for left in edges[:-1]]
    axes.bar(edges[:-1], counts, width=np.diff(edges), align="edge", color=colours)
    axes.set_xscale("log")
    _log_ticks(axes.xaxis, float(edges[0]), float(edges[-1]))
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, max(1.0, float(np.max(counts, initial=0))) * 1.35)
    axes.axvline(max_norm, color=GREY, linewidth=1.2, linestyle="--", label=f"clipping norm C = {max_norm:g}")
    clipped = NormSnapshot(norms, max_norm).clipped
    axes.plot([], [], color=above, linewidth=6, label=f"clipped: {clipped:.0%} of examples")
    _legend(axes, location="upper left")
    return _png(figure)


def picture(pixels: Sequence[Sequence[float]]) -> bytes:
    """A grey image of one dot for each of H rows of W pixels in [0, 1], 1 being white."""
    from matplotlib.image import imsave

    buffer = io.BytesIO()
    imsave(buffer, np.asarray(pixels), cmap="gray", vmin=0.0, vmax=1.0, format="png")
    return buffer.getvalue()


@dataclass(frozen=True)
class AuditPanel:
    """One claim and the lower bounds about it.

    Attributes:
        title: what the claim is about.
        claimed: epsilon.
        releases: numbers of audited releases.
        lines: {method: lower bound after each number of releases}.
        levels: {method: lower bound} of attacks that don't grow with the releases.
    """

    title: str
    claimed: float
    releases: Sequence[int] = ()
    lines: Mapping[str, Sequence[float]] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)


def audit_plot(panels: Sequence[AuditPanel], delta: float, confidence: float) -> bytes:
    """Lower bounds on epsilon over the number of releases: one panel for each claim, two in a row."""
    from matplotlib.figure import Figure

    columns, rows = min(len(panels), 2), -(-len(panels) // 2)
    figure = Figure(figsize=(1.2 + 4.6 * columns, 0.4 + 4.0 * rows), dpi=RESOLUTION, layout="constrained")
    figure.suptitle(f"Claimed and audited epsilon (delta = {delta:g}, lower bounds at confidence {confidence:.8g})")
    for number, panel in enumerate(panels, 1):
        _draw(figure.add_subplot(rows, columns, number), panel)
    return _png(figure)


def _draw(axes: Axes, panel: AuditPanel) -> None:
    """One panel: the claim as a dashed line, bounds with markers, levels dotted."""
    _label(axes, panel.title, "audited releases" if panel.lines else "", "epsilon")
    axes.axhline(panel.claimed, color=GREY, linewidth=1.2, linestyle="--", label=f"claimed: {panel.claimed:.3g}")
    colours = iter(_colours())
    for method, values in panel.lines.items():
        shown = [value if math.isfinite(value) else math.nan for value in values]
        last = f"{method}: {values[-1]:.3g}"
        axes.plot(panel.releases, shown, color=next(colours), linewidth=1.8, marker="o", markersize=4, label=last)
    for method, value in panel.levels.items():
        axes.axhline(value, color=next(colours), linewidth=1.8, linestyle=":", label=f"{method}: {value:.3g}")
    axes.set_xticks([])
    if panel.lines:
        axes.set_xscale("log")
        _log_ticks(axes.xaxis, panel.releases[0], panel.releases[-1])
    highest = [panel.claimed, *panel.levels.values(), *(value for line in panel.lines.values() for value in line)]
    axes.set_ylim(0, 1.12 * max(value for value in highest if math.isfinite(value)))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, fontsize=9, frameon=False)


def _axes(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    """One plot with its labels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), dpi=RESOLUTION, layout="constrained")
    axes = figure.add_subplot()
    _label(axes, title, x, y)
    return figure, axes


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    """Title, labels and grid, in the house's look."""
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color=GREY, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _legend(axes: Axes, location: Literal["best", "upper left"] = "best") -> None:
    """A legend without a box, where there is anything to tell apart."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc=location, fontsize=9, framealpha=0.9, edgecolor="none")


def _smoothed(values: Sequence[float]) -> np.ndarray:
    """Running mean over a twentieth of the steps on either side, leaving out what is not finite."""
    array, reach = np.asarray(values, dtype=float), max(1, len(values) // 40)
    windows = (array[max(0, i - reach) : i + reach + 1] for i in range(len(array)))
    finite = [window[np.isfinite(window)] for window in windows]
    return np.array([window.mean() if len(window) else math.nan for window in finite])


def _log_ticks(axis: Any, low: float, high: float) -> None:
    """At most five numbers on a logarithmic axis: 1, 2, 5 of each decade, 1 where those are many, or every digit."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    figures = range(1, 10) if high < 10 * low else (1, 2, 5) if len(decades) < 5 else (1,)
    ticks = [tick for power in decades for figure in figures if low <= (tick := figure * 10.0**power) <= high]
    ticks = ticks[:: -(-len(ticks) // 5)] if ticks else [low, high]
    axis.set_ticks(ticks, labels=[f"{tick:,.6g}" for tick in ticks])
    axis.set_ticks([], minor=True)


def _log_edges(norms: np.ndarray, max_norm: float) -> np.ndarray:
    """Bin edges [K] on a log scale, one of them exactly ``max_norm``."""
    positive = norms[norms > 0]
    low = max(min(positive.min(initial=max_norm), max_norm / 2), max_norm * 1e-4)
    high = max(positive.max(initial=max_norm), 2 * max_norm)
    below = np.geomspace(low, max_norm, max(2, round(12 * math.log10(max_norm / low))) + 1)
    above = np.geomspace(max_norm, high, max(2, round(12 * math.log10(high / max_norm))) + 1)
    return np.concatenate([below, above[1:]])


def _png(figure: Figure) -> bytes:
    """The figure as a PNG file's bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
