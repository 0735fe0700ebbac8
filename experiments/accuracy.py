"""Accuracy at equal epsilon: features, a private mean, and what is put on top, each tuned alike and paired by seed.

Every row is tuned over three settings: each is trained three times on four fifths of the training images, compared on
the others. The best one is trained on all of them from further seeds, the same for all rows. A seed sets
initial weights, samples and noise; such noise protects nobody, and has the size of private noise. Tuning is not charged
to epsilon: it stands for a search on public data.

A second task, a logistic regression, has 100,000 synthetic examples in a fixed order, once each, where correlated noise
should help; with ``--data adult`` it is the only one, on Adult's.

    python experiments/accuracy.py [--only WORD ...] [--data NAME --root DIR] [--seeds N] [--processes P] [--out FOLDER]

writes accuracy.json after each run, and accuracy.md. Runs that are there are not repeated. ``--data mnist`` (or
fashion-mnist, cifar10, adult) reads files of ``--root`` in place of the digits, and writes accuracy-mnist.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from torch.utils.data import TensorDataset

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]

from equal_epsilon.cyclic import STREAMS, accuracy_of_stream, regression  # noqa: E402
from equal_epsilon.statistics import RIDGES, accuracy_of_statistics  # noqa: E402
from equal_epsilon.trainings import RATES, Row, accuracy_of, featured  # noqa: E402

from experiments.papers.paired import RULE, Hypothesis, differences, interval  # noqa: E402
from ghostclip import datasets  # noqa: E402
from ghostclip.bench.machine import commit, describe, in_words  # noqa: E402

RESULTS, FILE = Path(__file__).parent / "results", "accuracy"
EPSILONS = (1.0, 3.0, 8.0)
SEEDS, TUNING_SEEDS, FIRST_TUNING_SEED = 20, 3, 1000
CENTRED, LINEAR = "CNN, private mean", "linear, private mean"
STATISTICS = "noisy statistics, private mean"
LATER = (0.15, 0.35, 0.7)  # of the recipe's rate, where an epoch has three steps in place of one
ROWS = {
    "paper's CNN": Row("the CNN of Lee and Kifer, Poisson batches of 512, 30 epochs", "cnn", centred=False),
    "random filters": Row("a CNN with random filters, full batches, few steps", "random filters", centred=False),
    "CNN": Row("the same with filters for 12 directions", centred=False),
    CENTRED: Row("the same, features centred by a private mean"),
    "noisy statistics": Row("noisy statistics of the linear model's features (AdaSSP)", "", False, rates=RIDGES),
    STATISTICS: Row("the same, features centred by a private mean", "", rates=RIDGES),
    "linear": Row("linear on fixed oriented features", "oriented-linear", centred=False, rates=(0.1, 0.3, 1.0)),
    LINEAR: Row("the same, features centred by a private mean", "oriented-linear"),
}
# What is put on top of both networks with a private mean.
ADDED: dict[str, dict[str, Any]] = {
    "average": {"about": "and a moving average of the weights", "averaged": True},
    "8 views": {"about": "and 8 views of each image (multiplicity)", "views": True},
    "Adam": {"about": "and DP-Adam", "adam": True},
    "low-pass": {"about": "and a low-pass filter of the gradients for momentum", "low_pass": True},
    "bands": {"about": "and 3 bands, cyclic Poisson batches of a third", "correlation": "bands", "rates": LATER},
    "BLT": {"about": "and BLT with 3 buffers, cyclic batches of a third", "correlation": "BLT", "rates": LATER},
}
# {how names of rows begin: (the row that is added to, its network)}
BASES = {"linear": (LINEAR, "oriented-linear"), "CNN": (CENTRED, "oriented")}
ROWS |= {f"{base}, {name}": Row(network=BASES[base][1], **options) for base in BASES for name, options in ADDED.items()}
LEAST = 5  # runs of a row, below which its hypotheses are left open
SOURCES = {
    "average": ("better", "De et al. 2022"), "8 views": ("better", "De et al. 2022"), "Adam": ("worse", "few steps"),
    "low-pass": ("better", "Zhang et al. 2024"), "bands": ("better", "Choquette-Choo et al. 2023"),
    "BLT": ("better", "McMahan et al. 2024"),
}  # fmt: skip
HYPOTHESES = (
    Hypothesis("random filters", "paper's CNN", "better", "few steps are enough"),
    Hypothesis("CNN", "random filters", "better", "Tramer and Boneh 2021"),
    Hypothesis(CENTRED, "CNN", "better", "a mean is cheap"),
    Hypothesis(LINEAR, "linear", "better", "a mean is cheap"),
    Hypothesis(LINEAR, CENTRED, "better", "Tramer and Boneh 2021"),
    Hypothesis(STATISTICS, "noisy statistics", "better", "a mean is cheap"),
    Hypothesis(LINEAR, STATISTICS, "better", "measured before"),
    *(
        Hypothesis(f"{base}, {name}", row, *said)
        for base, (row, _) in BASES.items()
        for name, said in (SOURCES | {"together": ("better", "each helped in tuning")}).items()
    ),
)
OF_STREAMS = (
    Hypothesis("cyclic", "Poisson", "worse", "no amplification"),
    Hypothesis("cyclic, 32 bands", "cyclic", "better", "Choquette-Choo et al. 2023"),
    Hypothesis("cyclic, BLT", "cyclic", "better", "McMahan et al. 2024"),
    Hypothesis("cyclic, 32 bands", "Poisson", "better", "Choquette-Choo et al. 2023"),
    Hypothesis("cyclic Poisson, bands", "Poisson", "better", "Choquette-Choo et al. 2023"),
)
STREAM_EPSILONS = (0.5, 2.0, 8.0)


class Run(NamedTuple):
    """One training: a row of ``task`` ("images" or "stream"), its setting, and whether it is for tuning."""

    task: str
    name: str
    row: Row | None
    epsilon: float
    factor: float
    seed: int
    tuning: bool
    source: tuple[str, str | None]

    @property
    def key(self) -> str:
        """Of the run in the results."""
        return f"{self.task}|{self.name}|{self.epsilon:g}|{self.factor:g}|{self.seed}"


def accuracy(run: Run) -> tuple[str, float]:
    """The run's key and its accuracy."""
    torch.set_num_threads(1)
    data = _data(run.task, *run.source, run.tuning)
    if run.task == "stream":
        found = accuracy_of_stream(run.name, run.epsilon, run.factor, data, run.seed)
    elif run.row is not None and not run.row.network:
        centred = run.row.centred
        found = accuracy_of_statistics(run.epsilon, run.factor, featured(data), run.seed, centred=centred)
    else:
        found = accuracy_of(run.row, run.epsilon, run.factor, data, run.seed)
    return run.key, found


@cache
def _data(task: str, name: str, root: str | None, tuning: bool) -> datasets.Data:
    """The data set; for tuning every fifth training example is tested in place of the test part."""
    data = regression() if task == "stream" and name != "adult" else datasets.load(name, root)
    if not tuning:
        return data
    fifth = torch.arange(len(data.train)) % 5 == 0
    parts = [TensorDataset(*(each[rows] for each in data.train.tensors)) for rows in (~fifth, fifth)]
    return datasets.Data(data.name, *parts, input_shape=data.input_shape, classes=data.classes)


def tuning(task: str, rows: dict[str, Any], source: tuple[str, str | None]) -> Iterator[Run]:
    """All tuning runs of the rows."""
    epsilons = STREAM_EPSILONS if task == "stream" else EPSILONS
    for (name, row), epsilon in product(rows.items(), epsilons):
        for factor, seed in product(row.rates if task == "images" else RATES, range(TUNING_SEEDS)):
            seed += FIRST_TUNING_SEED
            yield Run(task, name, row if task == "images" else None, epsilon, factor, seed, True, source)


def tuned(runs: dict[str, float], task: str, name: str, epsilon: float) -> tuple[float, float]:
    """The setting with the best mean accuracy in tuning, and that accuracy."""
    found: dict[float, list[float]] = {}
    for key, value in runs.items():
        of_task, of_name, of_epsilon, factor, seed = key.split("|")
        if (of_task, of_name, of_epsilon) == (task, name, f"{epsilon:g}") and int(seed) >= FIRST_TUNING_SEED:
            found.setdefault(float(factor), []).append(value)
    best = max(found, key=lambda factor: mean(found[factor]))
    return best, mean(found[best])


def tested(runs: dict[str, float], task: str, name: str, epsilon: float) -> list[float]:
    """Test accuracies of the tuned setting, by seed."""
    factor, _ = tuned(runs, task, name, epsilon)
    keys = (f"{task}|{name}|{epsilon:g}|{factor:g}|{seed}" for seed in range(FIRST_TUNING_SEED))
    return [runs[key] for key in keys if key in runs]


def helpful(runs: dict[str, float], base: str) -> list[str]:
    """What made this network better in tuning, by the mean over all epsilons; of bands and BLT the better one."""

    def reached(row: str) -> float:
        return mean(tuned(runs, "images", row, each)[1] for each in EPSILONS)

    found = {name: reached(f"{base}, {name}") for name in ADDED}
    found = {name: value for name, value in found.items() if value > reached(BASES[base][0])}
    if {"bands", "BLT"} <= found.keys():
        del found[min("bands", "BLT", key=lambda name: found[name])]
    return list(found)


def together(base: str, names: Sequence[str]) -> dict[str, Row]:
    """{name: row} of this network with all of these at once, where they are several."""
    options = {key: value for name in names for key, value in ADDED[name].items()}
    row = Row(network=BASES[base][1], **options | {"about": f"and {', '.join(names)} at once"})
    return {f"{base}, together": row} if len(names) > 1 else {}


def measure(options: argparse.Namespace, results: dict[str, Any], keep: Callable[[], None]) -> None:
    """Tunes and trains what isn't there yet, the first seeds of all rows before further ones."""
    source = options.data, options.root
    chosen, streams = (
        {name: row for name, row in rows.items() if _asked(name, options.only)} for rows in (ROWS, STREAMS)
    )
    chosen = {} if options.data == "adult" else chosen
    streams = streams if options.data in ("digits", "adult") else {}
    runs = results["runs"]

    def work(wanted: Iterable[Run]) -> None:
        for key, value in _accuracies([run for run in wanted if run.key not in runs], options.processes):
            runs[key] = value
            keep()

    work([*tuning("stream", streams, source), *tuning("images", chosen, source)])
    for base, (row, _) in BASES.items():
        if {row, *(f"{base}, {name}" for name in ADDED)} <= {*chosen}:
            names = results.setdefault("helpful", {})[base] = helpful(runs, base)
            work(tuning("images", together(base, names), source))
            chosen |= together(base, names)
    work(_trainings(runs, chosen, streams, options.seeds, source))


def _accuracies(runs: Sequence[Run], processes: int) -> Iterator[tuple[str, float]]:
    """Of all runs, in this process or in so many others."""
    if processes == 1 or not runs:
        yield from map(accuracy, runs)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(accuracy, runs)


def _trainings(
    runs: dict[str, float], rows: dict[str, Row], streams: dict[str, Any], seeds: int, source: tuple[str, str | None]
) -> Iterator[Run]:
    """The runs that are tested, seed by seed."""
    for seed in range(seeds):
        for name, epsilon in product(streams, STREAM_EPSILONS):
            yield Run("stream", name, None, epsilon, tuned(runs, "stream", name, epsilon)[0], seed, False, source)
        for (name, row), epsilon in product(rows.items(), EPSILONS):
            yield Run("images", name, row, epsilon, tuned(runs, "images", name, epsilon)[0], seed, False, source)


def _asked(name: str, words: Sequence[str] | None) -> bool:
    """Whether a word is the name of the row, or is part of it and of no row the name."""
    known = {**ROWS, **STREAMS}
    return words is None or any(word == name or (word not in known and word in name) for word in words)


def markdown(results: dict[str, Any]) -> str:
    """Tables of accuracies and of hypotheses, for both tasks."""
    runs, rows = results["runs"], dict(ROWS)
    for base, names in results.get("helpful", {}).items():
        rows |= together(base, names)
    about = {name: row.about for name, row in rows.items()}
    lines: list[str] = []
    if any(key.startswith("images|") for key in runs):
        lines += [
            f"Test accuracy in percent on {results['data']} at delta 1e-5: mean and standard error of the runs. Rows "
            "that begin with `and` have one thing more than the same network with a private mean.",
            "",
            *_table(runs, "images", about, EPSILONS),
            "",
            "Accuracy of the first minus that of the second, in points, over the seeds that both have: mean (95% "
            "interval) and outcome.",
            "",
            *_outcomes(runs, "images", HYPOTHESES, EPSILONS),
        ]
    if any(key.startswith("stream|") for key in runs):
        lines += [
            "",
            f"Logistic regression, {'Adult' if results['data'] == 'adult' else '100,000 synthetic examples'}, one "
            "epoch in batches of 500, delta 1e-6:",
            "",
            *_table(runs, "stream", {name: stream.about for name, stream in STREAMS.items()}, STREAM_EPSILONS),
            "",
            *_outcomes(runs, "stream", OF_STREAMS, STREAM_EPSILONS),
        ]
    place = f"At commit {results['commit']}. Machine: {in_words(results['machine'])}."
    return "\n".join([*lines, "", RULE, "", place, ""]).lstrip()


def _table(runs: dict[str, float], task: str, about: dict[str, str], epsilons: Sequence[float]) -> list[str]:
    """Mean and standard error of each row that was run."""
    lines = ["| row | what it is | runs | " + " | ".join(f"epsilon {each:g}" for each in epsilons) + " |"]
    lines.append("| --- " * (3 + len(epsilons)) + "|")
    for name in about:
        if _known(runs, task, name):
            found = [tested(runs, task, name, epsilon) for epsilon in epsilons]
            digits = 2 if task == "stream" else 1
            cells = [f"{100 * mean(v):.{digits}f} ({100 * stdev(v) / len(v) ** 0.5:.{digits}f})" for v in found]
            counts = {min(map(len, found)), max(map(len, found))}
            lines.append(f"| {name} | {about[name]} | {' to '.join(map(str, sorted(counts)))} | {' | '.join(cells)} |")
    return lines


def _outcomes(
    runs: dict[str, float], task: str, hypotheses: Sequence[Hypothesis], epsilons: Sequence[float]
) -> list[str]:
    """What came out of each hypothesis about rows that were run often enough."""
    lines = ["| hypothesis | source | " + " | ".join(f"epsilon {each:g}" for each in epsilons) + " |"]
    lines.append("| --- " * (2 + len(epsilons)) + "|")
    for each in hypotheses:
        if not all(_known(runs, task, name) for name in (each.method, each.other)):
            continue
        pairs = [[tested(runs, task, name, epsilon) for name in (each.method, each.other)] for epsilon in epsilons]
        if min(len(values) for pair in pairs for values in pair) < LEAST:
            continue
        cells = []
        for pair in pairs:
            both = min(map(len, pair))
            found = interval(differences(*(values[:both] for values in pair)))
            cells.append(f"{found.points()}, {each.outcome(found)}")
        lines.append(f"| {each.method} is {each.claim} than {each.other} | {each.source} | {' | '.join(cells)} |")
    return lines


def _known(runs: dict[str, float], task: str, name: str) -> bool:
    """Whether the row has two tested runs at each epsilon."""
    epsilons = STREAM_EPSILONS if task == "stream" else EPSILONS
    tried = {key.split("|")[2] for key in runs if key.startswith(f"{task}|{name}|")}
    return all(f"{each:g}" in tried and len(tested(runs, task, name, each)) > 1 for each in epsilons)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is missing, and writes both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="rows of these names, or with such a word in theirs")
    parser.add_argument("--data", choices=("digits", "mnist", "fashion-mnist", "cifar10", "adult"), default="digits")
    parser.add_argument("--root", metavar="DIR", help="folder of the data set's files")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"tested runs of each row (default: {SEEDS})")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    path = options.out / f"{FILE}{'' if options.data == 'digits' else f'-{options.data}'}.json"
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    results |= {"data": options.data, "machine": describe(), "commit": commit()}

    def keep() -> None:
        path.with_suffix(".new").write_text(json.dumps(results, indent=1) + "\n")
        os.replace(path.with_suffix(".new"), path)

    measure(options, results, keep)
    path.with_suffix(".md").write_text(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
