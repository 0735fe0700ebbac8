"""A rare class: does a floor under adaptive clipping help it?

Adaptive clipping follows a quantile of the norms. Where most examples are fitted, their norms and with them the
threshold become small, and a rare class whose gradients stay large loses most of them. A floor keeps the threshold from
falling. One class of the training examples is reduced by 90%; test examples stay.

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
from torch.utils.data import TensorDataset

from experiments.papers.paired import HEAD, RULE, Hypothesis, boxes, interval
from experiments.papers.report import RESULTS, page, plot, store, table
from experiments.papers.training import Setting, train
from ghostclip import datasets
from ghostclip.bench.machine import describe
from ghostclip.clipping import Composed, Flat, Quantiles, Whole

KEPT = 0.1
QUANTILE = 0.3
FIXED, ADAPTIVE, LOW, HIGH = "flat, C = 1", "adaptive", "adaptive, floor 0.5", "adaptive, floor 1"
METHODS: dict[str, Callable[[], Any]] = {
    FIXED: partial(Flat, 1.0),
    ADAPTIVE: lambda: Composed(Whole(), Quantiles(1.0, target_quantile=QUANTILE)),
    LOW: lambda: Composed(Whole(), Quantiles(1.0, target_quantile=QUANTILE, floor=0.5)),
    HIGH: lambda: Composed(Whole(), Quantiles(1.0, target_quantile=QUANTILE, floor=1.0)),
}
HYPOTHESES = (
    Hypothesis(LOW, ADAPTIVE, "better", "ours, of the rare class"),
    Hypothesis(HIGH, ADAPTIVE, "better", "ours, of the rare class"),
    Hypothesis(ADAPTIVE, FIXED, "worse", "ours, of the rare class"),
)
RATES = (0.02, 0.05, 0.1)
# With epsilon 3, 10 epochs and class 8 no method learnt the rare class at all.
EPSILON, RARE, EPOCHS = 8.0, 6, 30
FIRST_TUNING_SEED = 1000


def skewed(data: datasets.Data, rare: int) -> TensorDataset:
    """The training examples with a tenth of one class: the first ones."""
    images, labels = data.train.tensors
    places = (labels == rare).nonzero().squeeze(1)
    kept = torch.ones(len(labels), dtype=torch.bool)
    kept[places[round(KEPT * len(places)) :]] = False
    return TensorDataset(images[kept], labels[kept])


def _setting(policy: Callable[[], Any], rate: float, epochs: int) -> Setting:
    return Setting(policy, rate, target_epsilon=EPSILON, epochs=epochs)


def compare(data: datasets.Data, rare: int, seeds: int, tuning_seeds: int, epochs: int) -> dict[str, Any]:
    """Accuracies of all classes and of the rare one, seed by seed, at the learning rate best for all classes."""
    examples, found = skewed(data, rare), {}
    for name, policy in METHODS.items():
        tried = {}
        for rate in RATES:
            runs = [train(_setting(policy, rate, epochs), data, FIRST_TUNING_SEED + seed, examples)
                    for seed in range(tuning_seeds)]  # fmt: skip
            tried[rate] = mean(run.accuracy for run in runs)
        best = max(tried, key=tried.__getitem__)
        outcomes = [train(_setting(policy, best, epochs), data, seed, examples) for seed in range(seeds)]
        found[name] = {
            "learning_rate": best,
            "tried": tried,
            "all": [outcome.accuracy for outcome in outcomes],
            "rare": [outcome.by_class[rare] for outcome in outcomes],
        }
        print(f"{name}: all {mean(found[name]['all']):.4f}, rare {mean(found[name]['rare']):.4f}, {tried}", flush=True)
    return found


def write(results: dict[str, Any], folder: Path) -> None:
    """The page and the plot."""
    methods = results["methods"]
    values = {name: row["rare"] for name, row in methods.items()}
    rows = [
        [name, f"{row['learning_rate']:g}", interval(row["all"]).percent(), interval(row["rare"]).percent()]
        for name, row in methods.items()
    ]
    seeds = len(values[FIXED])
    about = (
        f"Data: {results['data']}, class {results['rare']} reduced by {1 - KEPT:.0%} in training. Privacy: epsilon "
        f"{results['target_epsilon']:g} at delta {results['delta']:g}, {results['epochs']} epochs, SGD with momentum "
        f"0.9. The learning rate of each method is the best of {len(RATES)} for the accuracy of all classes, over "
        f"{results['tuning_seeds']} seeds; then {seeds} other seeds, the same for all methods. The adaptive threshold "
        f"starts at 1 and follows the quantile {QUANTILE} of all norms. Class and epsilon were chosen such that flat "
        "clipping learns the rare class: with epsilon 3, 10 epochs and class 8, no method did."
    )
    head = ["method", "learning rate", "accuracy, % (95% interval)", "accuracy of the rare class, % (95% interval)"]
    outcomes = table(HEAD, [hypothesis.row(values) for hypothesis in HYPOTHESES])
    parts = [__doc__.split("\n\n")[1], about, table(head, rows), "## Hypotheses", RULE, outcomes,
             "![test accuracy of the rare class, one point a seed](skewed.png)"]  # fmt: skip
    page("skewed", "A rare class under adaptive clipping", parts, folder, results["machine"])
    ylabel, title = f"test accuracy of class {results['rare']}, %", f"class reduced by {1 - KEPT:.0%}, {seeds} seeds"
    plot("skewed", partial(boxes, values, ylabel, title), folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20, help="paired seeds (default: 20)")
    parser.add_argument("--tuning-seeds", type=int, default=2, help="seeds of each learning rate (default: 2)")
    parser.add_argument("--rare", type=int, default=RARE, help=f"the class that is reduced (default: {RARE})")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--paper", action="store_true", help="90 epochs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    data, epochs = datasets.load("digits", None, None), 90 if options.paper else options.epochs
    results: dict[str, Any] = {
        "machine": describe(), "data": "digits", "rare": options.rare, "epochs": epochs,
        "tuning_seeds": options.tuning_seeds, "target_epsilon": EPSILON,
        "delta": Setting(Flat, 1.0).delta,
        "methods": compare(data, options.rare, options.seeds, options.tuning_seeds, epochs),
    }  # fmt: skip
    store("skewed", results, options.out)
    write(results, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
