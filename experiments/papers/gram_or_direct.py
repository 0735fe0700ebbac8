"""Gram or direct norms, layer by layer (Bu et al. 2022, mixed ghost clipping; Bu et al. 2023, book-keeping).

Claim: squared norms of a layer's per-example gradients come from Gram matrices (ghost norms) at a cost that grows with
the square of the number of positions T, or from the gradients themselves at a cost by inputs d times outputs p; the
better of the two, chosen for each layer, makes private training almost as cheap as ordinary training.

    python -m experiments.papers.gram_or_direct [--paper] [--seconds S] [--out FOLDER]

The small setting has a linear layer over T positions, VGG11's convolutions as on 32 x 32 pixels and two whole networks;
``--paper`` has VGG11's as on 224 x 224, and more positions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.papers.report import RESULTS, page, plot, store, table
from experiments.papers.timing import MODULES, Setting, curves, median, over, ratio, start, time_all
from experiments.papers.workloads import LINEAR_WIDTH, VGG_LAYERS
from ghostclip import GhostClipper
from ghostclip.bench import BASELINE, WORKLOADS
from ghostclip.bench.memory import Task, ask

NAME = "gram_or_direct"
WAYS = ("gram", "direct", "auto")
LENGTHS, MORE_LENGTHS = (16, 64, 256, 1024), (4, 16, 32, 64, 128, 256, 512, 1024)
WHOLE = (Setting("VGG11, 32 px", "vgg11", 16), Setting("GPT-2-like, 128 words", "gpt-128", 8))
CLOSE = 1.1  # the choice counts as right where no other way is faster by more


def choice(setting: Setting) -> dict[str, Any]:
    """What the planner chooses for the layer's weight, and the costs in ms that it measured."""
    workload = WORKLOADS[setting.workload]
    torch.manual_seed(0)
    model, inputs, targets = workload.on("cpu", setting.batch_size)
    clipper = GhostClipper(model, 1.0, second_pass="reweight")
    clipper.norms(workload.losses(model(inputs), targets))
    row = next(row for row in clipper.explain() if row.parameter == "weight")
    return {"strategy": row.strategy, "milliseconds": row.milliseconds}


def memory(setting: Setting, names: Sequence[str]) -> dict[str, float | None]:
    """Peak bytes over the non-private step's."""
    found = {
        name: ask(Task(setting.workload, name, setting.batch_size, threads=1), 2, 0.5).get("peak")
        for name in (BASELINE, *names)
    }
    base = found[BASELINE]
    return {name: found[name] / base if base and found[name] else None for name in names}


def layers(paper: bool) -> list[Setting]:
    """A linear layer over T positions, then VGG11's convolutions."""
    lengths, side = (MORE_LENGTHS, 224) if paper else (LENGTHS, 32)
    linear = [Setting(f"linear, T = {t}", f"linear-{t}", 8, place=t, curve="linear") for t in lengths]
    return linear + [
        Setting(f"VGG11 {number + 1}", f"vgg11-layer{number + 1}-{side}px", 8, curve=str(side))
        for number in range(len(VGG_LAYERS))
    ]


def costs(row: Mapping[str, Any]) -> tuple[int, int]:
    """(2 T^2, d p): the two numbers that mixed ghost clipping compares."""
    if row["curve"] == "linear":
        return 2 * int(row["place"]) ** 2, LINEAR_WIDTH**2
    inside, outside, fraction = VGG_LAYERS[int(row["workload"].split("layer")[1].split("-")[0]) - 1]
    return 2 * (int(row["curve"]) // fraction) ** 4, 9 * inside * outside


def _right(found: Mapping[str, Any]) -> list[str]:
    """Where no forced way's step is faster than the planner's by more than CLOSE allows."""
    return [label for label, row in found.items()
            if all((median(row, "auto") or 0) <= CLOSE * (median(row, way) or 9e9) for way in WAYS[:2])]  # fmt: skip


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def write(results: Mapping[str, Any], folder: Path) -> None:
    """The page and the plot."""
    found, rows = results["layers"], []
    for label, row in found.items():
        gram, direct = costs(row)
        used = results["memory"].get(label, {})
        fast = min(WAYS[:2], key=lambda way, row=row: median(row, way) or 9e9)
        rows.append([label, f"{gram:,}", f"{direct:,}", "gram" if gram < direct else "direct",
                     *(over(row, way) for way in WAYS), fast, results["choices"][label]["strategy"],
                     *(_cell(used.get(way)) for way in WAYS)])  # fmt: skip
    head = ["layer", "2 T^2", "d p", "rule: the smaller", *(f"time, {way}" for way in WAYS), "faster of the two",
            "planner's choice", *(f"memory, {way}" for way in WAYS)]  # fmt: skip
    whole = [[label, str(row["batch_size"]), *(over(row, name) for name in (*WAYS, "cached")),
              *(_cell(results["memory"].get(label, {}).get(name)) for name in (*WAYS, "cached"))]
             for label, row in results["whole"].items()]  # fmt: skip
    whole_head = ["network", "batch", *(f"time, {name}" for name in (*WAYS, "cached")),
                  *(f"memory, {name}" for name in (*WAYS, "cached"))]  # fmt: skip
    by_rule = [label for label, row in found.items() if (median(row, "gram") or 0) < (median(row, "direct") or 0)
               ] if found else []  # fmt: skip
    agrees = sum((label in by_rule) == (costs(row)[0] < costs(row)[1]) for label, row in found.items())
    verdict = (
        f"The planner's step is within {CLOSE - 1:.0%} of the faster forced way, or ahead of both, on "
        f"{len(_right(found))} of {len(found)} layers. The rule 2 T^2 < d p names the faster of the two on {agrees}."
    )
    quoted = table(["published", "where", "ours: whole networks, on one core"], [
        ["1 to 10% more memory and less than 2x the time of ordinary training, with mixed ghost clipping",
         "Bu et al. 2022, abstract", _said(results, "auto")],
        ["0.83x the training speed of ordinary training and less than 1% more memory on GPT2, with book-keeping",
         "Bu et al. 2023, abstract", _said(results, "cached")],
    ])  # fmt: skip
    how = (
        f"Ours, in the {results['setting']} setting, at commit {results['commit']}: processor time of a whole step of "
        "one layer (forward, norms, a second backward, noise, Adam) over the non-private one's, median and quartiles, "
        "and peak memory over its. gram and direct are families of several ways each, of which the planner takes the "
        "fastest; auto may take any. The planner measures the norms alone, and not the step."
    )
    why = (
        "The rule counts numbers that are stored, and is meant for memory; time follows the flops, Gram B T^2 (d + p) "
        "and direct B T d p, and how well each runs. Other ways exist than these two: a Gram matrix of patches as a "
        "sum of shifted windows, per-example gradients of a convolution without unfolded patches. So the planner "
        "measures. Where a network takes more memory than the papers say, that is probably since its images and "
        "batches are small: per-example gradients of single layers and workspaces are not small beside such "
        "activations, as they are on the papers' GPUs with larger networks. Where it takes the same, the optimizer's "
        "update is probably the step's peak: it has temporaries as large as all parameters, whatever the method."
    )
    page(NAME, "Gram or direct norms, layer by layer", [__doc__.split("\n\n")[1], quoted, "## Layers", how,
         table(head, rows), verdict, f"![time by number of positions, and by layer]({NAME}.png)", "## Whole networks",
         table(whole_head, whole), "## Why they differ", why], folder, results["machine"])  # fmt: skip
    plot(NAME, partial(_draw, found), folder)


def _said(results: Mapping[str, Any], name: str) -> str:
    parts = []
    for label, row in results["whole"].items():
        used, time = results["memory"].get(label, {}).get(name), ratio(row, name)
        if time is not None:
            more = "" if used is None else f", {used:.2f}x the memory"
            parts.append(f"{label}: {time:.2f}x the time (speed {1 / time:.2f}x){more}")
    return "; ".join(parts)


def _draw(found: Mapping[str, Any], pyplot: Any) -> Any:
    canvas, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    linear = {label: row for label, row in found.items() if row["curve"] == "linear"}
    convolutions = {label: row for label, row in found.items() if row["curve"] != "linear"}
    curves(left, linear, (BASELINE, *WAYS), median)
    left.set(xlabel="positions T", ylabel="milliseconds a step", title=f"linear layer, d = p = {LINEAR_WIDTH}")
    for place, row in enumerate(convolutions.values()):
        row["place"] = 2**place
    curves(right, convolutions, (BASELINE, *WAYS), median)
    right.set_xticks([row["place"] for row in convolutions.values()], list(convolutions), fontsize=7)
    right.set(ylabel="milliseconds a step", title="VGG11's convolutions")
    left.legend(fontsize=8)
    return canvas


def main(arguments: Sequence[str] | None = None) -> int:
    """Times, measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--paper", action="store_true", help="VGG11 as on 224 x 224 pixels, more positions")
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time a layer (default: 1)")
    parser.add_argument("--only", nargs="+", default=None, help="labels of layers and networks")
    parser.add_argument("--no-memory", action="store_true", help="time only")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    results = start(options.paper, (*MODULES, "experiments.papers.strategies"))
    chosen = [each for each in layers(options.paper) if options.only is None or each.label in options.only]
    whole = [each for each in WHOLE if options.only is None or each.label in options.only]
    results["layers"] = time_all(chosen, (BASELINE, *WAYS), options.seconds)
    results["choices"] = {setting.label: choice(setting) for setting in chosen}
    results["whole"] = time_all(whole, (BASELINE, *WAYS, "cached"), 4 * options.seconds)
    measured = [] if options.no_memory else [*(each for each in chosen if each.curve != "linear"), *whole]
    results["memory"] = {
        each.label: memory(each, (*WAYS, "cached") if each in whole else WAYS) for each in measured
    }  # fmt: skip
    results["finding"] = f"the planner's choice is right on {len(_right(results['layers']))} of {len(chosen)} layers"
    store(NAME, results, options.out)
    write(results, options.out)
    print(results["finding"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
