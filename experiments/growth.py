"""How the cost of clipping grows: over the batch, and over the length of sequences.

Two claims. Time grows linearly in the number of examples B. And for long sequences the norms of a linear layer with d
inputs and p outputs cost no more than the smaller of two ways: the Gram form, T^2 (d + p) for an example, and the
direct one, T p d. The second is shown on one layer, with each way forced and with the planner's choice, which must
follow the lower of the two curves.

    python experiments/growth.py [--seconds S] [--out FOLDER]

writes growth.json and growth.png.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ghostclip import GhostClipper
from ghostclip.bench import CONTENDERS, WORKLOADS
from ghostclip.bench.machine import busy_warning, describe, in_words
from ghostclip.bench.measure import take_turns, timed
from ghostclip.bench.processes import keep_freed_memory

METHODS = ("nonprivate", "reweight", "cached")
WAYS = ("gram", "direct", "auto")
COLOURS = {
    "nonprivate": "#999999", "reweight": "#56b4e9", "cached": "#0072b2",
    "gram": "#d55e00", "direct": "#e69f00", "auto": "#009e73",
}  # fmt: skip
WIDTH, EXAMPLES = 256, 8
TOKENS = 1024  # in a batch of the whole model, whatever its length


def over_batches(name: str, sizes: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Milliseconds of a step for each batch size, by method."""
    workload = WORKLOADS[name]
    rows = []
    for size in sizes:
        torch.manual_seed(0)
        model, (inputs, targets) = workload.model(), workload.batch(size)
        ready = {m: CONTENDERS[m].prepare(copy.deepcopy(model), workload.losses, 1.0) for m in METHODS}
        turns = {m: _step(prepared.step, inputs, targets) for m, prepared in ready.items()}
        timings = take_turns(turns, seconds, baseline="nonprivate")
        rows.append({"batch_size": size, "ms": {m: asdict(timings.milliseconds(m)) for m in METHODS}})
    return rows


def doubling(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """By what each method's time grows from one batch size to the next, per doubling: 2 where it is linear."""
    found = {}
    for method in METHODS:
        sizes, times = _curve(rows, "batch_size", method)
        steps = zip(sizes, sizes[1:], times, times[1:], strict=False)
        found[method] = [(later / sooner) ** (1 / math.log2(large / small)) for small, large, sooner, later in steps]
    return found


def _step(step: Callable[..., None], *batch: torch.Tensor) -> Callable[[], float]:
    return timed(lambda: step(*batch))


def over_lengths(lengths: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Milliseconds that the norms of one linear layer add to its forward and backward, by way, for each T."""
    rows = []
    for length in lengths:
        torch.manual_seed(0)
        inputs = torch.randn(EXAMPLES, length, WIDTH)
        turns = {way: timed(_norms(way, inputs)) for way in WAYS} | {"plain": timed(_plain(inputs))}
        timings = take_turns(turns, seconds, baseline="plain")
        ms = {way: asdict(timings.milliseconds(way)) for way in turns}
        rows.append({"length": length, "ms": ms})
    return rows


def _layer() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())


def _norms(way: str, inputs: torch.Tensor) -> Callable[[], None]:
    """The norms of a layer's weight gradients, one strategy forced or chosen."""
    model = _layer()
    clipper = GhostClipper(model, 1.0, norm_strategy=way)
    return lambda: _use(clipper.norms(model(inputs).square().mean((1, 2))))


def _plain(inputs: torch.Tensor) -> Callable[[], None]:
    """Forward and backward to the layer's outputs, as the norms need them, and no norms."""
    model = _layer()

    def run() -> None:
        outputs = model[0](inputs)
        torch.autograd.grad(model[1](outputs).square().mean((1, 2)).sum(), outputs)

    return run


def _use(value: torch.Tensor) -> None:
    """Waits for a result."""
    value.sum().item()


def whole_models(lengths: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Step time over non-private of the GPT-2-like model for each T, the same number of tokens in every batch."""
    from ghostclip.bench.workloads import gpt

    rows = []
    for length in lengths:
        workload = gpt(length, max(1, TOKENS // length))
        torch.manual_seed(0)
        model, (inputs, targets) = workload.model(), workload.batch(workload.batch_size)
        ready = {m: CONTENDERS[m].prepare(copy.deepcopy(model), workload.losses, 1.0) for m in METHODS}
        turns = {m: _step(prepared.step, inputs, targets) for m, prepared in ready.items()}
        timings = take_turns(turns, seconds, baseline="nonprivate")
        ratios = {m: asdict(timings.ratio(m, "nonprivate")) for m in METHODS[1:]}
        rows.append({"length": length, "batch_size": workload.batch_size, "over_nonprivate": ratios})
    return rows


def plot(results: dict[str, Any], path: Path) -> None:
    """Three panels: over B, over T for one layer, over T for a model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (batches, layer, model) = pyplot.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    for name, marker in zip(results["batches"], "os", strict=False):
        rows = results["batches"][name]
        for method in METHODS:
            line = "-" if marker == "o" else "--"
            batches.plot(*_curve(rows, "batch_size", method), line + marker, color=COLOURS[method], markersize=4,
                         label=f"{name}, {method}")  # fmt: skip
        sizes, times = _curve(rows, "batch_size", "nonprivate")
        batches.plot(sizes, [times[-1] * size / sizes[-1] for size in sizes], ":", color="black", linewidth=1)
    batches.set(
        xlabel="examples in a batch, B", ylabel="milliseconds a step", title="Over B; dotted: proportional to B"
    )
    for way in WAYS:
        rows = [row for row in results["lengths"] if way in row["ms"]]
        thick = {"linewidth": 3, "alpha": 0.6} if way == "auto" else {"linewidth": 1.4}
        layer.plot(*_extra(rows, way), "-o", color=COLOURS[way], markersize=4, label=_said(way), **thick)
    layer.set(xlabel="positions, T", ylabel="milliseconds added by the norms",
              title=f"Over T: one linear layer, d = p = {WIDTH}, B = {EXAMPLES}")  # fmt: skip
    for axes in (batches, layer):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    for method in METHODS[1:]:
        spreads = [row["over_nonprivate"][method] for row in results["models"]]
        model.plot([row["length"] for row in results["models"]], [s["median"] for s in spreads], "-o",
                   color=COLOURS[method], markersize=4, label=method)  # fmt: skip
    model.axhline(1.0, color="black", linewidth=1)
    model.set_xscale("log", base=2)
    model.set(xlabel="positions, T", ylabel="time over non-private", ylim=(0.9, None),
              title="Over T: GPT-2-like, equal tokens a batch")  # fmt: skip
    for axes in (batches, layer, model):
        axes.grid(which="both", linewidth=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(in_words(results["machine"]), fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _said(way: str) -> str:
    return {"gram": "Gram form, T² (d + p)", "direct": "direct, T p d", "auto": "the planner's choice"}[way]


def _curve(rows: list[dict[str, Any]], across: str, name: str) -> tuple[list[int], list[float]]:
    return [row[across] for row in rows], [row["ms"][name]["median"] for row in rows]


def _extra(rows: list[dict[str, Any]], way: str) -> tuple[list[int], list[float]]:
    """What the norms add to the plain pass; never less than a hundredth of it, for the logarithm's sake."""
    plain = [row["ms"]["plain"]["median"] for row in rows]
    added = [row["ms"][way]["median"] - base for row, base in zip(rows, plain, strict=True)]
    return [row["length"] for row in rows], [max(ms, base / 100) for ms, base in zip(added, plain, strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment and writes its two files; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="measuring time a point (default: 5)")
    parser.add_argument(
        "--model-seconds", type=float, default=20.0, help="the same for a whole model over T (default: 20)"
    )
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024], help="values of B"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512, 1024, 2048],
                        help="values of T for one layer")  # fmt: skip
    parser.add_argument("--model-lengths", type=int, nargs="*", default=[64, 128, 256, 512, 1024],
                        help="values of T for a whole model")  # fmt: skip
    parser.add_argument(
        "--workloads", nargs="+", default=["mlp", "cnn"], help="for the curves over B (default: mlp cnn)"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if warning := busy_warning():
        print(warning, file=sys.stderr)
    results: dict[str, Any] = {"machine": describe()}
    results["batches"] = {n: over_batches(n, options.batches, options.seconds) for n in options.workloads}
    results["doubling"] = {n: doubling(rows) for n, rows in results["batches"].items()}
    results["lengths"] = over_lengths(options.lengths, options.seconds)
    results["models"] = whole_models(options.model_lengths, options.model_seconds)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "growth.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, options.out / "growth.png")
    print(f"wrote growth.json and growth.png to {options.out}; {in_words(results['machine'])}")
    return 0


if __name__ == "__main__":
    keep_freed_memory()  # page faults would come and go by what other methods in this process freed
    sys.exit(main())
