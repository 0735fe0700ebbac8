"""Whether the noise is Gaussian and independent, and what it costs.

Every kind of noise (standard and hardened, compiled and without a compiler, both precisions) is drawn through the
release that training uses, and tested against the law it claims: Kolmogorov and Smirnov's test, chi-square over a
thousand cells (for hardened noise against the lattice's exact probabilities), variance, tails, and, for hardened noise,
whether all residues of the lattice come equally often; then correlations of numbers and of their sizes between
neighbours, layers, steps and processes, and sequences that come twice. A p-value below 1e-6 is a failure, which true
noise gives once in a million p-values; all of them together must look uniform.

    python experiments/noise_statistics.py [--numbers N] [--repeats R] [--seconds S] [--out FOLDER]

writes noise_statistics.json, .md and .png.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from scipy import stats

from ghostclip.bench import CONTENDERS, WORKLOADS
from ghostclip.bench.machine import busy_warning, describe, in_words
from ghostclip.bench.measure import take_turns, timed
from ghostclip.noise import noise_source
from ghostclip.noise.hardened import Lattice

RARE = 1e-6
# {name: (mode, whether C may be used, type)}
KINDS = {
    "standard": ("standard", True, torch.float32),
    "standard, no compiler": ("standard", False, torch.float32),
    "standard, float64": ("standard", True, torch.float64),
    "hardened": ("hardened", True, torch.float32),
    "hardened, no compiler": ("hardened", False, torch.float32),
    "hardened, float64": ("hardened", True, torch.float64),
}
CELLS, TAILS, RESIDUES = 1000, (3.0, 4.0), 64
LAGS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
# Numbers of a sequence that is looked for again; the odds that two of n / 8 agree are below n^2 2^-86.
SEQUENCE = 8
STEP = Lattice(1.0, 1.0).step


@contextmanager
def compiling(kind: str) -> Iterator[None]:
    """With C, or as if there were no compiler, as the kind has it."""
    with ExitStack() as patches:
        for module in () if KINDS[kind][1] else ("gaussian", "hardened"):
            patches.enter_context(mock.patch(f"ghostclip.noise.{module}.library", return_value=None))
        yield


def steps_of(kind: str, numbers: int, steps: int = 2, layers: int = 2) -> np.ndarray:
    """[steps, layers, numbers] of noise of standard deviation 1, as float64, drawn by one source."""
    source = noise_source(KINDS[kind][0])
    with compiling(kind):
        like = [torch.zeros(numbers, dtype=KINDS[kind][2]) for _ in range(layers)]
        drawn = [source.release([tensor.clone() for tensor in like], 1.0) for _ in range(steps)]
        return np.array([[part.double().numpy() for part in parts] for parts in drawn])


def law(kind: str, numbers: np.ndarray) -> dict[str, float]:
    """{test: p-value} of numbers [n] under the law they should have."""
    hardened, size = KINDS[kind][0] == "hardened", len(numbers)
    edges = stats.norm.ppf(np.linspace(0, 1, CELLS + 1)[1:-1])
    smooth = numbers
    if hardened:
        # Cells begin half-way between two points of the lattice, where their probability is the Gaussian's own; and
        # spread over a step, rounded numbers are as good as Gaussian (to 1e-6) for tests that want them continuous.
        edges = np.unique((np.round(edges / STEP - 0.5) + 0.5) * STEP)
        smooth = numbers + np.random.default_rng().uniform(-STEP / 2, STEP / 2, size)
    counts = np.bincount(np.searchsorted(edges, numbers), minlength=len(edges) + 1)
    expected = size * np.diff(stats.norm.cdf([-math.inf, *edges, math.inf]))
    found = {
        "Kolmogorov-Smirnov": stats.kstest(smooth, "norm").pvalue,
        "chi-square": stats.chisquare(counts, expected).pvalue,
        "mean": two_sided(smooth.mean() * math.sqrt(size)),
        "variance": two_sided((np.square(smooth).mean() - 1) * math.sqrt(size / 2)),
    }
    for bound in TAILS:
        beyond = int((np.abs(smooth) > bound).sum())
        found[f"beyond {bound:g}"] = stats.binomtest(beyond, size, 2 * stats.norm.sf(bound)).pvalue
    if hardened:
        residues = np.rint(numbers / STEP).astype(np.int64) % RESIDUES
        found["residues"] = stats.chisquare(np.bincount(residues, minlength=RESIDUES)).pvalue
    return {name: float(value) for name, value in found.items()}


def independence(drawn: np.ndarray, other: np.ndarray) -> dict[str, list[float]]:
    """{test: p-values} of numbers [steps, layers, n] of one source, and [n] of another process."""
    first = drawn[0, 0]
    pairs = {
        "neighbours": [(first[:-lag], first[lag:]) for lag in LAGS if lag < len(first) // 2],
        "layers": [(step[0], step[1]) for step in drawn],
        "steps": [(drawn[0, layer], drawn[1, layer]) for layer in range(2)] + [(drawn[0, 0], drawn[1, 1])],
        "processes": [(first, other), (drawn[1, 0], other)],
    }
    return {name: [p for pair in some for p in correlations(*pair)] for name, some in pairs.items()}


def correlations(left: np.ndarray, right: np.ndarray) -> list[float]:
    """p-values of no correlation of the numbers, and of their sizes."""
    return [float(stats.pearsonr(of(left), of(right)).pvalue) for of in (np.asarray, np.abs)]


def repeated(drawn: np.ndarray) -> int:
    """How many sequences of 8 numbers came before."""
    whole = drawn.reshape(-1, drawn.shape[-1])
    whole = np.ascontiguousarray(whole[:, : whole.shape[1] // SEQUENCE * SEQUENCE]).reshape(-1, SEQUENCE)
    return len(whole) - len(np.unique(whole.view(f"V{8 * SEQUENCE}")))


def two_sided(score: float) -> float:
    return float(2 * stats.norm.sf(abs(score)))


def elsewhere(kind: str, numbers: int) -> np.ndarray:
    """[n] of noise from a forked process whose parent had begun to draw."""
    source = noise_source(KINDS[kind][0])
    with compiling(kind), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads about
        source.release([torch.zeros(8)], 1.0)
        ours, theirs = multiprocessing.Pipe(duplex=False)
        like = torch.zeros(numbers, dtype=KINDS[kind][2])
        send = lambda: theirs.send_bytes(source.release([like], 1.0)[0].double().numpy().tobytes())  # noqa: E731
        child = multiprocessing.get_context("fork").Process(target=send)
        child.start()
        found = np.frombuffer(ours.recv_bytes())
        child.join()
    return found


def examine(kind: str, numbers: int, repeats: int) -> dict[str, Any]:
    """All tests of one kind of noise, ``repeats`` times on fresh numbers: {test: p-values} and what came twice."""
    values: dict[str, list[float]] = {}
    twice, largest = 0, 0.0
    for _ in range(repeats):
        drawn = steps_of(kind, numbers)
        for name, value in law(kind, drawn[0, 0]).items():
            values.setdefault(name, []).append(value)
        for name, found in independence(drawn, elsewhere(kind, numbers)).items():
            values.setdefault(name, []).extend(found)
        twice += repeated(drawn)
        largest = max(largest, float(np.abs(drawn).max()))
    return {"p": values, "repeated": twice, "largest": largest}


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """The least p-value of each kind, how many there are, and whether all together are uniform."""
    every = [p for kind in results["kinds"].values() for some in kind["p"].values() for p in some]
    return {
        "least": {name: min(min(some) for some in kind["p"].values()) for name, kind in results["kinds"].items()},
        "p_values": len(every),
        "failures": sum(p < RARE for p in every) + sum(kind["repeated"] for kind in results["kinds"].values()),
        "uniform": float(stats.kstest(every, "uniform").pvalue),
    }


def costs(seconds: float) -> dict[str, Any]:
    """Milliseconds of a release of 10^6 numbers, and of the CNN's over a step at batch 128, by kind."""
    kinds = [kind for kind in KINDS if "float64" not in kind]
    million = [torch.randn(1_000_000)]
    sources = {kind: noise_source(KINDS[kind][0]) for kind in kinds}

    def release(kind: str, sums: list[torch.Tensor]) -> Callable[[], float]:
        def run() -> None:
            with compiling(kind):
                sources[kind].release(sums, 1.0, 128.0)

        return timed(run)

    timings = take_turns({kind: release(kind, million) for kind in kinds}, seconds, baseline="standard")
    workload = WORKLOADS["cnn"]
    torch.manual_seed(0)
    model, batch = workload.model(), workload.batch(128)
    prepared = CONTENDERS["cached"].prepare(copy.deepcopy(model), workload.losses, 1.0)
    sums = [torch.randn_like(parameter) for parameter in model.parameters()]
    turns = {kind: release(kind, sums) for kind in kinds} | {"step": timed(lambda: prepared.step(*batch))}
    shares = take_turns(turns, seconds, baseline="step")
    return {
        "million_ms": {kind: asdict(timings.milliseconds(kind)) for kind in kinds},
        "million_over_standard": {kind: asdict(timings.ratio(kind, "standard")) for kind in kinds},
        "cnn_parameters": sum(tensor.numel() for tensor in sums),
        "cnn_step_ms": asdict(shares.milliseconds("step")),
        "cnn_share": {kind: asdict(shares.ratio(kind, "step")) for kind in kinds},
    }


def in_markdown(results: dict[str, Any]) -> str:
    """Two tables and what they say."""
    total, cost = results["summary"], results["costs"]
    lines = [
        "# Noise: its law, its independence, its cost",
        "",
        f"{results['numbers']:,} numbers a test, each test {results['repeats']} times. {total['failures']} failures in "
        f"{total['p_values']:,} p-values (a failure is one below {RARE:g}, or a sequence of {SEQUENCE} numbers that "
        f"came twice); together they are uniform with p = {total['uniform']:.3f}.",
        "",
        "| noise | least p-value | sequences repeated | largest number |",
        "| --- | --- | --- | --- |",
    ]
    for kind, found in results["kinds"].items():
        lines.append(f"| {kind} | {total['least'][kind]:.2g} | {found['repeated']} | {found['largest']:.2f} |")
    lines += [
        "",
        f"A release's time: of 10^6 parameters, and of a CNN's {cost['cnn_parameters']:,} as a share of its private "
        f"step at batch 128, {cost['cnn_step_ms']['median']:.1f} ms with standard noise. Medians of turns; "
        f"{in_words(results['machine'])}.",
        "",
        "| noise | 10^6 parameters, ms | over standard | share of the CNN's step |",
        "| --- | --- | --- | --- |",
    ]
    for kind, spread in cost["million_ms"].items():
        over, share = cost["million_over_standard"][kind]["median"], cost["cnn_share"][kind]["median"]
        lines.append(f"| {kind} | {spread['median']:.2f} | {over:.2f} | {share:.2%} |")
    return "\n".join(lines) + "\n"


def plot(results: dict[str, Any], path: Path) -> None:
    """Densities, p-values and costs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (density, uniform, cost) = pyplot.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    edges = np.linspace(-6, 6, 97)
    middles, colours = (edges[1:] + edges[:-1]) / 2, ("#0072b2", "#d55e00")
    for kind, colour, marker in zip(("standard", "hardened"), colours, "o+", strict=True):
        counts, _ = np.histogram(steps_of(kind, results["numbers"]), edges)
        seen = counts > 0
        density.plot(middles[seen], counts[seen] / counts.sum() / np.diff(edges)[seen], marker, color=colour,
                     markersize=4, fillstyle="none", label=kind)  # fmt: skip
        values = np.sort([p for some in results["kinds"][kind]["p"].values() for p in some])
        uniform.plot(values, np.arange(1, len(values) + 1) / len(values), color=colour, label=kind)
    density.plot(middles, stats.norm.pdf(middles), color="black", linewidth=0.8, label="Gaussian")
    density.set(yscale="log", xlabel="standard deviations", ylabel="density", title="The law")
    uniform.plot([0, 1], [0, 1], color="black", linewidth=0.8, label="uniform, as they should be")
    uniform.set(xlabel="p-value", ylabel="share of tests at or below it", title="p-values of all tests")
    shares = {kind: 100 * spread["median"] for kind, spread in results["costs"]["cnn_share"].items()}
    bars = cost.barh(list(shares), list(shares.values()), color="#009e73")
    cost.bar_label(bars, fmt="%.1f%%", padding=3)
    cost.invert_yaxis()
    cost.set(xlabel="% of a CNN's private step at batch 128", title="The cost of a release",
             xlim=(0, 1.2 * max(shares.values())))  # fmt: skip
    for axes in (density, uniform):
        axes.grid(which="major", linewidth=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(in_words(results["machine"]), fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tests and the timing, writes three files; returns 1 when a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numbers", type=int, default=1_000_000, help="in each test (default: 1000000)")
    parser.add_argument("--repeats", type=int, default=5, help="of every test (default: 5)")
    parser.add_argument("--seconds", type=float, default=10.0, help="measuring time of each table (default: 10)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if warning := busy_warning():
        print(warning, file=sys.stderr)
    results: dict[str, Any] = {"machine": describe(), "numbers": options.numbers, "repeats": options.repeats}
    results["kinds"] = {kind: examine(kind, options.numbers, options.repeats) for kind in KINDS}
    results["summary"] = summary(results)
    results["costs"] = costs(options.seconds)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "noise_statistics.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "noise_statistics.md").write_text(in_markdown(results))
    plot(results, options.out / "noise_statistics.png")
    print(in_markdown(results))
    return 1 if results["summary"]["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
