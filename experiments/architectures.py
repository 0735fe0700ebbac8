"""Time per epoch of five ways to train the paper's five networks: its figure 5 in a small setting.

Lee & Kifer (2020, section 6.2) train on MNIST and IMDB with batches of 32. Here an epoch has fewer examples, and they
are random tensors of the same shapes: what is compared are the methods, on one machine, in the same minutes. Epochs of
all methods take turns; before that, each method's clipped sum is compared with a plain loop's.

    python experiments/architectures.py [--examples N] [--seconds S] [--out FOLDER]

writes architectures.json and architectures.png.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ghostclip.bench import BASELINE, CONTENDERS, WORKLOADS, Prepared, Workload, line_up
from ghostclip.bench.machine import busy_warning, describe, in_words
from ghostclip.bench.measure import take_turns, timed

NETWORKS = ("mlp", "cnn", "rnn", "lstm", "transformer")
METHODS = ("nonprivate", "nxbp", "multiloss", "reweight", "cached")
LABELS = {"nonprivate": "Non-private", "nxbp": "nxBP", "multiloss": "multiLoss", "reweight": "GhostClip reweight",
          "cached": "GhostClip cached"}  # fmt: skip
COLOURS = {
    "nonprivate": "#999999",
    "nxbp": "#d55e00",
    "multiloss": "#e69f00",
    "reweight": "#56b4e9",
    "cached": "#0072b2",
}
TITLES = {"mlp": "MLP", "cnn": "CNN", "rnn": "RNN", "lstm": "LSTM", "transformer": "Transformer"}
BATCH_SIZE = 32  # the paper's


def epoch_of(prepared: Prepared, workload: Workload, examples: int) -> Callable[[], None]:
    """A function that trains for one epoch: ``examples`` shuffled examples in chunks of BATCH_SIZE."""
    inputs, targets = workload.batch(examples)

    def epoch() -> None:
        order = torch.randperm(examples)
        for chunk in order.split(BATCH_SIZE):
            prepared.step(inputs[chunk], targets[chunk])

    return epoch


def time_network(name: str, examples: int, seconds: float) -> dict[str, Any]:
    """Seconds per epoch of every method on one network, as plain values; SystemExit when one is wrong or broke."""
    workload = WORKLOADS[name]
    field = line_up(workload, {method: CONTENDERS[method] for method in METHODS}, batch_size=BATCH_SIZE)
    wrong = [method for method, error in field.errors.items() if error is not None and not error <= field.gate]
    if wrong or field.absent:
        raise SystemExit(f"{name}: {', '.join(wrong) or 'none'} clipped wrongly; without a figure: {field.absent}")
    epochs = {method: timed(epoch_of(ready, workload, examples)) for method, ready in field.prepared.items()}
    timings = take_turns(epochs, seconds, baseline=BASELINE)
    found = {}
    for method in METHODS:
        milliseconds = asdict(timings.milliseconds(method))
        spread = {key: value / 1e3 for key, value in milliseconds.items() if key != "rounds"}
        found[method] = {
            "seconds_per_epoch": spread | {"rounds": milliseconds["rounds"]},
            "over_nonprivate": asdict(timings.ratio(method, BASELINE)),
            "nxbp_over": asdict(timings.ratio("nxbp", method)),
            "gradient_error": field.errors[method],
        }
    return {"about": workload.about, "parameters": field.parameters, "methods": found}


def plot(results: dict[str, Any], path: Path) -> None:
    """Grouped bars of seconds per epoch on a logarithmic axis, quartiles as whiskers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 4.8), layout="constrained")
    width = 0.16
    for place, method in enumerate(METHODS):
        spreads = [work["methods"][method]["seconds_per_epoch"] for work in results["networks"].values()]
        heights = [spread["median"] for spread in spreads]
        whiskers = [[s["median"] - s["low"] for s in spreads], [s["high"] - s["median"] for s in spreads]]
        positions = [group + (place - 2) * width for group in range(len(spreads))]
        axes.bar(positions, heights, width, yerr=whiskers, capsize=2, color=COLOURS[method], label=LABELS[method],
                 error_kw={"linewidth": 0.8})  # fmt: skip
        for x, spread in zip(positions, spreads, strict=True):
            axes.annotate(_label(spread["median"]), (x, spread["high"]), (0, 3), textcoords="offset points",
                          ha="center", fontsize=7)  # fmt: skip
    axes.set_yscale("log")
    axes.margins(y=0.12)
    axes.set_xticks(range(len(results["networks"])), [TITLES[name] for name in results["networks"]])
    axes.set_ylabel("seconds per epoch (log scale)")
    axes.set_title(f"Epoch of {results['examples']} random examples in batches of {results['batch_size']}, one core")
    axes.grid(axis="y", which="major", linewidth=0.4)
    axes.set_axisbelow(True)
    axes.legend(ncols=5, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.07), frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _label(seconds: float) -> str:
    """Two digits."""
    return f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment and writes its two files; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=256, help="examples an epoch (default: 256)")
    parser.add_argument("--seconds", type=float, default=30.0, help="measuring time a network (default: 30)")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS, help="default: all five")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if warning := busy_warning():
        print(warning, file=sys.stderr)
    results: dict[str, Any] = {
        "claim": "Lee & Kifer 2020, figure 5: training time per epoch by architecture and method",
        "data": "random tensors of the shapes of MNIST images and of IMDB texts of 128 words",
        "machine": describe(),
        "batch_size": BATCH_SIZE,
        "examples": options.examples,
        "networks": {},
    }
    for name in options.networks:
        results["networks"][name] = time_network(name, options.examples, options.seconds)
        medians = {m: r["over_nonprivate"]["median"] for m, r in results["networks"][name]["methods"].items()}
        print(name, ", ".join(f"{method} {ratio:.2f}x" for method, ratio in medians.items()), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "architectures.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, options.out / "architectures.png")
    print(in_words(results["machine"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
