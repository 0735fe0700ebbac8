"""What the self-check's comparison of losses costs: steps in which batches are loaded again, beside steps that aren't.

Engines over copies of one model take turns: one without a self-check, and one whose every batch is compared. Data are a
list of random examples, so that each is read and collated by itself, as from files. The difference of two steps of a
round is what a comparison takes: in each of the first six steps, and later in one of 400 physical batches, besides
batches that are larger in some dimension than all before.

    python experiments/self_check_cost.py [--workloads NAME ...] [--seconds S] [--out FOLDER]

writes self_check_cost.json and self_check_cost.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ghostclip import PrivacyEngine
from ghostclip.bench import WORKLOADS
from ghostclip.bench.machine import busy_warning, commit, describe, in_words
from ghostclip.bench.measure import Spread, take_turns, timed
from ghostclip.self_check import first_steps

RESULTS = Path(__file__).parent / "results"
FILE = "self_check_cost"
PLAIN, COMPARED = "a step without a self-check", "a step whose batch is compared"
PERIOD = first_steps.SELDOM  # of so many physical batches one is compared later in a training


def measure(name: str, size: int, seconds: float) -> dict[str, Any]:
    """Milliseconds of both kinds of step, of a comparison, and its share of a training's later steps."""
    torch.manual_seed(0)
    workload = WORKLOADS[name]
    model = workload.model()
    data = list(zip(*workload.batch(8 * size), strict=True))

    def losses(model: nn.Module, batch: Any) -> torch.Tensor:
        return workload.losses(model(batch[0]), batch[1])

    def step(self_check: bool) -> Callable[[], None]:
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=1e-3)
        engine = PrivacyEngine(
            own, optimizer, data, batch_size=size, noise_multiplier=1.0, self_check=self_check,
            sampling="without_replacement",
        )  # fmt: skip

        def turn() -> None:
            engine.step(next(iter(engine.batches())), losses)

        return turn

    turns = {PLAIN: timed(step(False)), COMPARED: timed(step(True))}
    for turn in turns.values():
        turn()  # plans, and gradients compared with autograd's, which only a first step does
    timings = take_turns(turns, seconds, baseline=PLAIN)
    rounds = sorted(set(timings.seconds[PLAIN]) & set(timings.seconds[COMPARED]))
    extra = [timings.seconds[COMPARED][n] - timings.seconds[PLAIN][n] for n in rounds]
    plain = [timings.seconds[PLAIN][n] for n in rounds]
    later = [each / PERIOD / one for each, one in zip(extra, plain, strict=True)]
    return {
        "batch_size": size,
        "ms": {part: asdict(timings.milliseconds(part)) for part in turns},
        "comparison": asdict(Spread.of([1000 * each for each in extra])),
        "steps": asdict(Spread.of([each / one for each, one in zip(extra, plain, strict=True)])),
        "share": asdict(Spread.of(later)),
    }


def markdown(results: dict[str, Any]) -> str:
    """A row for each workload."""
    lines = [
        "| network | batch | step, ms | a comparison, ms | in steps | share of later steps |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in results["workloads"].items():
        compared, steps, share = found["comparison"], found["steps"]["median"], found["share"]["median"]
        cells = [name, str(found["batch_size"]), f"{found['ms'][PLAIN]['median']:.3g}"]
        cells += [f"{compared['median']:.3g} ({compared['low']:.3g} to {compared['high']:.3g})"]
        lines.append(f"| {' | '.join(cells)} | {steps:.2f} | {100 * share:.2g}% |")
    where = in_words(results["machine"])
    return "\n".join([*lines, "", f"Median (quartiles). At commit {results['commit']} on {where}.", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment and writes its two files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ["mlp", "cnn", "lstm-imdb", "transformer", "cifar-cnn"]
    parser.add_argument("--workloads", nargs="+", default=names, choices=tuple(WORKLOADS))
    parser.add_argument("--batch-size", type=int, default=64, help="default: 64")
    parser.add_argument("--seconds", type=float, default=15.0, help="measuring time a workload (default: 15)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("ghostclip").setLevel(logging.ERROR)
    if warning := busy_warning():
        print(warning, file=sys.stderr)
    first_steps.SELDOM = 1  # every batch
    results: dict[str, Any] = {"machine": describe(), "commit": commit(), "every": PERIOD, "workloads": {}}
    for name in options.workloads:
        results["workloads"][name] = measure(name, options.batch_size, options.seconds)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{FILE}.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / f"{FILE}.md").write_text(markdown(results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
