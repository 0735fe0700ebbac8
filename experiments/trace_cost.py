"""What `engine.trace` costs: traced and untraced steps of one engine, beside a private step without a loader.

Engines over copies of one model take turns: one without a trace, one of which every step is traced, to npz and to
Parquet, and one with a trace whose steps between the traced ones are timed. The extra time of a traced step over an
untraced one of the same round, divided by the default of ``every``, is reported as a share of a private step on a batch
that is in memory already, which is shorter than any step with a loader.

    python experiments/trace_cost.py [--workloads NAME ...] [--seconds S] [--out FOLDER]

writes trace_cost.json and trace_cost.md; returns 1 where a trace takes more of the average step than promised.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ghostclip import PrivacyEngine
from ghostclip.bench import CONTENDERS, WORKLOADS
from ghostclip.bench.machine import busy_warning, commit, describe, in_words
from ghostclip.bench.measure import Spread, Timings, take_turns, timed

RESULTS = Path(__file__).parent / "results"
FILE = "trace_cost"
EVERY: int = inspect.signature(PrivacyEngine.trace).parameters["every"].default
LIMIT = 0.02
PRIVATE, PLAIN, BETWEEN = "a private step on a batch in memory", "engine.step", "engine.step between traced ones"
TRACED = {"npz": "engine.step, traced to npz", "parquet": "engine.step, traced to Parquet"}


def measure(name: str, size: int, seconds: float, folder: Path) -> dict[str, Any]:
    """Milliseconds of every kind of step, and what a trace takes of the average one."""
    torch.manual_seed(0)
    workload = WORKLOADS[name]
    model, data = workload.model(), TensorDataset(*workload.batch(8 * size))
    prepared = CONTENDERS["cached"].prepare(copy.deepcopy(model), workload.losses, 1.0)
    batch = workload.batch(size)

    def losses(model: nn.Module, examples: Any) -> torch.Tensor:
        return workload.losses(model(examples[0]), examples[1])

    def step(trace: Path | None, every: int = 1) -> Callable[[], None]:
        own = copy.deepcopy(model)
        optimizer = torch.optim.Adam(own.parameters(), lr=1e-3)
        engine = PrivacyEngine(
            own, optimizer, data, batch_size=size, noise_multiplier=1.0, self_check=False,
            sampling="without_replacement",
        )  # fmt: skip
        if trace is not None:
            engine.trace(trace, every=every)
        batches = _endless(engine)
        return lambda: engine.step(next(batches), losses) and None

    turns: dict[str, Callable[[], object]] = {PRIVATE: lambda: prepared.step(*batch), PLAIN: step(None)}
    turns |= {about: step(folder / f"{name}.{suffix}") for suffix, about in TRACED.items()}
    turns[BETWEEN] = step(folder / f"{name}-between.npz", every=10**9)
    timings = take_turns({part: timed(turn) for part, turn in turns.items()}, seconds, baseline=PRIVATE)
    return {
        "batch_size": size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "ms": {part: asdict(timings.milliseconds(part)) for part in turns},
        "share": {suffix: asdict(share(timings, about)) for suffix, about in TRACED.items()},
        "between": asdict(timings.ratio(BETWEEN, PLAIN)),
    }


def _endless(engine: PrivacyEngine) -> Iterator[Any]:
    while True:
        yield from engine.batches()


def share(timings: Timings, traced: str) -> Spread:
    """(traced step - untraced one) / EVERY over a private step, within each round."""
    seconds = timings.seconds
    rounds = set.intersection(*(set(seconds[part]) for part in (traced, PLAIN, PRIVATE)))
    return Spread.of([(seconds[traced][n] - seconds[PLAIN][n]) / EVERY / seconds[PRIVATE][n] for n in sorted(rounds)])


def markdown(results: dict[str, Any]) -> str:
    """A row for each workload."""
    lines = [
        f"Every {EVERY}th step is traced. Share: the extra time of a traced step over {EVERY} private steps.",
        "",
        "| network | batch | private step, ms | traced step over untraced: npz | Parquet | share of the average step: "
        "npz | Parquet | step between traced ones over one without a trace |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in results["workloads"].items():
        ms = {part: spread["median"] for part, spread in found["ms"].items()}
        over = [f"{ms[about] / ms[PLAIN]:.2f}" for about in TRACED.values()]
        shares = [_percent(found["share"][suffix]) for suffix in TRACED]
        between = found["between"]
        cells = [name, str(found["batch_size"]), f"{ms[PRIVATE]:.3g}", *over, *shares]
        lines.append(
            f"| {' | '.join(cells)} | {between['median']:.3f} ({between['low']:.3f} to {between['high']:.3f}) |"
        )
    where = in_words(results["machine"])
    return "\n".join([*lines, "", f"Median (quartiles). At commit {results['commit']} on {where}.", ""])


def _percent(spread: dict[str, float]) -> str:
    return f"{100 * spread['median']:.2g}% ({100 * spread['low']:.2g} to {100 * spread['high']:.2g})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment and writes its two files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", default=["mlp", "cnn"], choices=tuple(WORKLOADS))
    parser.add_argument("--batch-size", type=int, default=128, help="default: 128")
    parser.add_argument("--seconds", type=float, default=20.0, help="measuring time a workload (default: 20)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("ghostclip").setLevel(logging.ERROR)
    if warning := busy_warning():
        print(warning, file=sys.stderr)
    results: dict[str, Any] = {"machine": describe(), "commit": commit(), "every": EVERY, "workloads": {}}
    for name in options.workloads:
        with tempfile.TemporaryDirectory() as folder:
            results["workloads"][name] = measure(name, options.batch_size, options.seconds, Path(folder))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{FILE}.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / f"{FILE}.md").write_text(markdown(results))
    print(markdown(results))
    found = [row["share"][suffix]["median"] for row in results["workloads"].values() for suffix in TRACED]
    return int(max(found) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
