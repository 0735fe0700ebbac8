"""A rare class: does a floor under adaptive clipping help it?

Adaptive clipping follows a quantile of the norms. Where most examples are fitted, their norms and with them the
threshold become small, and a rare class whose gradients stay large loses most of them. Hypothesis: a floor under the
thresholds raises the rare class's accuracy. One class of the training examples is reduced by 90%; test examples stay.

    python -m experiments.papers.skewed [--seeds N] [--rare CLASS] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from scipy import stats
from torch.utils.data import TensorDataset

from experiments.papers.report import RESULTS, page, plot, store, table
from experiments.papers.training import Setting, train
from ghostclip import datasets
from ghostclip.bench.machine import describe
from ghostclip.clipping import Composed, Flat, Quantiles, Whole

KEPT = 0.1
QUANTILE = 0.3
METHODS: dict[str, Callable[[], Any]] = {
    "flat, C = 1": partial(Flat, 1.0),
    "adaptive": lambda: Composed(Whole(), Quantiles(1.0, target_quantile=QUANTILE)),
    "adaptive, floor 0.5": lambda: Composed(Whole(), Quantiles(1.0, target_quantile=QUANTILE, floor=0.5)),
    "adaptive, floor 1": lambda: Composed(Whole(), Quantiles(1.0, target_quantile=QUANTILE, floor=1.0)),
}


def skewed(data: datasets.Data, rare: int) -> TensorDataset:
    """The training examples with a tenth of one class: the first ones."""
    assert isinstance(data.train, TensorDataset)
    images, labels = data.train.tensors
    places = (labels == rare).nonzero().squeeze(1)
    kept = torch.ones(len(labels), dtype=torch.bool)
    kept[places[round(KEPT * len(places)) :]] = False
    return TensorDataset(images[kept], labels[kept])


def compare(data: datasets.Data, rare: int, seeds: int, epochs: int) -> dict[str, Any]:
    """Accuracies of all classes and of the rare one, seed by seed."""
    examples, found = skewed(data, rare), {}
    for name, policy in METHODS.items():
        setting = Setting(policy, learning_rate=0.3, epochs=epochs)
        outcomes = [train(setting, data, seed, examples) for seed in range(seeds)]
        found[name] = {
            "all": [outcome.accuracy for outcome in outcomes],
            "rare": [outcome.by_class[rare] for outcome in outcomes],
        }
        print(f"{name}: all {mean(found[name]['all']):.4f}, rare {mean(found[name]['rare']):.4f}", flush=True)
    return found


def _interval(values: Sequence[float]) -> str:
    low, high = stats.t.interval(0.95, len(values) - 1, mean(values), stats.sem(values))
    return f"{100 * mean(values):.1f} ({100 * low:.1f} to {100 * high:.1f})"


def write(results: dict[str, Any], folder: Path) -> None:
    """The page and the plot."""
    methods, rows = results["methods"], []
    for name, row in methods.items():
        gains = [a - b for a, b in zip(row["rare"], methods["adaptive"]["rare"], strict=True)]
        gain = _interval(gains) if any(gains) else ""
        rows.append([name, _interval(row["all"]), _interval(row["rare"]), gain])
    about = (
        f"{results['data']}, class {results['rare']} reduced by {1 - KEPT:.0%}; epsilon {results['target_epsilon']:g} "
        f"at delta {results['delta']:g}, {results['epochs']} epochs, {len(next(iter(methods.values()))['all'])} paired "
        f"seeds. Quantile {QUANTILE}. Percent, with 95% intervals."
    )
    head = ["method", "accuracy", "accuracy of the rare class", "rare class, points over adaptive, paired"]
    page("skewed", "A rare class under adaptive clipping", [__doc__.split("\n\n")[1], about, table(head, rows),
         "![accuracy of the rare class](skewed.png)"], folder, results["machine"])  # fmt: skip
    plot("skewed", partial(_draw, results), folder)


def _draw(results: dict[str, Any], pyplot: Any) -> Any:
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    names = list(results["methods"])
    axes.boxplot([[100 * a for a in results["methods"][name]["rare"]] for name in names], tick_labels=names)
    axes.set(ylabel=f"test accuracy of class {results['rare']}, %", title="One class reduced by 90%")
    axes.grid(axis="y", linewidth=0.4)
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20, help="paired seeds (default: 20)")
    parser.add_argument("--rare", type=int, default=8, help="the class that is reduced (default: 8)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--paper", action="store_true", help="60 epochs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    data, epochs = datasets.load("digits", None, None), 60 if options.paper else options.epochs
    results: dict[str, Any] = {
        "machine": describe(), "data": "digits", "rare": options.rare, "epochs": epochs,
        "target_epsilon": Setting(Flat, 1.0).target_epsilon, "delta": Setting(Flat, 1.0).delta,
        "methods": compare(data, options.rare, options.seeds, epochs),
    }  # fmt: skip
    store("skewed", results, options.out)
    write(results, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
