"""Time for an example and memory of a step as logical batches grow, in physical batches of 64.

The paper's MLP on random images of 28 x 28. Every size has a process of its own with one thread. Memory is the most the
process had in a step above what it had before the first one, its data included.

    python experiments/logical_batches.py [--sizes 1000 10000 100000] [--steps N] [--out FOLDER]

writes logical_batches.json and logical_batches.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from several_processes import MIB, bytes_of
from torch.utils.data import TensorDataset

from ghostclip import PrivacyEngine
from ghostclip.bench.machine import busy_warning, commit, describe, in_words
from ghostclip.bench.measure import Spread
from ghostclip.bench.workloads import WORKLOADS

RESULTS = Path(__file__).parent / "results"
PHYSICAL, WARM, EXAMPLES = 64, 2, 120_000


def work(size: int, steps: int) -> dict[str, Any]:
    """Seconds for an example in each step after the first ones, and bytes."""
    torch.manual_seed(0)
    workload = WORKLOADS["mlp"]
    data = TensorDataset(torch.randn(EXAMPLES, 1, 28, 28), torch.randint(0, 10, (EXAMPLES,)))
    model = workload.model()
    engine = PrivacyEngine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data, batch_size=size, max_physical_batch_size=PHYSICAL,
        noise_multiplier=1.0, sampling="without_replacement", self_check=False,
    )  # fmt: skip

    def loss_fn(model: torch.nn.Module, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        return workload.losses(model(rows[0]), rows[1])

    before, seconds = bytes_of("VmRSS"), list[float]()
    while len(seconds) < steps + WARM:
        for batch in engine.batches():
            start = time.perf_counter()
            engine.step(batch, loss_fn)
            seconds.append((time.perf_counter() - start) / size)
    return {"size": size, "seconds": vars(Spread.of(seconds[WARM : steps + WARM])), "bytes": bytes_of("VmHWM") - before}


def page(results: dict[str, Any]) -> str:
    """The table."""
    lines = [
        "# Logical batches in small physical ones", "",
        f"Physical batches of {PHYSICAL} examples, the MLP, one thread.", "",
        "| examples in a logical batch | time for an example, us (quartiles) | memory of a step, MiB |",
        "| --- | --- | --- |",
    ]  # fmt: skip
    for row in results["rows"]:
        low, middle, high = (1e6 * row["seconds"][name] for name in ("low", "median", "high"))
        lines.append(f"| {row['size']:,} | {middle:.0f} ({low:.0f} to {high:.0f}) | {row['bytes'] / MIB:.1f} |")
    lines += ["", f"At commit {results['commit']} on {in_words(results['machine'])}.", ""]
    return "\n".join([*lines, "Computed by `python experiments/logical_batches.py`.", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes; with ``--alone`` measures one size and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000], help="of logical batches")
    parser.add_argument("--steps", type=int, default=4, help="that are timed (default: 4)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.alone is not None:
        print(json.dumps(work(options.alone, options.steps)))
        return 0
    if warning := busy_warning():
        print(warning, file=sys.stderr)
    results: dict[str, Any] = {"machine": describe(), "commit": commit(), "rows": []}
    for size in options.sizes:
        command = [sys.executable, __file__, "--alone", str(size), "--steps", str(options.steps)]
        told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        results["rows"].append(json.loads(told.splitlines()[-1]))
        print(results["rows"][-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "logical_batches.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "logical_batches.md").write_text(page(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
