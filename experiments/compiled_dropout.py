"""Compiled steps of models with dropout: GPT-2 and BERT of transformers, private and not, eager and compiled.

Dropout draws other numbers in each step, so that sums can't be compared; those of the same models without it are, by
`python -m experiments.peers` (bench-published.md). Here steps take turns, and each is reported as the median of its
time over the ordinary eager step of the same round.

    OMP_NUM_THREADS=1 python experiments/compiled_dropout.py [--seconds S] [--out FOLDER]

writes compiled_dropout.json and its page, in ten minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from experiments.peers.fine_tuned import with_dropout  # noqa: E402
from ghostclip.bench import CONTENDERS  # noqa: E402
from ghostclip.bench.machine import busy_warning, commit, describe, in_words  # noqa: E402
from ghostclip.bench.measure import take_turns, timed  # noqa: E402
from ghostclip.bench.workloads import Workload  # noqa: E402

ORDINARY = "nonprivate"
NAMES = (ORDINARY, "nonprivate-compiled", "cached", "compiled")
DROPOUT = (0.0, 0.1)


def measured(workload: Workload, seconds: float) -> dict[str, dict[str, Any]]:
    """{contender: milliseconds, and over the ordinary step's}."""
    turns = {}
    for name in NAMES:
        torch.manual_seed(0)
        model, inputs, targets = workload.on("cpu", workload.batch_size)
        turns[name] = timed(CONTENDERS[name].prepare(model, workload.losses, 1.0).turn(inputs, targets))
        turns[name]()  # compiles
    timings = take_turns(turns, seconds, baseline=ORDINARY)
    return {
        name: {"ms": asdict(timings.milliseconds(name)), "over": asdict(timings.ratio(name, ORDINARY))}
        for name in NAMES
    }


def markdown(results: dict[str, Any]) -> str:
    """The table: a row for each model and dropout."""
    lines = [
        "# Compiled steps of models with dropout",
        "",
        "Time over the ordinary eager step: median of rounds (quartiles). Models of transformers, random weights; a "
        "step is forward, gradients, noise and Adam.",
        "",
        "| model | dropout | ordinary, ms | ordinary, compiled | private | private, compiled |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in results["rows"]:
        found = row["contenders"]
        cells = [row["about"], f"{row['dropout']:g}", f"{found[ORDINARY]['ms']['median']:.3g}"]
        cells += ["{median:.2f} ({low:.2f} to {high:.2f})".format(**found[name]["over"]) for name in NAMES[1:]]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        f"Measured at {'commit ' + results['commit'] if results['commit'] else 'no commit known'}. Machine: "
        f"{in_words(results['machine'])}.",
        "",
        "Computed by `python experiments/compiled_dropout.py`.",
        "",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90.0, help="measuring time of each row (default: 90)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if warning := busy_warning():
        print(warning, file=sys.stderr)
    results: dict[str, Any] = {"machine": describe(), "commit": commit(), "rows": []}
    for dropout in DROPOUT:
        for workload in with_dropout(dropout):
            row = {"workload": workload.name, "about": workload.about, "dropout": dropout}
            results["rows"].append(row | {"contenders": measured(workload, options.seconds)})
            print(markdown(results), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "compiled_dropout.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "compiled_dropout.md").write_text(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
