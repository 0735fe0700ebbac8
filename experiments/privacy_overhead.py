"""What noise and ledger cost beside a training step: both noises, the ledger by blocks and with every step flushed.

The parts take turns with an ordinary step and with a private one of the same model, and each is reported as a share of
the step of the same round: noise for all parameters of the model, added and divided; a step's charge in a ledger with
blocks as they are by default (the time of a whole block over its steps) and with blocks of one, where every step waits
for the disk; and correlated noise, which takes the place of independent noise.

    python experiments/privacy_overhead.py [--workloads NAME ...] [--seconds S] [--out FOLDER]

writes privacy_overhead.json and privacy_overhead.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ghostclip.bench import CONTENDERS, WORKLOADS
from ghostclip.bench.machine import busy_warning, describe, in_words
from ghostclip.bench.measure import take_turns, timed
from ghostclip.events import SampledGaussian
from ghostclip.ledger import BLOCK, Ledger
from ghostclip.noise import BandedToeplitz, BufferedToeplitz, noise_source
from ghostclip.noise.history import history_of

STEPS = {"nonprivate": "an ordinary step", "cached": "a private step, its noise included"}
PARTS = {
    "noise": "standard noise",
    "hardened noise": "hardened noise",
    "8 bands": "noise shared by 8 bands",
    "BLT": "noise of BLT, 3 buffers",
    "ledger": f"a charge, in blocks of {BLOCK}",
    "ledger, every step": "a charge that is flushed by itself",
}
CORRELATIONS = {"8 bands": BandedToeplitz(bands=8), "BLT": BufferedToeplitz(buffers=3)}
PLANNED = 100_000  # steps of correlated noise, more than are measured
TOGETHER = ("noise", "ledger")
LIMIT = 0.05


def measure(name: str, size: int, seconds: float, place: Path) -> dict[str, Any]:
    """Milliseconds of every part, and its share of each kind of step."""
    torch.manual_seed(0)
    workload = WORKLOADS[name]
    model, batch = workload.model(), workload.batch(size)
    turns: dict[str, Callable[[], object]] = {
        step: _step(CONTENDERS[step].prepare(copy.deepcopy(model), workload.losses, 1.0).step, batch) for step in STEPS
    }
    turns["noise"] = _noise(model, "standard", size)
    if find_spec("cryptography") is not None:
        turns["hardened noise"] = _noise(model, "hardened", size)
    turns |= {name: _noise(model, "standard", size, matrix) for name, matrix in CORRELATIONS.items()}
    turns["ledger"] = _charges(Ledger(place / "blocks"), BLOCK)
    turns["ledger, every step"] = _charges(Ledger(place / "steps", block=1), 1)
    timings = take_turns({part: timed(turn) for part, turn in turns.items()}, seconds, baseline="nonprivate")
    for number in timings.seconds["ledger"]:
        timings.seconds["ledger"][number] /= BLOCK
    rounds = sorted(set.intersection(*(set(timings.seconds[part]) for part in TOGETHER)))
    timings.seconds["together"] = {n: sum(timings.seconds[part][n] for part in TOGETHER) for n in rounds}
    return {
        "batch_size": size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "ms": {part: asdict(timings.milliseconds(part)) for part in timings.seconds},
        "share": {
            step: {part: asdict(timings.ratio(part, step)) for part in timings.seconds if part not in STEPS}
            for step in STEPS
        },
    }


def _step(step: Callable[..., None], batch: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], None]:
    return lambda: step(*batch)


def _noise(model: nn.Module, mode: str, size: int, correlation: Any = None) -> Callable[[], object]:
    """A release of all gradients; made beforehand and used again, since only the time matters."""
    source, sums = noise_source(mode), [torch.randn_like(p) for p in model.parameters()]
    if (history := None if correlation is None else history_of(correlation, PLANNED)) is not None:
        return lambda: history.release(source, sums, 1.0, float(size))
    return lambda: source.release(sums, 1.0, float(size))


def _charges(ledger: Ledger, count: int) -> Callable[[], None]:
    """So many charges, which take up whole blocks."""
    account, event = ledger.account(), SampledGaussian(0.01, 1.0)

    def charge() -> None:
        for _ in range(count):
            account.charge(event)

    return charge


def markdown(results: dict[str, Any]) -> str:
    """A table for each workload."""
    lines = []
    for name, found in results["workloads"].items():
        ms, share = found["ms"], found["share"]
        lines += [
            f"{name}, batch {found['batch_size']}, {found['parameters']:,} parameters; an ordinary step takes "
            f"{_readable(ms['nonprivate']['median'])} ms, a private one {_readable(ms['cached']['median'])} ms.",
            "",
            "| part | microseconds a step | share of an ordinary step | of a private one |",
            "| --- | --- | --- | --- |",
        ]
        for part, about in {**PARTS, "together": "standard noise and ledger in blocks"}.items():
            if part in ms:
                shares = (_percent(share[step][part]) for step in STEPS)
                lines.append(f"| {about} | {_readable(1e3 * ms[part]['median'])} | {' | '.join(shares)} |")
        lines.append("")
    return "\n".join([*lines, f"Median (quartiles). Machine: {in_words(results['machine'])}.", ""])


def _readable(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(spread: dict[str, float]) -> str:
    return f"{100 * spread['median']:.2g}% ({100 * spread['low']:.2g} to {100 * spread['high']:.2g})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment and writes its two files; 1 when noise and ledger take more of a CNN's step than promised."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", default=["cnn", "mlp", "transformer"], choices=tuple(WORKLOADS))
    parser.add_argument("--batch-size", type=int, default=128, help="default: 128")
    parser.add_argument("--seconds", type=float, default=15.0, help="measuring time a workload (default: 15)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if warning := busy_warning():
        print(warning, file=sys.stderr)
    results: dict[str, Any] = {"machine": describe(), "workloads": {}}
    for name in options.workloads:
        with tempfile.TemporaryDirectory() as place:
            results["workloads"][name] = measure(name, options.batch_size, options.seconds, Path(place))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "privacy_overhead.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "privacy_overhead.md").write_text(markdown(results))
    print(f"wrote privacy_overhead.json and privacy_overhead.md to {options.out}; {in_words(results['machine'])}")
    cnn = results["workloads"].get("cnn")
    return int(cnn is not None and cnn["share"]["nonprivate"]["together"]["median"] > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
