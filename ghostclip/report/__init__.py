"""The report of a training run: one HTML page that needs no network, its plots as PNG files, and JSON for machines."""

from __future__ import annotations

import base64
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ghostclip
from ghostclip.report import plots
from ghostclip.report.record import (
    NormSnapshot,
    PrivacyCurve,
    Record,
    RunGroup,
    ShownExample,
    TrainingRun,
    grouped,
    plain,
)

__all__ = [
    "NormSnapshot",
    "PrivacyCurve",
    "Record",
    "RunGroup",
    "ShownExample",
    "TrainingRun",
    "grouped",
    "prepare",
    "write",
]

PAGE, FIGURES = "index.html", "report.json"
MOST_CLASSES = 20  # of a table of errors by class
ROOM = 4 << 20  # bytes; several times what a report takes


class _Plot(NamedTuple):
    """A plot of a report.

    Attributes:
        file: its name.
        caption: what is drawn, for readers who see it.
        alt: what it shows, for readers who don't.
        private: whether it is computed from training data without noise.
        draw: makes the PNG.
    """

    file: str
    caption: str
    alt: str
    private: bool
    draw: Callable[[], bytes]


class _Meaning(NamedTuple):
    """What an epsilon says: the factor between probabilities, and how often a guess about one example can be right."""

    epsilon: float
    factor: float
    right: float


def prepare(folder: str | Path) -> Path:
    """Makes ``folder`` and checks that a report can be written there; call it before a long training.

    Returns:
        The folder's path.

    Raises:
        OSError: the folder can't be made or written to, or its disk has less than 4 MiB left; the message names it.
        ModuleNotFoundError: matplotlib or jinja2 is not installed.
    """
    import jinja2  # noqa: F401
    import matplotlib.figure  # noqa: F401

    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    probe = path / f".{PAGE}.probe"
    probe.write_bytes(b"probe")
    probe.unlink()
    if (free := shutil.disk_usage(path).free) < ROOM:
        raise OSError(
            f"the disk of {path} has {free} bytes left; a report needs {ROOM}: free some or choose another folder"
        )
    return path


def write(record: Record, folder: str | Path) -> Path:
    """Writes a report: the page ``index.html``, which needs no network, ``report.json`` and the plots as PNG files.

    Loss and norms are private data, and so are all results of runs without noise; the page says so, and the JSON has
    the first two, and the names of these runs, under "not_private".

    Args:
        record: the data.
        folder: made if it doesn't exist; files of an older report are overwritten.

    Returns:
        The page's path.

    Raises:
        OSError: a file can't be written.
        ModuleNotFoundError: matplotlib or jinja2 is not installed.
    """
    path = prepare(folder)
    images: list[dict[str, Any]] = []  # each plot with its PNG for pages on light and on dark ground
    for plot in _plots(record):
        light = plot.draw()
        with plots.dark():
            images.append({"plot": plot, "light": light, "dark": plot.draw()})
        (path / plot.file).write_bytes(light)
    (path / FIGURES).write_text(json.dumps(figures(record), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    (path / PAGE).write_text(_page(record, images), encoding="utf-8")
    return path / PAGE


def figures(record: Record) -> dict[str, Any]:
    """The report as JSON holds it: what may be shown of one run, and under "not_private" what may not.

    That has the names of runs without noise, too, of whose results nothing may be shown.
    """
    runs = [asdict(run) for run in record.runs]
    alone = len(grouped(record.runs)) == len(runs)
    losses = {run["name"] if alone else f"{run['name']}, seed {run['seed']}": run.pop("losses") for run in runs}
    norms = record.norms
    return plain(
        {
            "title": record.title,
            "ghostclip": ghostclip.__version__,
            "settings": record.settings,
            "runs": runs,
            "examples_per_second": record.speeds,
            "speed_batch_size": record.speed_batch_size,
            "privacy": asdict(record.privacy) if record.privacy else None,
            "weights": record.weights,
            "machine": record.machine,
            "versions": record.versions,
            "command": record.command,
            "date": record.date,
            "not_private": {
                "runs": list(dict.fromkeys(run.name for run in record.runs if run.noise_multiplier is None)),
                "losses": losses,
                "norms": asdict(norms) | {"clipped": norms.clipped} if norms else None,
            },
        }
    )


def _plots(record: Record) -> Iterator[_Plot]:
    """The plots there is data for, those that may be shown first."""
    yield from _accuracy_plots(grouped(record.runs))
    if (spent := record.privacy) is not None:
        forecast = (spent.forecast_steps, spent.forecasts) if spent.forecast_steps else None
        caption = "Epsilon spent by the first run after so many steps, by each accountant's upper bound."
        caption += " Dashed: the target of the tightest one." if spent.target is not None else ""
        caption += " Dotted: what further steps would spend." if forecast else ""
        first = next(iter(spent.epsilons.values()))[0]
        caption += " At step 0: what a mean of features spent, released before the training." if first else ""
        ends = " and ".join(f"{values[-1]:.3g} by {name}" for name, values in spent.epsilons.items())
        alt = f"Line plot. Epsilon grows over {spent.steps[-1]} steps from {first:.3g} to {ends}."
        draw = partial(plots.epsilon_plot, spent.steps, spent.epsilons, spent.delta, spent.target, forecast)
        yield _Plot("epsilon.png", caption, alt, False, draw)
    main = _of_main(grouped(record.runs))
    losses = {run.name: (run.epochs, run.losses) for group in main if (run := group.first).losses}
    if losses:
        caption = "Mean loss of each step's batch; thin as it was, strong smoothed."
        caption += " Of the first seed's runs." if len(grouped(record.runs)) < len(record.runs) else ""
        ends = "; ".join(
            f"{name}: from {_finite(values, 0)} to {_finite(values, -1)}" for name, (_, values) in losses.items()
        )
        yield _Plot("loss.png", caption, f"Line plot of training loss. {ends}.", True, partial(plots.loss_plot, losses))
    if (found := record.norms) is not None:
        share = f"{found.clipped:.1%} of the examples are clipped"
        alt = f"Histogram of {len(found.norms):,} gradient norms around the clipping norm {found.max_norm:g}; {share}."
        draw = partial(plots.norm_plot, found.norms, found.max_norm)
        yield _Plot("norms.png", f"Gradient norms at the end of the first run; {share}.", alt, True, draw)


def _accuracy_plots(groups: Sequence[RunGroup]) -> Iterator[_Plot]:
    """Test accuracy of the main network by epoch, and of all by epsilon where there are two or more."""
    known = [group for group in _of_main(groups) if all(run.accuracies for run in group.runs)]
    several = any(len(group.runs) > 1 for group in groups)
    if known:
        over = {group.first.name: [run.accuracies for run in group.runs] for group in known}
        caption = "Accuracy on the test examples after each epoch."
        caption += " Line: mean of the seeds. Band: least to greatest." if several else ""
        ends = "; ".join(f"{group.first.name}: {group.mean('accuracy'):.1%} at the end" for group in known)
        yield _Plot("accuracy.png", caption, f"Line plot. {ends}.", False, partial(plots.accuracy_plot, over))
    finite: dict[str, dict[float, list[float]]] = {}
    for group in groups:
        epsilon = next(iter(group.first.epsilons.values()), 0.0)
        if 0 < epsilon < math.inf:
            finite.setdefault(group.first.model or "private", {})[epsilon] = group.accuracies
    if any(len(found) > 1 for found in finite.values()):
        beside = [group for group in groups if group.first.noise_multiplier is None]
        caption = "Accuracy at the end of training, a dot for each run, over the epsilon it spent."
        caption += " Dashed: without privacy." if beside else ""
        ends = "; ".join(
            f"{name}, epsilon {epsilon:.3g}: {sum(found) / len(found):.1%}"
            for name, of in finite.items()
            for epsilon, found in sorted(of.items())
        )
        draw = partial(plots.accuracy_by_epsilon_plot, finite, beside[0].accuracies if beside else ())
        yield _Plot("accuracy_by_epsilon.png", caption, f"Plot of mean test accuracy. {ends}.", False, draw)


def _of_main(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """The trainings of the network that the report is about."""
    return [group for group in groups if group.first.model == groups[0].first.model]


def _finite(values: Sequence[float], place: int) -> str:
    """The first or last number among the values, which may have gaps."""
    numbers = [value for value in values if math.isfinite(value)]
    return f"{numbers[place]:.3g}" if numbers else "none"


def _meanings(groups: Sequence[RunGroup], delta: float) -> list[_Meaning]:
    """What each finite epsilon of the runs says, by the first accountant, the largest first.

    A guess whether one example was trained on, where both are equally likely, is right with probability at most
    (e^epsilon + delta) / (1 + e^epsilon): half the sum of what Kairouz, Oh & Viswanath, The Composition Theorem for
    Differential Privacy (2015), say of both kinds of error.
    """
    found = (next(iter(group.first.epsilons.values()), math.inf) for group in groups)
    # Above 700 the factor is no float; such an epsilon says nothing anyway.
    known = [epsilon for epsilon in found if epsilon < 700]
    # The largest of those that look the same on the page.
    once = {f"{epsilon:.3f}": epsilon for epsilon in sorted(known)}
    return [_Meaning(e, math.exp(e), (1 + delta * math.exp(-e)) / (1 + math.exp(-e))) for e in reversed(once.values())]


def _mistaken(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """Whose errors are counted by class: each network's first training, or of a single network the first and last."""
    known = [group for group in groups if 0 < len(group.confusion) <= MOST_CLASSES]
    first: dict[str | None, RunGroup] = {}
    for group in known:
        first.setdefault(group.first.model, group)
    return list(first.values()) if len(first) > 1 else [*known[:1], *known[1:][-1:]]


def _page(record: Record, images: list[dict[str, Any]]) -> str:
    """The HTML page."""
    import jinja2

    loader = jinja2.PackageLoader("ghostclip.report", ".")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {
        "figure": _figure,
        "base64": _base64,
        "picture": plots.picture,
    }
    accountants = list(dict.fromkeys(name for run in record.runs for name in run.epsilons))
    groups = grouped(record.runs)
    template = environment.get_template("page.html.jinja")
    return template.render(
        record=record,
        groups=groups,
        images=images,
        accountants=accountants,
        modes={run.noise for run in record.runs} - {None},
        generators=sorted({run.generator for run in record.runs if run.noise == "standard"} - {""}),
        meanings=_meanings(groups, record.privacy.delta) if record.privacy else [],
        mistaken=_mistaken(groups),
        seeds=max(len(group.runs) for group in groups),
        version=ghostclip.__version__,
    )


def _base64(png: bytes) -> str:
    """A PNG as pages hold it."""
    return base64.b64encode(png).decode()


def _figure(value: str | int | float) -> str:
    """A number with four digits, anything else as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
