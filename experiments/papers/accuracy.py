"""Accuracy at equal epsilon: does it matter how gradients are clipped?

Each method gets the same number of settings to be tuned over, with seeds of their own. Its best setting is trained with
20 further seeds, the same ones for all methods, so that differences are paired. Tuning is not charged to epsilon.

    python -m experiments.papers.accuracy [--data digits | mnist ...] [--folder F] [--seeds N] [--paper] [--out FOLDER]

``--paper`` trains longer, with more settings for each method.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from experiments.papers.paired import HEAD, RULE, Hypothesis, boxes, differences, interval
from experiments.papers.report import RESULTS, page, plot, store, table
from experiments.papers.training import Setting, train
from ghostclip import datasets
from ghostclip.bench.machine import describe
from ghostclip.clipping import Automatic, ByLayer, Composed, Fixed, Flat, PerLayer, Psac, Quantiles, Whole

ADAPTIVE = "adaptive per layer"
METHODS: dict[str, Callable[[float], Any]] = {
    "flat": Flat,
    "per layer": PerLayer,
    ADAPTIVE: lambda quantile: Composed(ByLayer(), Quantiles(1.0, target_quantile=quantile, max_norm=1.0)),
    "automatic": Automatic,
    "PSAC": lambda norm: Composed(Whole(), Fixed(norm), Psac()),
}
HYPOTHESES = (
    Hypothesis("per layer", "flat", "worse", "He et al. 2023, abstract, of constant thresholds"),
    Hypothesis(ADAPTIVE, "flat", "as good", "He et al. 2023, abstract"),
    Hypothesis(ADAPTIVE, "per layer", "better", "follows from the two above"),
    Hypothesis("automatic", "flat", "as good", "Bu et al. 2023, abstract"),
    Hypothesis("PSAC", "automatic", "as good", "Xia et al. 2023, abstract"),
)
# What each method is tuned over besides the learning rate: a clipping norm, or the quantile that thresholds follow.
NORMS, QUANTILES = (1.0, 4.0, 16.0), (0.3, 0.5, 0.8)
RATES, MORE_RATES = (0.05, 0.1, 0.2), (0.02, 0.04, 0.07, 0.1, 0.15, 0.2)
FIRST_TUNING_SEED = 1000


def tuned(
    name: str, data: datasets.Data, seeds: int, rates: Sequence[float], base: Callable[..., Setting]
) -> dict[str, Any]:
    """The setting with the best mean accuracy over the tuning seeds, and all that were tried."""
    tried = []
    for number, rate in product(QUANTILES if name == ADAPTIVE else NORMS, rates):
        # A step of one clipping norm's length is as long for every norm; adaptive thresholds have a sensitivity of 1.
        step = rate if name == ADAPTIVE else rate / number
        setting = base(partial(METHODS[name], number), step)
        found = mean(train(setting, data, FIRST_TUNING_SEED + seed).accuracy for seed in range(seeds))
        tried.append({"number": number, "learning_rate": step, "accuracy": found})
    return {"tried": tried, "best": max(tried, key=lambda row: row["accuracy"])}


def compare(data: datasets.Data, seeds: int, tuning_seeds: int, rates: Sequence[float], base: Any) -> dict[str, Any]:
    """Accuracies of every method in its best setting, seed by seed."""
    found = {}
    for name in METHODS:
        row = tuned(name, data, tuning_seeds, rates, base)
        best = base(partial(METHODS[name], row["best"]["number"]), row["best"]["learning_rate"])
        row["accuracies"] = [train(best, data, seed).accuracy for seed in range(seeds)]
        print(f"{name}: mean accuracy {mean(row['accuracies']):.4f} with {row['best']}", flush=True)
        found[name] = row
    return found


def write(results: dict[str, Any], folder: Path) -> None:
    """The page and the plot."""
    methods = results["methods"]
    values = {name: row["accuracies"] for name, row in methods.items()}
    rows = [
        [name, f"{row['best']['number']:g}", f"{row['best']['learning_rate']:.3g}", interval(values[name]).percent(),
         "" if name == "flat" else interval(differences(values[name], values["flat"])).points()]
        for name, row in methods.items()
    ]  # fmt: skip
    head = ["method", "norm or quantile", "learning rate", "mean test accuracy, % (95% interval)",
            "points over flat, paired (95% interval)"]  # fmt: skip
    about = (
        f"Data: {results['data']}. Model: the CNN of `ghostclip.models`. Privacy: epsilon {results['target_epsilon']:g}"
        f" at delta {results['delta']:g}, {results['epochs']} epochs, SGD with momentum 0.9. Each method was tuned "
        f"over {len(methods['flat']['tried'])} settings with {results['tuning_seeds']} seeds each, then trained with "
        f"{len(values['flat'])} other seeds. An adaptive method's counts are charged within the same epsilon, and its "
        "thresholds are scaled to a sensitivity of 1."
    )
    outcomes = table(HEAD, [hypothesis.row(values) for hypothesis in HYPOTHESES])
    parts = [__doc__.split("\n\n")[1], about, table(head, rows), "## Hypotheses", RULE, outcomes,
             "![test accuracy of each method, one point a seed](accuracy.png)"]  # fmt: skip
    page("accuracy", "Accuracy at equal epsilon", parts, folder, results["machine"])
    title = f"{results['data']}, epsilon {results['target_epsilon']:g}, {len(values['flat'])} seeds"
    plot("accuracy", partial(boxes, values, "test accuracy, %", title), folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Tunes, trains and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", choices=datasets.NAMES, default="digits")
    parser.add_argument("--folder", type=Path, help="where the data set's files are")
    parser.add_argument("--seeds", type=int, default=20, help="paired seeds (default: 20)")
    parser.add_argument("--tuning-seeds", type=int, default=2, help="seeds of each setting that is tried (default: 2)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--delta", type=float, default=1e-4, help="default: 1e-4; take 1e-5 for data larger than digits"
    )
    parser.add_argument("--paper", action="store_true", help="30 epochs, 18 settings for each method, 3 tuning seeds")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    if options.paper:
        options.epochs, options.tuning_seeds = 30, 3
    torch.set_num_threads(1)
    data = datasets.load(options.data, options.folder, None)
    base = partial(Setting, epochs=options.epochs, delta=options.delta)
    results: dict[str, Any] = {
        "machine": describe(), "data": options.data, "epochs": options.epochs, "tuning_seeds": options.tuning_seeds,
        "target_epsilon": base(Flat, 1.0).target_epsilon, "delta": options.delta,
    }  # fmt: skip
    rates = MORE_RATES if options.paper else RATES
    results["methods"] = compare(data, options.seeds, options.tuning_seeds, rates, base)
    store("accuracy", results, options.out)
    write(results, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
