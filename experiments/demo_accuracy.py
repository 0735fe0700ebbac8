"""What `make demo` reaches: test accuracy of each of its runs, again and again, since no two private runs are equal.

The seed sets the initial weights alone; batches and noise are drawn afresh by every run, as the demo's are. So one run
says little: each training of the demo (both networks at epsilon 8, 3 and 1, one also without privacy) is
repeated for each of several seeds, the private ones of the convolutional network also without their private mean.

    python experiments/demo_accuracy.py [--only WORD ...] [--seeds N] [--repeats N] [--out FOLDER]

writes demo_accuracy.json, .md and .png; trainings left out by --only keep their figures, and with none (--only none)
the other two are written anew. README.md quotes them, and a test compares.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ghostclip import accounting, datasets
from ghostclip.bench.machine import describe, in_words
from ghostclip.cli import train
from ghostclip.cli.plan import PlannedRun, runs_of
from ghostclip.cli.training import train as trained
from ghostclip.report.plots import accuracy_by_epsilon_plot

RESULTS = Path(__file__).parent / "results"
FILE = "demo_accuracy"
MODEL = "oriented"
DEMO = ["--model", MODEL, "--data", "digits"]
WITHOUT = ", without a private mean"
# {the first word of a training's name: what README.md calls its network}
CONVOLUTIONAL = "convolutional, all of it trained"
MODELS = {"private": CONVOLUTIONAL, "non-private": CONVOLUTIONAL, "linear model": "linear on fixed features"}


def trainings(examples: int) -> list[PlannedRun]:
    """The runs of `make demo` on so many training examples, calibrated; the network's also without a private mean.

    The linear model isn't there without one: its learning rates are for centred features (docs/accuracy.md).
    """
    parser = argparse.ArgumentParser()
    train.add_train(parser)
    plans = list(runs_of(parser.parse_args(DEMO), examples))
    network = [plan for plan in plans if plan.settings.mean_noise is not None and plan.settings.model == MODEL]
    return [*plans, *map(_without_mean, network)]


def _without_mean(plan: PlannedRun) -> PlannedRun:
    """The same training, whose steps have all of the target."""
    settings = plan.settings
    noise = accounting.noise_multiplier(
        target_epsilon=settings.target_epsilon, sample_rate=1.0, steps=plan.steps, delta=settings.delta
    )
    settings = replace(settings, noise_multiplier=noise, mean_noise=None)
    return replace(plan, name=f"{plan.name}{WITHOUT}", settings=settings)


def repeated(plan: PlannedRun, data: datasets.Data, seeds: int, repeats: int) -> dict[str, Any]:
    """One training's accuracies: {seed: one for each repetition}, with what it was set to."""
    settings = plan.settings
    accuracies = {
        str(seed): [trained(replace(settings, seed=seed), data, plan.name, _quiet).run.accuracy for _ in range(repeats)]
        for seed in range(seeds)
    }
    return {
        "target_epsilon": settings.target_epsilon,
        "noise_multiplier": settings.noise_multiplier,
        "steps": plan.steps,
        "accuracies": accuracies,
    }


def _quiet(loss: float, epsilon: float | None) -> None:
    """Told of every step, and says nothing."""


def spread(row: dict[str, Any]) -> tuple[float, float, float, int]:
    """Median, least and greatest accuracy of a training, and of how many runs."""
    found = [accuracy for runs in row["accuracies"].values() for accuracy in runs]
    return statistics.median(found), min(found), max(found), len(found)


def table(results: dict[str, Any]) -> str:
    """What README.md shows of the figures: a row for each network, a column for each epsilon."""
    cells: dict[str, dict[str, str]] = {name: {} for name in MODELS.values()}
    for name, row in results["trainings"].items():
        if not name.endswith(WITHOUT):
            median, low, high, _ = spread(row)
            where = "without privacy" if row["target_epsilon"] is None else f"epsilon {row['target_epsilon']:g}"
            shown = f"{100 * median:.1f}% ({100 * low:.1f} to {100 * high:.1f})"
            cells[MODELS[name.split(",")[0]]][where] = shown
    columns = list(dict.fromkeys(column for found in cells.values() for column in found))
    lines = ["| network | " + " | ".join(columns) + " |", "| --- " * (len(columns) + 1) + "|"]
    for network, found in cells.items():
        lines.append(f"| {network} | {' | '.join(found.get(column, '') for column in columns)} |")
    return "\n".join(lines)


def markdown(results: dict[str, Any]) -> str:
    """A table of the trainings, and one of their accuracies by seed."""
    lines = [
        f"Test accuracy of `make demo` ({results['test_examples']} test images, delta {results['delta']:g}), run again "
        "and again. A seed sets the initial weights; batches and noise are fresh in every run.",
        "",
        "| training | noise multiplier | steps | runs | median | least | greatest |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in results["trainings"].items():
        *figures, count = spread(row)
        noise = "none" if row["noise_multiplier"] is None else f"{row['noise_multiplier']:.3f}"
        cells = " | ".join(f"{figure:.1%}" for figure in figures)
        lines.append(f"| {name} | {noise} | {row['steps']} | {count} | {cells} |")
    lines += ["", "| training | seed | accuracy of each run |", "| --- | --- | --- |"]
    for name, row in results["trainings"].items():
        for seed, runs in row["accuracies"].items():
            lines.append(f"| {name} | {seed} | {', '.join(f'{accuracy:.1%}' for accuracy in sorted(runs))} |")
    return "\n".join([*lines, "", f"Machine: {in_words(results['machine'])}.", ""])


def plot(results: dict[str, Any]) -> bytes:
    """The accuracies over epsilon, a line for each network, as README.md shows them."""
    found: dict[str, dict[float, list[float]]] = {}
    ordinary: list[float] = []
    for name, row in results["trainings"].items():
        accuracies = [accuracy for runs in row["accuracies"].values() for accuracy in runs]
        if row["target_epsilon"] is None:
            ordinary += accuracies
        elif not name.endswith(WITHOUT):
            found.setdefault(MODELS[name.split(",")[0]], {})[row["target_epsilon"]] = accuracies
    return accuracy_by_epsilon_plot(found, ordinary)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, and writes the figures after each training of the demo, then what is made of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="WORD", help="trainings with one of these words in their names")
    parser.add_argument("--seeds", type=int, default=5, help="initial weights: 0, 1, ... (default: 5)")
    parser.add_argument("--repeats", type=int, default=4, help="runs of each seed (default: 4)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    data, machine = datasets.load("digits", None, None), describe()
    path = options.out / f"{FILE}.json"
    known = json.loads(path.read_text())["trainings"] if path.exists() else {}
    plans = trainings(len(data.train))
    options.out.mkdir(parents=True, exist_ok=True)
    for plan in plans:
        if options.only and not any(word in plan.name for word in options.only):
            continue
        known[plan.name] = repeated(plan, data, options.seeds, options.repeats)
        median, low, high, count = spread(known[plan.name])
        print(f"{plan.name}: median {median:.1%}, {low:.1%} to {high:.1%} in {count} runs", flush=True)
        results = {
            "machine": machine,
            "test_examples": len(data.test),
            "delta": plan.settings.delta,
            "trainings": {one.name: known[one.name] for one in plans if one.name in known},
        }
        path.write_text(json.dumps(results, indent=1) + "\n")
    results = json.loads(path.read_text())
    path.with_suffix(".md").write_text(markdown(results))
    path.with_suffix(".png").write_bytes(plot(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
