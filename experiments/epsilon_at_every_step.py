"""What `engine.epsilon()` takes when it is asked after every step, and how far it is from composing anew.

    python experiments/epsilon_at_every_step.py [--steps N] [--out FOLDER]

writes epsilon_at_every_step.json and epsilon_at_every_step.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from ghostclip import PrivacyEngine
from ghostclip.accounting import epsilon_of
from ghostclip.bench.machine import busy_warning, commit, describe, in_words
from ghostclip.bench.measure import Spread

RESULTS = Path(__file__).parent / "results"
FILE = "epsilon_at_every_step"
# (examples, batch size, noise multiplier, target delta)
SETTINGS = ((1_000, 100, 1.0, 1e-5), (60_000, 256, 1.1, 1e-5), (1_000_000, 1_000, 0.6, 1e-7))
# After so many steps the answer is compared with composing anew.
COMPARED = 100


def measure(size: int, batch_size: int, noise: float, delta: float, steps: int) -> dict[str, Any]:
    """Asks after each of ``steps`` steps."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    data = TensorDataset(torch.randn(size, 4), torch.arange(size) % 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine(
        model, optimizer, data, batch_size=batch_size, noise_multiplier=noise, target_delta=delta, self_check=False
    )
    seconds, above = [], []
    while len(seconds) < steps:
        for batch in engine.batches():
            engine.step(batch, lambda model, rows: F.cross_entropy(model(rows[0]), rows[1], reduction="none"))
            start = time.perf_counter()
            found = engine.epsilon()
            seconds.append(time.perf_counter() - start)
            if len(seconds) % COMPARED == 0:
                above.append(found / epsilon_of(engine.events, delta=delta) - 1)
            if len(seconds) == steps:
                break
    return {
        "size": size, "batch_size": batch_size, "noise_multiplier": noise, "delta": delta, "steps": steps,
        "epsilon": found, "first": seconds[0], "later": vars(Spread.of(seconds[1:])), "most": max(seconds[1:]),
        "lowest": min(above), "highest": max(above),
    }  # fmt: skip


def markdown(results: dict[str, Any]) -> str:
    """The table."""
    lines = [
        "# Epsilon at every step",
        "",
        "`engine.epsilon()` after each step. The last two columns are its least and its largest relative excess over "
        f"composing all steps anew, which is done every {COMPARED} steps.",
        "",
        "| examples | batch | noise multiplier | delta | steps | epsilon at the end | first call, ms | later calls, ms "
        "(quartiles) | slowest later call, ms | least excess | largest excess |",
        "| --- " * 11 + "|",
    ]
    for row in results["rows"]:
        low, middle, high = (1e3 * row["later"][name] for name in ("low", "median", "high"))
        lines.append(
            f"| {row['size']:,} | {row['batch_size']:,} | {row['noise_multiplier']} | {row['delta']} "
            f"| {row['steps']:,} "
            f"| {row['epsilon']:.4f} | {1e3 * row['first']:.0f} | {middle:.2f} ({low:.2f} to {high:.2f}) | "
            f"{1e3 * row['most']:.1f} | {row['lowest']:.1e} | {row['highest']:.1e} |"
        )
    lines += ["", f"At commit {results['commit']} on {in_words(results['machine'])}.", ""]
    return "\n".join([*lines, f"Computed by `python experiments/{FILE}.py`.", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment and writes its two files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="after each of which is asked (default: 1000)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if warning := busy_warning():
        print(warning, file=sys.stderr)
    results: dict[str, Any] = {"machine": describe(), "commit": commit()}
    results["rows"] = [measure(*setting, options.steps) for setting in SETTINGS]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{FILE}.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / f"{FILE}.md").write_text(markdown(results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
