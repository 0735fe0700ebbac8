"""An epoch of `PrivacyEngine` beside an epoch of a plain training loop over a torch DataLoader, everything included.

Both train the same network with Adam on 6,000 random images of MNIST's shape. The private epoch holds loading, Poisson
sampling, clipping, noise and charges; the plain one loading and shuffling. Epochs take turns, and the median of the
ratios is reported: of the first epoch, in which the self-check looks at 6 steps and strategies are measured (or the
graph is compiled), and of those after it. ``engine.epsilon()``, which users call when they like, is timed by itself.

    python experiments/end_to_end.py [--epochs N] [--models cnn,mlp] [--out FOLDER]

writes end_to_end.json and end_to_end.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip.bench.machine import busy_warning, commit, describe, in_words
from ghostclip.models import build
from ghostclip.wrap import unwrap

EXAMPLES, SHAPE, CLASSES = 6000, (1, 28, 28), 10
# name: (logical batch, compiled).
SETTINGS = {"default": (128, False), "compiled": (1024, True)}


def losses_of(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """One loss for each example."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets, reduction="none")


def plain_epochs(model: nn.Module, data: TensorDataset, batch_size: int) -> Callable[[], None]:
    """A function that trains for an epoch without privacy."""
    loader, optimizer = DataLoader(data, batch_size, shuffle=True), torch.optim.Adam(model.parameters())

    def epoch() -> None:
        for batch in loader:
            losses_of(model, batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return epoch


def private_epochs(
    model: nn.Module, data: TensorDataset, batch_size: int, compiled: bool
) -> tuple[Callable[[], None], ghostclip.PrivacyEngine]:
    """The same with PrivacyEngine as it is by default, and the engine."""
    optimizer = torch.optim.Adam(model.parameters())
    engine = ghostclip.PrivacyEngine(model, optimizer, data, batch_size=batch_size, noise_multiplier=1.0)
    if compiled:
        engine.compile()

    def epoch() -> None:
        for batch in engine.batches():
            engine.step(batch, losses_of)

    return epoch, engine


def measure(name: str, batch_size: int, compiled: bool, epochs: int) -> dict[str, Any]:
    """Seconds and ratios of ``epochs`` epochs after the first, and of the first."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(EXAMPLES, *SHAPE), torch.randint(0, CLASSES, (EXAMPLES,)))
    plain = plain_epochs(unwrap(build(name, SHAPE, CLASSES)), data, batch_size)
    private, engine = private_epochs(unwrap(build(name, SHAPE, CLASSES)), data, batch_size, compiled)
    seconds = [(_timed(plain), _timed(private)) for _ in range(1 + epochs)]
    ratios = [ours / theirs for theirs, ours in seconds]
    return {
        "plain_seconds": statistics.median(theirs for theirs, _ in seconds),
        "first": ratios[0],
        "over_plain": statistics.median(ratios[1:]),
        "lowest": min(ratios[1:]),
        "highest": max(ratios[1:]),
        "epsilon_seconds": _timed(engine.epsilon),
    }


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def markdown(results: dict[str, Any]) -> str:
    """The results as a table."""
    header = "| network | logical batch | first epoch | epochs after it | lowest and highest | epsilon, s |"
    lines = [header, "| --- " * 6 + "|"]
    for row in results["rows"]:
        kind = f"{row['model']}, compiled" if row["compiled"] else row["model"]
        spread = f"{row['lowest']:.2f} to {row['highest']:.2f}"
        numbers = f"{row['first']:.2f} | {row['over_plain']:.2f} | {spread} | {row['epsilon_seconds']:.2f}"
        lines.append(f"| {kind} | {row['batch_size']} | {numbers} |")
    about = f"An epoch of PrivacyEngine over one of a plain loop, {EXAMPLES:,} images of 28 x 28."
    place = f" Measured at commit {results['commit']}." if results["commit"] else ""
    return "\n".join([*lines, "", f"{about} Machine: {in_words(results['machine'])}.{place}", ""])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12, help="after the first (default: 12)")
    parser.add_argument("--models", default="cnn,mlp", help="of ghostclip.models (default: cnn,mlp)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    options = parser.parse_args(arguments)
    if warning := busy_warning():
        print(warning, file=sys.stderr)
    torch.set_num_threads(1)
    rows = []
    for name in options.models.split(","):
        for batch_size, compiled in SETTINGS.values():
            row = {"model": name, "batch_size": batch_size, "compiled": compiled}
            rows.append({**row, **measure(name, batch_size, compiled, options.epochs)})
            print(rows[-1], flush=True)
    results = {"machine": describe(), "commit": commit(), "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "end_to_end.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "end_to_end.md").write_text(markdown(results))


if __name__ == "__main__":
    main()
