"""The plot of an audit: lower bounds on epsilon over the number of releases, beside what is claimed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ghostclip.report.plots import COLOURS, GREY, RESOLUTION, label, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["AuditPanel", "audit_plot"]


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
    """A PNG with one panel for each claim, two in a row.

    Args:
        panels: as one reads.
        delta: of all epsilons.
        confidence: of the lower bounds.
    """
    from matplotlib.figure import Figure

    columns, rows = min(len(panels), 2), -(-len(panels) // 2)
    figure = Figure(figsize=(1.2 + 4.6 * columns, 0.4 + 4.0 * rows), dpi=RESOLUTION, layout="constrained")
    figure.suptitle(f"Claimed and audited epsilon (delta = {delta:g}, lower bounds at confidence {confidence:.8g})")
    for number, panel in enumerate(panels, 1):
        _draw(figure.add_subplot(rows, columns, number), panel)
    return png(figure)


def _draw(axes: Axes, panel: AuditPanel) -> None:
    """One panel: the claim as a dashed line, bounds with markers, levels dotted."""
    label(axes, panel.title, "audited releases" if panel.lines else "", "epsilon")
    axes.axhline(panel.claimed, color=GREY, linewidth=1.2, linestyle="--", label=f"claimed: {panel.claimed:.3g}")
    colours = iter(COLOURS)
    for method, values in panel.lines.items():
        shown = [value if math.isfinite(value) else math.nan for value in values]
        last = f"{method}: {values[-1]:.3g}"
        axes.plot(panel.releases, shown, color=next(colours), linewidth=1.8, marker="o", markersize=4, label=last)
    for method, value in panel.levels.items():
        axes.axhline(value, color=next(colours), linewidth=1.8, linestyle=":", label=f"{method}: {value:.3g}")
    if panel.lines:
        _count_axis(axes, panel.releases)
    else:
        axes.set_xticks([])
    highest = [panel.claimed, *panel.levels.values(), *(value for line in panel.lines.values() for value in line)]
    axes.set_ylim(0, 1.12 * max(value for value in highest if math.isfinite(value)))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, fontsize=9, frameon=False)


def _count_axis(axes: Axes, releases: Sequence[int]) -> None:
    """A logarithmic axis with counts a reader can read: two ticks a decade where they fit, else one."""
    axes.set_xscale("log")
    figures = (1, 3) if releases[-1] / releases[0] < 300 else (1,)
    ticks = [figure * 10**power for power in range(10) for figure in figures]
    shown = [tick for tick in ticks if releases[0] <= tick <= releases[-1]]
    axes.set_xticks(shown, [f"{tick:,}" for tick in shown])
    axes.minorticks_off()
