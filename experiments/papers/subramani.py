"""JIT compilation and vectorization (Subramani et al. 2021, tables 1 to 3).

Claims: JAX's jit and vmap make private training of three small networks up to 50x as fast as the best alternative,
close to the best non-private time (table 1); both parts are needed for it (table 2); and a private step fits larger
batches than other libraries' (table 3). Networks: 5,532 parameters on Adult, 605,226 on CIFAR-10, 1,081,002 on IMDb.

    python -m experiments.papers.subramani [--paper] [--seconds S] [--out FOLDER]

The small setting has batches of 128, 32 and 32 for the three, ``--paper`` of 128. Opacus and JAX are timed where they
are installed (``pip install ".[bench]"``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments.papers.memory import largest_batches, peak, share
from experiments.papers.report import RESULTS, page, plot, store, table
from experiments.papers.timing import (
    COLOURS,
    Setting,
    absent,
    epoch,
    legend,
    over,
    plain,
    plain_axis,
    ratio,
    start,
    time_all,
)
from ghostclip.bench import BASELINE

NAME = "subramani"
NETWORKS = {"FCNN": "fcnn-adult", "CNN": "cifar-cnn", "LSTM": "lstm-imdb"}
EXAMPLES = {"FCNN": 45_220, "CNN": 60_000, "LSTM": 25_000}  # training examples, section 3
SMALL = {"FCNN": 128, "CNN": 32, "LSTM": 32}
CONTENDERS = (BASELINE, "reweight", "cached", "compiled", "jax", "opacus-hooks", "opacus-ghost", "nxbp")
# Seconds an epoch at batch size 128, table 1: JAX or Custom TFP, best alternative, best non-private time.
TABLE_1 = {"FCNN": (0.21, 0.77, 0.55), "CNN": (7.3, 12.0, 1.7), "LSTM": (8.2, 407.0, 4.8)}
# Seconds an epoch, table 2: of JAX with neither, JIT only, VMAP only and both. LSTM: out of memory without JIT.
# Which row is which follows from the text of section 3: JIT alone up to 435x, VMAP alone up to 64x.
TABLE_2 = {"FCNN": (1240.0, 2.85, 19.2, 0.239), "CNN": (3840.0, 84.0, 64.8, 7.28)}
PARTS = {"neither": "nxbp", "JIT": None, "VMAP": "vmap", "both": "vmap-compiled"}  # the same by torch
# Largest batches, table 3: non-private JAX and PyTorch, then private libraries.
TABLE_3 = {"CNN": {"JAX": 10_448, "PyTorch": 10_752}, "LSTM": {"JAX": 11_984, "PyTorch": 9_943}}
TABLE_3_PRIVATE = {
    "JAX (DP)": ("JAX", {"CNN": 4_264, "LSTM": 2_487}), "Opacus": ("PyTorch", {"CNN": 1_920, "LSTM": 10}),
    "BackPACK": ("PyTorch", {"CNN": 1_216}), "CRB": ("PyTorch", {"CNN": 2_184}),
}  # fmt: skip
IN_MEMORY = ("reweight", "cached", "opacus-hooks", "opacus-ghost")
FACTOR = 4


def memory(network: str, usual: int) -> dict[str, Any]:
    """Largest batches of one network within FACTOR times the memory of a non-private step of ``usual`` examples."""
    limit = FACTOR * peak(NETWORKS[network], BASELINE, "cpu", usual)
    batches = largest_batches(NETWORKS[network], IN_MEMORY, limit, FACTOR * usual)
    return {"limit": limit, "usual": usual, "batches": batches}


def _seconds(value: float | None) -> str:
    return "" if value is None else plain(value)


def _times(found: Mapping[str, Any]) -> str:
    rows = []
    for network, (jax, other, nonprivate) in TABLE_1.items():
        if network in found:
            row = found[network]
            rows.append([network, str(row["batch_size"]), _seconds(jax), _seconds(other), _seconds(nonprivate),
                         f"{jax / nonprivate:.2g}", _seconds(epoch(row, BASELINE, EXAMPLES[network])),
                         *(over(row, name) for name in CONTENDERS[1:])])  # fmt: skip
    head = ["network", "our batch", "published, s an epoch: JAX or Custom TFP", "best alternative", "non-private, best",
            "JAX or TFP over non-private", "ours, s an epoch: nonprivate",
            *(f"{name} over nonprivate" for name in CONTENDERS[1:])]  # fmt: skip
    return table(head, rows)


def _parts(found: Mapping[str, Any]) -> str:
    """Table 2, and the same parts by torch."""
    rows = []
    for network, published in TABLE_2.items():
        for (part, name), theirs in zip(PARTS.items(), published, strict=True):
            own = ratio(found[network], name) if network in found and name else None
            rows.append([network, part, plain(theirs), plain(theirs / published[-1]), name or "", _seconds(own)])
        for name in ("cached", "compiled"):
            own = ratio(found[network], name) if network in found else None
            rows.append([network, "", "", "", name, _seconds(own)])
    return table(["network", "parts", "published, JAX, s an epoch", "over both", "ours", "over nonprivate"], rows)


def _batches(found: Mapping[str, Any]) -> str:
    rows = []
    for name, (framework, most) in TABLE_3_PRIVATE.items():
        cells = [f"{most[n]:,} ({most[n] / TABLE_3[n][framework]:.1%})" if n in most else "" for n in TABLE_3]
        rows.append([f"published: {name}, of {framework}", *cells])
    for name in IN_MEMORY:
        cells = []
        for network in TABLE_3:
            row = found.get(network, {"batches": {}})["batches"].get(name, {})
            cells.append(f"{row['batch']:,} ({share(row)})" if "batch" in row else share(row))
        rows.append([f"ours: {name}, of nonprivate", *cells])
    return table(["largest batch (share of the non-private one)", *TABLE_3], rows)


def write(results: Mapping[str, Any], folder: Path) -> None:
    """The page and the plot."""
    found = results["settings"]
    where = (
        "Published: Subramani, Vadivelu and Kamath 2021, on an NVIDIA Titan V; seconds an epoch are medians of 20. "
        f"Ours: one core, the {results['setting']} setting, commit {results['commit']}, processor time of a step over "
        "that of a non-private step of the same round, median and quartiles; an epoch is a step times the examples "
        "over the batch. Every clipped sum was compared with a plain loop's."
    )
    about_2 = (
        "Without VMAP, JAX takes one example after the other. By torch, neither is nxBP and VMAP is "
        "torch.func's; both is the same under torch.compile; a compiled loop has no row. Beside them: what ghost norms "
        "need neither of."
    )
    about_3 = "Ours: largest batch within " + "; ".join(
        f"{row['limit'] / 2**20:.0f} MiB for {network}, which is {FACTOR} times what a non-private step of "
        f"{row['usual']} examples takes" for network, row in results["memory"].items()
    )  # fmt: skip
    why = (
        "A library's overhead over its own non-private step is what can be compared between machines; seconds are not. "
        "On a GPU steps this small are bound by launching operations, which one compiled graph avoids: hence its large "
        "factors, which one core can't show. Materialised per-example gradients (JAX, Opacus's hooks, BackPACK) take "
        "memory for every example times every parameter; norms without them don't, hence the larger share in the third "
        "table. Our limit is a multiple of a small step's memory and not a whole GPU's, so the model's own share of it "
        "is larger than in the paper, which brings all shares closer together. Shares above 100% for the LSTM are "
        "probably since what stands in for torch's layer, ours as well as Opacus's, keeps less for the way back."
    )
    page(NAME, "JIT compilation and vectorization", [__doc__.split("\n\n")[1], where, "## Table 1: time", _times(found),
         *absent(found), f"![time over non-private]({NAME}.png)", "## Table 2: parts", about_2, _parts(found),
         "## Table 3: largest batch", _batches(results["memory"]), about_3 + ".", "## Why they differ", why],
         folder, results["machine"])  # fmt: skip
    plot(NAME, partial(_draw, found), folder)


def _draw(found: Mapping[str, Any], pyplot: Any) -> Any:
    canvas, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    names, width = CONTENDERS[1:], 0.8 / len(CONTENDERS)
    for number, name in enumerate(names):
        marks = [(place + (number - 4) * width, value) for place, row in enumerate(found.values())
                 if (value := ratio(row, name)) is not None]  # fmt: skip
        if marks:
            bars = axes.bar(*zip(*marks, strict=True), width, color=COLOURS[name], label=name)
            axes.bar_label(bars, [f"{value:.3g}" for _, value in marks], fontsize=6)
    theirs = [TABLE_1[network][0] / TABLE_1[network][2] for network in found]
    for place, value in enumerate(theirs):
        label = "" if place else "published: JAX or TFP"
        axes.plot((place - 0.47, place + 0.27), (value, value), "k--", linewidth=1, label=label)
    axes.axhline(1.0, color="black", linewidth=0.6)
    plain_axis(axes)
    axes.set_xticks(range(len(found)), list(found))
    axes.set(ylabel="time over non-private (log scale)")
    legend(canvas)
    return canvas


def main(arguments: Sequence[str] | None = None) -> int:
    """Times, searches and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--paper", action="store_true", help="batches of 128; longer measurements")
    parser.add_argument("--seconds", type=float, default=3.0, help="measuring time a network (default: 3)")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--memory", nargs="*", choices=list(TABLE_3), default=list(TABLE_3), help="of table 3")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    results = start(options.paper)
    seconds = max(30.0, options.seconds) if options.paper else options.seconds
    results["settings"] = {}
    for name in options.networks:
        extra = ("vmap", "vmap-compiled") if name in TABLE_2 else ()
        setting = Setting(name, NETWORKS[name], 128 if options.paper else SMALL[name])
        results["settings"] |= time_all([setting], (*CONTENDERS, *extra), seconds)
    results["memory"] = {name: memory(name, 128 if options.paper else 16) for name in options.memory}
    best = {name: min((ratio(row, own) or 9e9, own) for own in ("reweight", "cached", "compiled"))
            for name, row in results["settings"].items()}  # fmt: skip
    results["finding"] = "over non-private: " + ", ".join(f"{n} {own} {value:.2f}" for n, (value, own) in best.items())
    store(NAME, results, options.out)
    write(results, options.out)
    print(results["finding"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
