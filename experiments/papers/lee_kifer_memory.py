"""The largest batch that memory holds (Lee & Kifer 2020, section 6.7).

Claim: with ResNet-101 on images of 256 x 256 pixels, the memory overhead of reweighting is at most about 25% of the
largest batch of ordinary training; multiLoss holds much less. The naive loop takes one example at a time.

    python -m experiments.papers.lee_kifer_memory [--paper] [--out FOLDER]

The small setting has ResNet-18 on 64 x 64 pixels and a limit of FACTOR times the memory of an ordinary step of 8
examples. ``--paper`` has ResNet-101 on 256 x 256 and 11 GiB, on a GPU where there is one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.papers.lee_kifer import PAPER
from experiments.papers.memory import CLOSE, largest_batches, peak, share
from experiments.papers.report import RESULTS, page, plot, store, table
from experiments.papers.timing import COLOURS, start
from ghostclip.bench import BASELINE, WORKLOADS

NAME = "lee_kifer_memory"
FACTOR, USUAL = 1.5, 8
LIMIT = 11 * 2**30  # a GeForce 1080 Ti's
CONTENDERS = (BASELINE, "reweight", "cached", "multiloss", "authors-multiloss")
# The batch sizes at which a method first failed (section 6.7).
FIRST_FAILED = {BASELINE: 48, "reweight": 36, "authors-multiloss": 18}


def measure(name: str, limit: int | None, usual: int, contenders: Sequence[str], device: str) -> dict[str, Any]:
    """The limit in bytes and each contender's largest batch."""
    if limit is None:
        limit = round(FACTOR * peak(name, BASELINE, device, usual))
    model = WORKLOADS[name].model()
    gradient = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return {"workload": name, "about": WORKLOADS[name].about, "usual": usual, "limit": limit, "gradient": gradient,
            "batches": largest_batches(name, contenders, limit, round(FACTOR * usual), device)}  # fmt: skip


def write(results: Mapping[str, Any], folder: Path) -> None:
    """The page and the plot."""
    batches, most = results["batches"], FIRST_FAILED[BASELINE]
    rows = []
    for name, row in batches.items():
        failed = FIRST_FAILED.get(name)
        published = [str(failed), f"{failed / most:.0%}"] if failed else ["", ""]
        rows.append([name, *published, str(row.get("batch", row.get("missing", "fails"))), share(row)])
    head = ["method", "published: first failed at", "of non-private", "ours: largest batch", "of non-private"]
    setting = (
        f"Ours, in the {results['setting']} setting, at commit {results['commit']}: {results['about']}, and "
        f"{results['limit'] / 2**20:.0f} MiB for what a step takes beyond model and data. Sizes are found to within "
        f"{CLOSE - 1:.0%}."
    )
    why = (
        "The paper's share is of a GPU's whole memory, with the model and torch's cache in it, on a larger network and "
        "larger images. The more of the limit is gradients and the optimizer's state, which are as large for every "
        "batch, the closer all shares come. reweight keeps the graph for the second backward, as the paper's method "
        "does; cached keeps each layer's input and gradient, or per-example gradients where they are smaller.",
        "The paper's multiLoss has all per-example gradients at once: that is authors-multiloss, the function of the "
        "authors' own code. Ours, multiloss, sums as it goes, and has one example's gradient and the sum at once "
        f"beside the graph. One gradient of this network is {results['gradient'] / 2**20:.0f} MiB. nxBP isn't in the "
        "table: it takes the memory of one example for any batch.",
    )
    page(NAME, "The largest batch that memory holds", [__doc__.split("\n\n")[1], f"Published: {PAPER}, section 6.7.",
         table(head, rows), setting, f"![largest batch by method]({NAME}.png)", "## Why they differ", *why],
         folder, results["machine"])  # fmt: skip
    plot(NAME, partial(_draw, batches), folder)


def _draw(batches: Mapping[str, Any], pyplot: Any) -> Any:
    canvas, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    names = list(batches)
    ours = [100 * batches[name].get("share", 0.0) for name in names]
    theirs = [100 * FIRST_FAILED.get(name, 0) / FIRST_FAILED[BASELINE] for name in names]
    places = range(len(names))
    for shift, values, label, colour in ((-0.2, theirs, "published", "#bbbbbb"),
                                         (0.2, ours, "ours", COLOURS["cached"])):  # fmt: skip
        bars = axes.bar([place + shift for place in places], values, 0.38, label=label, color=colour)
        axes.bar_label(bars, [f"{value:.0f}" if value else "" for value in values], fontsize=8)
    axes.set_xticks(places, names)
    axes.set(ylabel="largest batch, % of non-private")
    axes.legend(frameon=False)
    return canvas


def main(arguments: Sequence[str] | None = None) -> int:
    """Searches and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--paper", action="store_true", help="ResNet-101, 256 x 256, 11 GiB; hours without a GPU")
    parser.add_argument("--workload", default="resnet18-frozen-64px", help="another of the benchmark or of the papers")
    parser.add_argument("--usual", type=int, default=USUAL, help="whose memory the limit is a multiple of")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    results = start(options.paper)
    if options.paper:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        results |= measure("resnet101-frozen-256px", LIMIT, USUAL, options.contenders, device)
    else:
        results |= measure(options.workload, None, options.usual, options.contenders, "cpu")
    shares = {name: share(row) for name, row in results["batches"].items() if "share" in row and name != BASELINE}
    results["finding"] = "of the non-private batch: " + ", ".join(f"{name} {text}" for name, text in shares.items())
    store(NAME, results, options.out)
    write(results, options.out)
    print(results["finding"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
