"""Accuracy at equal epsilon: does it matter how gradients are clipped?

Hypotheses, as the papers state them: per-layer clipping with adaptive thresholds does as well as flat clipping (He et
al. 2023); automatic clipping does as well as flat clipping with a tuned norm (Bu et al. 2023); PSAC does better than
automatic clipping (Xia et al. 2023); per-layer clipping with fixed equal thresholds does worse than flat clipping
(McMahan et al. 2018 report no loss in their models).

Each method gets the same number of settings to be tuned over, with seeds of their own. Its best setting is trained with
20 further seeds, the same ones for all methods, so that differences are paired.

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
from scipy import stats

from experiments.papers.report import RESULTS, page, plot, store, table
from experiments.papers.training import Setting, train
from ghostclip import datasets
from ghostclip.bench.machine import describe
from ghostclip.clipping import Automatic, ByLayer, Composed, Fixed, Flat, PerLayer, Psac, Quantiles, Whole

METHODS: dict[str, Callable[[float], Any]] = {
    "flat": Flat,
    "per layer": PerLayer,
    "adaptive per layer": lambda quantile: Composed(ByLayer(), Quantiles(1.0, target_quantile=quantile)),
    "automatic": Automatic,
    "PSAC": lambda norm: Composed(Whole(), Fixed(norm), Psac()),
}
# What each method is tuned over besides the learning rate: a clipping norm, or the quantile that thresholds follow.
NORMS, QUANTILES = (0.3, 1.0, 3.0), (0.3, 0.5, 0.8)
RATES, MORE_RATES = (0.1, 0.3, 1.0), (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
FIRST_TUNING_SEED = 1000


def tuned(
    name: str, data: datasets.Data, seeds: int, rates: Sequence[float], base: Callable[..., Setting]
) -> dict[str, Any]:
    """The setting with the best mean accuracy over the tuning seeds, and all that were tried."""
    tried = []
    for number, rate in product(QUANTILES if "adaptive" in name else NORMS, rates):
        # A step of one clipping norm's length is as long for every norm.
        step = rate if "adaptive" in name else rate / number
        setting = base(partial(METHODS[name], number), step)
        found = mean(train(setting, data, FIRST_TUNING_SEED + seed).accuracy for seed in range(seeds))
        tried.append({"number": number, "learning_rate": step, "accuracy": found})
    return {"tried": tried, "best": max(tried, key=lambda row: row["accuracy"])}


def compare(data: datasets.Data, seeds: int, tuning_seeds: int, rates: Sequence[float], epochs: int) -> dict[str, Any]:
    """Accuracies of every method in its best setting, seed by seed."""
    base = partial(Setting, epochs=epochs)
    found = {}
    for name in METHODS:
        row = tuned(name, data, tuning_seeds, rates, base)
        best = base(partial(METHODS[name], row["best"]["number"]), row["best"]["learning_rate"])
        row["accuracies"] = [train(best, data, seed).accuracy for seed in range(seeds)]
        print(f"{name}: mean accuracy {mean(row['accuracies']):.4f} with {row['best']}", flush=True)
        found[name] = row
    return found


def difference(row: dict[str, Any], other: dict[str, Any]) -> tuple[float, float, float, float]:
    """Mean of the paired differences in accuracy, their 95% interval, and p by Wilcoxon's signed-rank test."""
    pairs = [a - b for a, b in zip(row["accuracies"], other["accuracies"], strict=True)]
    interval = stats.t.interval(0.95, len(pairs) - 1, mean(pairs), stats.sem(pairs))
    same = not any(pairs)
    return mean(pairs), float(interval[0]), float(interval[1]), 1.0 if same else float(stats.wilcoxon(pairs).pvalue)


def write(results: dict[str, Any], folder: Path) -> None:
    """The page and the plot."""
    methods, rows = results["methods"], []
    for name, row in methods.items():
        low, high = stats.t.interval(
            0.95, len(row["accuracies"]) - 1, mean(row["accuracies"]), stats.sem(row["accuracies"])
        )
        cells = [name, f"{row['best']['number']:g}", f"{row['best']['learning_rate']:.3g}",
                 f"{mean(row['accuracies']):.1%} ({low:.1%} to {high:.1%})"]  # fmt: skip
        if name == "flat":
            rows.append([*cells, "", ""])
        else:
            gain, least, most, p = difference(row, methods["flat"])
            rows.append([*cells, f"{100 * gain:+.2f} ({100 * least:+.2f} to {100 * most:+.2f})", f"{p:.2g}"])
    head = ["method", "norm or quantile", "learning rate", "mean test accuracy (95% interval)",
            "points over flat, paired (95% interval)", "p (Wilcoxon)"]  # fmt: skip
    first = next(iter(methods.values()))
    about = (
        f"{results['data']}, epsilon {results['target_epsilon']:g} at delta {results['delta']:g}, "
        f"{results['epochs']} epochs; {len(first['tried'])} settings for each method, tuned over "
        f"{results['tuning_seeds']} seeds; then {len(first['accuracies'])} paired seeds."
    )
    pair = difference(methods["PSAC"], methods["automatic"])
    psac = f"PSAC minus automatic: {100 * pair[0]:+.2f} points ({100 * pair[1]:+.2f} to {100 * pair[2]:+.2f})."
    page("accuracy", "Accuracy at equal epsilon", [*__doc__.split("\n\n")[1:3], about, table(head, rows), psac,
         "![accuracies](accuracy.png)"], folder, results["machine"])  # fmt: skip
    plot("accuracy", partial(_draw, results), folder)


def _draw(results: dict[str, Any], pyplot: Any) -> Any:
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    names = list(results["methods"])
    axes.boxplot([[100 * a for a in results["methods"][name]["accuracies"]] for name in names], tick_labels=names)
    axes.set(ylabel="test accuracy, %", title=f"{results['data']}, epsilon {results['target_epsilon']:g}")
    axes.grid(axis="y", linewidth=0.4)
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Tunes, trains and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", choices=datasets.NAMES, default="digits")
    parser.add_argument("--folder", type=Path, help="where the data set's files are")
    parser.add_argument("--seeds", type=int, default=20, help="paired seeds (default: 20)")
    parser.add_argument("--tuning-seeds", type=int, default=2, help="seeds of each setting that is tried (default: 2)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--paper", action="store_true", help="30 epochs, 18 settings for each method, 3 tuning seeds")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    if options.paper:
        options.epochs, options.tuning_seeds = 30, 3
    torch.set_num_threads(1)
    data = datasets.load(options.data, options.folder, None)
    rates = MORE_RATES if options.paper else RATES
    results: dict[str, Any] = {
        "machine": describe(), "data": options.data, "epochs": options.epochs, "tuning_seeds": options.tuning_seeds,
        "target_epsilon": Setting(Flat, 1.0).target_epsilon, "delta": Setting(Flat, 1.0).delta,
    }  # fmt: skip
    results["methods"] = compare(data, options.seeds, options.tuning_seeds, rates, options.epochs)
    store("accuracy", results, options.out)
    write(results, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
