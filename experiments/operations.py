"""Steps of models whose layers compute in ways of their own: parametrized weights, experts, norms, windows, scans.

    python experiments/operations.py [--only WORD ...] [--seconds 6]

For each row of experiments/zoo/operations.py: an ordinary step (mean loss, Adam) and a private one (GhostClipper with
its defaults, noise, Adam), and for parametrized weights both steps of the same model without them. They take turns
in one process on one thread; ratios are medians over the turns, of the processor's seconds. A model that is refused is
listed with the reason. Writes experiments/results/operations.json and operations.md.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from experiments.zoo.imports import make_torchvision_importable  # noqa: E402

make_torchvision_importable()

from experiments.zoo.operations import ROWS, Row  # noqa: E402
from experiments.zoo.subject import Batch  # noqa: E402
from ghostclip import GhostClipError, GhostClipper  # noqa: E402
from ghostclip.bench.contenders import adam, by_filling_gradients  # noqa: E402
from ghostclip.bench.measure import take_turns, timed  # noqa: E402

MAX_NORM, WARM_UP = 1.0, 4


def private(model: nn.Module, row: Row) -> Callable[[Any, Any], object]:
    """A private step, (batch, its targets)."""

    def fill(model: nn.Module, _: Any, max_norm: float) -> Callable[[Any, Any], object]:
        clipper = GhostClipper(model, max_norm)
        return lambda batch, _: clipper.clip(row.losses, batch)

    return by_filling_gradients(fill)(model, None, MAX_NORM).step  # type: ignore[arg-type]


def ordinary(model: nn.Module, row: Row) -> Callable[[Any, Any], object]:
    """An ordinary step, (batch, its targets)."""
    optimizer = adam(model)

    def step(batch: Batch, _: Any) -> None:
        row.losses(model, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measured(row: Row, seconds: float) -> dict[str, Any]:
    """Milliseconds of the ordinary step, and ratios; or why the model is refused."""
    torch.manual_seed(0)
    model = row.build().train()
    # What hooks have computed can't be copied.
    twin = row.build().train() if row.plain is not None else copy.deepcopy(model)
    batch = row.batch(row.examples)
    steps = {"ordinary": ordinary(twin, row), "private": private(model, row)}
    if row.plain is not None:
        steps["plain"] = private(row.plain().train(), row)
        steps["plain ordinary"] = ordinary(row.plain().train(), row)
    found: dict[str, Any] = {"kind": row.kind, "examples": row.examples}
    turns = {name: (lambda step=step: step(batch, batch["target"])) for name, step in steps.items()}
    try:
        for turn in turns.values():
            for _ in range(WARM_UP):
                turn()
    except GhostClipError as refusal:
        return found | {"refused": str(refusal)}
    timings = take_turns(
        {name: timed(turn, time.process_time) for name, turn in turns.items()}, seconds, baseline="ordinary"
    )
    found |= {"milliseconds": timings.milliseconds("ordinary").median}
    found |= {"over ordinary": timings.ratio("private", "ordinary").median}
    if row.plain is not None:
        found |= {"over plain": timings.ratio("private", "plain").median}
        found |= {"ordinary over plain": timings.ratio("ordinary", "plain ordinary").median}
    return found


def table(rows: dict[str, Any]) -> str:
    """The page."""
    lines = ["# Layers that compute in ways of their own", "",
             "Written by `experiments/operations.py`; do not edit. *Ordinary* is an ordinary step in milliseconds on",
             "one thread; a private step (clipping, noise, Adam) is given in ordinary steps, and for weights computed",
             "from other parameters in private steps of the same model with plain weights, beside what computing",
             "them costs an ordinary step.", "",
             "| model | kind | examples | ordinary, ms | private / ordinary | private / plain private "
             "| ordinary / plain ordinary |",
             "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for name, row in rows.items():
        if "refused" not in row:
            plain = [f"{row[key]:.2f}" if key in row else "" for key in ("over plain", "ordinary over plain")]
            cells = [name, row["kind"], str(row["examples"]), f"{row['milliseconds']:.1f}"]
            cells += [f"{row['over ordinary']:.2f}", *plain]
            lines.append(f"| {' | '.join(cells)} |")
    refused = {name: row for name, row in rows.items() if "refused" in row}
    if refused:
        lines += ["", "## Refused", "", "| model | what is said |", "| --- | --- |"]
        lines += [f"| {name} | {row['refused'].replace('|', chr(92) + '|')} |" for name, row in refused.items()]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the rows and writes both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="WORD", help="rows whose names or kinds have one of these words")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each row")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "operations.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    known = json.loads(options.results.read_text()) if options.results.exists() else {}
    for row in ROWS:
        chosen = not options.only or any(word in row.name or word in row.kind for word in options.only)
        if chosen and importlib.util.find_spec(row.library) is not None:
            known[row.name] = measured(row, options.seconds)
            print(row.name, known[row.name], flush=True)
            known = {each.name: known[each.name] for each in ROWS if each.name in known}
            options.results.write_text(json.dumps(known, indent=1) + "\n")
            options.results.with_suffix(".md").write_text(table(known))
    return 0


if __name__ == "__main__":
    sys.exit(main())
