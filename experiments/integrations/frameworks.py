"""A private training in each framework: lines that change, whether it is the hand-written one, and what it costs.

Lines are those added or changed in experiments/integrations/loops.py. The difference is that of the weights after two
epochs in float64, with ``noise="test"`` and one seed, from those of the loop of one's own (relative L2). Times are of
float32, private and not in turns, after the steps of the self-check: the median over rounds of a step's time over the
same framework's without privacy.

Mistakes are those of experiments/integrations/mistakes.py.

    python -m experiments.integrations.frameworks [--rounds N] [--out FOLDER]

writes frameworks.json and frameworks.md.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from experiments.integrations.loops import BATCH, GROUPED, PAIRS, process_group
from experiments.integrations.mistakes import MISTAKES, refused
from ghostclip.bench.machine import busy_warning, commit, describe, in_words
from ghostclip.models import CNN

STEPS, WARM, SIDE = 20, 10, 28
RESULTS = Path(__file__).resolve().parents[1] / "results"


def changed_lines(plain: Callable[..., Any], private: Callable[..., Any]) -> int:
    """Lines of the private function that the other one doesn't have; the first line is left out."""
    before, after = (inspect.getsource(each).splitlines()[1:] for each in (plain, private))
    return sum(line.startswith("+ ") and "return" not in line for line in difflib.ndiff(before, after))


def trained(loop: Callable[..., Any], dtype: torch.dtype, **privacy: Any) -> tuple[torch.Tensor, list[float]]:
    """(weights at the end, seconds of each step but the first WARM)."""
    torch.manual_seed(0)
    model, size = CNN((1, SIDE, SIDE), 10).to(dtype), BATCH * STEPS // 2
    data = TensorDataset(torch.randn(size, 1, SIDE, SIDE, dtype=dtype), torch.randint(10, (size,)))
    ends: list[float] = []
    loop(model, data, lambda: ends.append(time.perf_counter()), **privacy)
    seconds = [later - end for end, later in zip(ends[WARM:], ends[WARM + 1 :], strict=False)]
    weights = [getattr(parameter, "full_tensor", lambda p=parameter: p)() for parameter in model.parameters()]
    return torch.cat([each.detach().flatten() for each in weights]), seconds


def measure_mistakes() -> dict[str, dict[str, str]]:
    """{framework: {mistake: the error it ends in, "" where it isn't refused}}."""
    found = {}
    for name, mistakes in MISTAKES.items():
        with process_group(name in GROUPED):
            found[name] = {mistake: refused(make) for mistake, make in mistakes.items()}
        print(name, found[name], flush=True)
    return found


def measure(rounds: int) -> dict[str, dict[str, Any]]:
    """A row for each framework."""
    fixed = {"noise_multiplier": 1.0, "noise": "test", "seed": 1}
    by_hand, _ = trained(PAIRS["a loop of one's own"][1], torch.float64, **fixed)
    rows = {}
    for name, (plain, private) in PAIRS.items():
        ratios = []
        with process_group(name in GROUPED):
            found, _ = trained(private, torch.float64, **fixed)
            for _ in range(rounds):
                times = [trained(plain, torch.float32)[1], trained(private, torch.float32, noise_multiplier=1.0)[1]]
                ratios.append(statistics.median(times[1]) / statistics.median(times[0]))
        rows[name] = {
            "lines": changed_lines(plain, private),
            "difference": float((found - by_hand).norm() / by_hand.norm()),
            "time": {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)},
        }
        print(name, rows[name], flush=True)
    return rows


def page(results: dict[str, Any]) -> str:
    """The table."""
    lines = [
        "# Private training in each framework",
        "",
        f"The CNN of `ghostclip.models`, images of {SIDE} x {SIDE}, batches of {BATCH}, one thread. DDP and FSDP2 run "
        "in one process here; [several_processes.md](several_processes.md) has them on 1, 2 and 4.",
        "",
        "| framework | lines added or changed | difference of the weights from the loop of one's own | mistakes "
        "refused | time over the same framework without privacy, median (least to most) |",
        "| --- " * 5 + "|",
    ]
    for name, row in results["rows"].items():
        ratio = row["time"]
        mistakes = results["mistakes"][name]
        lines.append(
            f"| {name} | {row['lines']} | {row['difference']:.1e} | {_refused_of(mistakes)} | {ratio['median']:.2f} "
            f"({ratio['low']:.2f} to {ratio['high']:.2f}) |"
        )
    lines += [
        "",
        "## Mistakes",
        "",
        "Each was made in a short training, and ended in an error that says what to do instead.",
        "",
        "| framework | refused | mistakes and errors |",
        "| --- | --- | --- |",
    ]
    for name, mistakes in results["mistakes"].items():
        said = "; ".join(f"{mistake} ({error or 'NOT REFUSED'})" for mistake, error in mistakes.items())
        lines.append(f"| {name} | {_refused_of(mistakes)} | {said} |")
    place = f"commit {results['commit']}" if results["commit"] else "no commit known"
    lines += ["", f"Measured at {place}. Machine: {in_words(results['machine'])}.", ""]
    return "\n".join([*lines, "Computed by `python -m experiments.integrations.frameworks`.", ""])


def _refused_of(mistakes: dict[str, str]) -> str:
    return f"{sum(map(bool, mistakes.values()))} of {len(mistakes)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="of each pair (default: 5)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if warning := busy_warning():
        print(warning, file=sys.stderr)
    results: dict[str, Any] = {"machine": describe(), "commit": commit(), "mistakes": measure_mistakes()}
    results["rows"] = measure(options.rounds)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "frameworks.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "frameworks.md").write_text(page(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
