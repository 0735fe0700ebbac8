"""What the scripts of Lee & Kifer's figures 5 to 9 share: they differ in networks, batch sizes and claims only.

Each times nonprivate, nxBP, multiLoss and the two second passes, and the authors' own code where a checkout of it is on
PYTHONPATH, by interleaved steps. Data are random tensors of the shapes of the paper's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.papers.report import RESULTS, page, plot, store, table
from experiments.papers.timing import (
    COLOURS,
    Setting,
    absent,
    curves,
    epoch,
    legend,
    median,
    over,
    plain,
    plain_axis,
    ratio,
    spread,
    start,
    time_all,
)
from ghostclip.bench import BASELINE

__all__ = ["PAPER", "Figure", "Quoted", "faster", "main", "plain_list", "write"]

PAPER = "Lee & Kifer 2020"
OURS = ("reweight", "cached")
CONTENDERS = (BASELINE, "nxbp", "multiloss", *OURS, "authors")
EPOCH = 60_000  # examples: MNIST's and FMNIST's, whose epochs the paper times
METHOD = (
    "How: processor time of a whole training step on one core (Adam with the paper's step size, noise of its default "
    "sigma, division by the batch size) over that of a non-private step of the same round: median, quartiles in "
    "brackets. The last columns have the speed-up, the time of nxBP over that of the method. Before the clock starts, "
    "each method's clipped sum is compared with a plain loop's: WRONG is a relative error above the benchmark's gate "
    "of 1e-4."
)
MACHINES = (
    "The paper has a GPU (NVIDIA GeForce 1080 Ti) and we have one processor core. Most of nxBP's loss on a GPU is that "
    "a single example can't fill it; one core has little to leave idle. So its loop is behind by much less here, "
    "except where a step is so small that the cost of launching each operation is what counts."
)
AUTHORS = (
    "Where the authors' code is faster, that is probably since it checks less: ours looks for parameters that are used "
    "outside of their layers, for examples that aren't finite and for rounding at the threshold, which takes a share "
    "of steps of a few milliseconds."
)
MULTILOSS = (
    "The paper's multiLoss gets all per-example gradients at once and clips them then; ours takes one example's after "
    "the other from one graph and sums as it goes, in the memory of one gradient. The paper calls multiLoss slightly "
    "faster than nxBP (section 3). Here it is slower: in one graph of the whole batch, each of the B ways back goes "
    "through the rows of all B examples, all but one of them zero, which takes B times the work of one example's. Idle "
    "units of a GPU hide some of that, one core none of it."
)


@dataclass(frozen=True)
class Quoted:
    """A published statement and what we have to say to it.

    Attributes:
        source: where it is printed.
        says: the statement, with its figure where there is one.
        ours: the results by label -> the same by our figures.
    """

    source: str
    says: str
    ours: Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True)
class Figure:
    """One figure of the paper.

    Attributes:
        name: of the files, and of the script.
        title: of the page.
        about: the claim, the script's docstring.
        quoted: what the text states about it.
        small, paper: the settings that are timed.
        axis: what the settings differ in.
        reasons: why ours differs, a paragraph each.
        examples: in an epoch, for the plot of curves.
    """

    name: str
    title: str
    about: str
    quoted: tuple[Quoted, ...]
    small: tuple[Setting, ...]
    paper: tuple[Setting, ...]
    axis: str
    reasons: tuple[str, ...] = ()
    examples: int = EPOCH


def faster(results: Mapping[str, Any], name: str = "reweight") -> dict[str, float]:
    """The speed-up over nxBP by label, where there is one."""
    found = {label: ratio(row, name, "nxbp_over") for label, row in results.items()}
    return {label: value for label, value in found.items() if value is not None}


def plain_list(values: Mapping[str, float]) -> str:
    """Figures by label."""
    return "; ".join(f"{label}: {value:.3g}x" for label, value in values.items())


def finding(figure: Figure, results: Mapping[str, Any]) -> str:
    """One line for the index: the range of the speed-ups."""
    parts = []
    for name in OURS:
        values = faster(results, name)
        low, high = min(values, key=lambda label: values[label]), max(values, key=lambda label: values[label])
        parts.append(f"{name} {values[low]:.3g} ({low}) to {values[high]:.3g} ({high}) times as fast as nxBP")
    return "; ".join(parts)


def write(figure: Figure, results: Mapping[str, Any], folder: Path) -> None:
    """The page and the plot, of what the JSON file holds."""
    found = results["settings"]
    names = [name for name in CONTENDERS[1:] if any("ms" in row["contenders"].get(name, {}) for row in found.values())]
    rows = [
        [label, str(row["batch_size"]), plain(median(row, BASELINE) or 0.0), *(over(row, name) for name in names),
         *(_speed_up(row, name) for name in OURS)]
        for label, row in found.items()
    ]  # fmt: skip
    head = [figure.axis, "batch", "nonprivate, ms a step", *names, *(f"speed-up of {name}" for name in OURS)]
    quotes = table(
        ["published", "where", "ours"], [[quote.says, quote.source, quote.ours(found)] for quote in figure.quoted]
    )
    bars = "The figure itself has bars or curves without numbers, which were not read off; what the text states:"
    setting = f"Ours, in the {results['setting']} setting, at commit {results['commit']}:"
    reasons = [MACHINES, *figure.reasons, *([AUTHORS] if _authors_faster(found) else []), MULTILOSS]
    parts = [figure.about, f"## Published ({PAPER})", bars, quotes, "## Ours", setting, table(head, rows), METHOD,
             *_beside_authors(found), *absent(found), f"![time by method]({figure.name}.png)", "## Why they differ",
             *reasons]  # fmt: skip
    page(figure.name, figure.title, parts, folder, results["machine"])
    plot(figure.name, lambda pyplot: _draw(figure, found, pyplot), folder)


def _authors_faster(found: Mapping[str, Any]) -> list[str]:
    """Where the authors' code is right, and faster than both of ours."""
    labels = []
    for label, row in found.items():
        theirs, own = ratio(row, "authors"), min(ratio(row, name) or 9e9 for name in OURS)
        if theirs is not None and row["contenders"]["authors"]["correct"] and theirs < own:
            labels.append(label)
    return labels


def _beside_authors(found: Mapping[str, Any]) -> list[str]:
    """A sentence on the authors' code, where it was timed."""
    timed = {label: row["contenders"]["authors"] for label, row in found.items() if ratio(row, "authors") is not None}
    if not timed:
        return []
    wrong = [label for label, row in timed.items() if not row["correct"]]
    ahead = _authors_faster(found)
    return [
        f"The authors' own code (`authors`) clips wrongly on {len(wrong)} of {len(timed)} "
        f"([why](lee_kifer_authors.md)). It is right and faster than both of ours on {len(ahead)}"
        + (f": {'; '.join(ahead)}." if ahead else ".")
    ]


def _speed_up(row: Mapping[str, Any], name: str) -> str:
    outcome = row["contenders"][name]
    return spread(outcome["nxbp_over"]) if "nxbp_over" in outcome else ""


def _draw(figure: Figure, found: Mapping[str, Any], pyplot: Any) -> Any:
    if all(row["place"] is not None for row in found.values()):
        return _draw_curves(figure, found, pyplot)
    canvas, axes = pyplot.subplots(figsize=(3 + 1.6 * len(found), 4.6), layout="constrained")
    width = 0.8 / len(CONTENDERS)
    for number, name in enumerate(CONTENDERS):
        marks = [(place + (number - len(CONTENDERS) / 2 + 0.5) * width, row["contenders"][name]["ms"])
                 for place, row in enumerate(found.values()) if "ms" in row["contenders"].get(name, {})]  # fmt: skip
        if not marks:
            continue
        whiskers = [[s["median"] - s["low"] for _, s in marks], [s["high"] - s["median"] for _, s in marks]]
        bars = axes.bar([x for x, _ in marks], [s["median"] for _, s in marks], width, yerr=whiskers, capsize=2,
                        color=COLOURS[name], label=name, error_kw={"linewidth": 0.8})  # fmt: skip
        axes.bar_label(bars, [plain(s["median"]) for _, s in marks], fontsize=6, padding=2)
    plain_axis(axes)
    axes.set_xticks(range(len(found)), list(found))
    axes.set(ylabel="milliseconds a step (log scale)", title=figure.title)
    axes.grid(axis="y", linewidth=0.3)
    legend(canvas)
    return canvas


def _draw_curves(figure: Figure, found: Mapping[str, Any], pyplot: Any) -> Any:
    """A panel for each curve's family: seconds an epoch over the places."""
    panels = list(dict.fromkeys(row["curve"] for row in found.values()))
    canvas, grid = pyplot.subplots(1, len(panels), figsize=(2 + 4.2 * len(panels), 4.4), layout="constrained",
                                   squeeze=False)  # fmt: skip
    for axes, panel in zip(grid[0], panels, strict=True):
        own = {label: row for label, row in found.items() if row["curve"] == panel}
        curves(axes, own, CONTENDERS, lambda row, name: epoch(row, name, figure.examples))
        axes.set(xlabel=figure.axis, ylabel=f"seconds for {figure.examples:,} examples (log scale)", title=panel)
    legend(canvas)
    canvas.suptitle(figure.title)
    return canvas


def main(figure: Figure, arguments: Sequence[str] | None = None) -> int:
    """Times a figure's settings and writes its three files."""
    parser = argparse.ArgumentParser(description=figure.title)
    parser.add_argument("--paper", action="store_true", help="the paper's sizes, which take hours on one core")
    parser.add_argument("--seconds", type=float, default=2.0, help="measuring time a setting (default: 2)")
    parser.add_argument("--first", type=int, default=None, metavar="N", help="time the first N settings only")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    results = start(options.paper)
    settings = (figure.paper if options.paper else figure.small)[: options.first]
    seconds = options.seconds if not options.paper else max(options.seconds, 30.0)
    results["settings"] = time_all(settings, CONTENDERS, seconds)
    results["finding"] = finding(figure, results["settings"])
    store(figure.name, results, options.out)
    write(figure, results, options.out)
    print(results["finding"])
    return 0
