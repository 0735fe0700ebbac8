"""What the scripts of this folder write: results as JSON, a page in Markdown, tables, and a plot's file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ghostclip.bench.machine import in_words

__all__ = ["RESULTS", "page", "plot", "store", "table"]

RESULTS = Path(__file__).parent / "results"


def store(name: str, results: Mapping[str, Any], folder: Path) -> None:
    """Writes ``name``.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def page(name: str, title: str, parts: Sequence[str], folder: Path, machine: Mapping[str, Any] | None = None) -> None:
    """Writes ``name``.md: title, parts as paragraphs, and the machine where times were measured."""
    ending = [f"Machine: {in_words(dict(machine))}."] if machine is not None else []
    text = "\n\n".join([f"# {title}", *parts, *ending, f"Computed by `python -m experiments.papers.{name}`."])
    (folder / f"{name}.md").write_text(text + "\n")


def plot(name: str, draw: Callable[[Any], Any], folder: Path) -> None:
    """Writes ``name``.png: ``draw`` gets matplotlib's pyplot and returns the figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = draw(pyplot)
    figure.savefig(folder / f"{name}.png", dpi=120)
    pyplot.close(figure)
