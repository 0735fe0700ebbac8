"""The report of a training run: one HTML page that needs no network, its plots as PNG files, and JSON for machines."""

from __future__ import annotations

import base64
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import ghostclip
from ghostclip.report.plots import epsilon_plot, loss_plot, norm_plot
from ghostclip.report.record import NormSnapshot, PrivacyCurve, Record, TrainingRun, plain

__all__ = ["NormSnapshot", "PrivacyCurve", "Record", "TrainingRun", "prepare", "write"]

PAGE, FIGURES = "index.html", "report.json"
ROOM = 4 << 20  # bytes; several times what a report takes


class _Plot(NamedTuple):
    file: str
    caption: str
    png: bytes


def prepare(folder: str | Path) -> Path:
    """Makes ``folder`` and checks that a report can be written there, so that hours of training do not end in an error.

    Raises:
        OSError: it cannot be made or written to, or its disk has less than 4 MiB left; the message names it.
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
    """Writes ``index.html``, ``report.json`` and the plots as PNG files; returns the page's path.

    Raises:
        OSError: a file cannot be written.
        ModuleNotFoundError: matplotlib or jinja2 is not installed.
    """
    path = prepare(folder)
    plots = _plots(record)
    for plot in plots:
        (path / plot.file).write_bytes(plot.png)
    (path / FIGURES).write_text(json.dumps(figures(record), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    (path / PAGE).write_text(_page(record, plots), encoding="utf-8")
    return path / PAGE


def figures(record: Record) -> dict[str, Any]:
    """The report as JSON holds it: what may be shown, and under "not_private" what may not."""
    runs = [asdict(run) for run in record.runs]
    losses = {run["name"]: run.pop("losses") for run in runs}
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
            "machine": record.machine,
            "not_private": {
                "losses": losses,
                "norms": asdict(norms) | {"clipped": norms.clipped} if norms else None,
            },
        }
    )


def _plots(record: Record) -> list[_Plot]:
    """The plots there is data for."""
    found = []
    losses = {run.name: (run.epochs, run.losses) for run in record.runs if run.losses}
    if losses:
        caption = "Mean loss of each step's batch; faint as it was, strong smoothed. Not private."
        found.append(_Plot("loss.png", caption, loss_plot(losses)))
    if (spent := record.privacy) is not None:
        forecast = (spent.forecast_steps, spent.forecasts) if spent.forecast_steps else None
        caption = "Epsilon spent by the first run after so many steps, by each accountant's upper bound."
        caption += " Dashed: the target of the tightest one." if spent.target is not None else ""
        caption += " Dotted: what further steps would spend." if forecast else ""
        png = epsilon_plot(spent.steps, spent.epsilons, spent.delta, spent.target, forecast)
        found.append(_Plot("epsilon.png", caption, png))
    if record.norms is not None:
        caption = (
            f"Norms at the end of the first run; {record.norms.clipped:.1%} of the examples are clipped. Not private."
        )
        found.append(_Plot("norms.png", caption, norm_plot(record.norms.norms, record.norms.max_norm)))
    return found


def _page(record: Record, plots: list[_Plot]) -> str:
    """The HTML page."""
    import jinja2

    loader = jinja2.PackageLoader("ghostclip.report", ".")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"figure": _figure, "base64": lambda png: base64.b64encode(png).decode()}
    accountants = list(dict.fromkeys(name for run in record.runs for name in run.epsilons))
    modes = {run.noise for run in record.runs} - {None}
    template = environment.get_template("page.html.jinja")
    return template.render(
        record=record, plots=plots, accountants=accountants, modes=modes, version=ghostclip.__version__
    )


def _figure(value: str | int | float) -> str:
    """A number with four digits, anything else as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
