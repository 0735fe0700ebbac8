"""Audits of the engine at 100,000 canary draws, of composed and of sampled releases, and of an engine with a bug.

Every draw is a step of the engine on a small network: sampling, both passes, clipping, noise, release. Nothing is
simulated. Draws are of one training's configuration: sampled batches, twenty steps.

    python experiments/audit.py [--draws N] [--only NAME ...] [--out FOLDER]

writes audit.json, audit.md and audit.png; audits that are left out keep the figures they had.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import ghostclip.clipping.policies as policies
from ghostclip.audit import Audit, audit
from ghostclip.bench.machine import describe, in_words
from ghostclip.report import plain
from ghostclip.report.plots import AuditPanel, audit_plot

EXAMPLES, FEATURES, CLASSES = 2000, 20, 3


def losses(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy, one loss an example."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none")


def audited(batch_size: int = 500, steps: int = 20, noise_multiplier: float = 1.0, **attack: Any) -> Audit:
    """A small network on random numbers."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(EXAMPLES, FEATURES), torch.randint(0, CLASSES, (EXAMPLES,)))
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))
    training = {"batch_size": batch_size, "noise_multiplier": noise_multiplier, "steps": steps, "second_pass": "cached"}
    return audit(model, losses, data, **training, **attack)


@contextmanager
def clip_at_twice_the_bound() -> Iterator[None]:
    """A planted bug: flat clipping lets gradients of twice the bound through, and the noise knows nothing of it."""
    weights = policies.flat_weights
    policies.flat_weights = lambda norms, bound: weights(norms, 2 * bound)
    try:
        yield
    finally:
        policies.flat_weights = weights


def with_a_bug(draws: int) -> Audit:
    """A fiftieth of the draws, against the bug."""
    with clip_at_twice_the_bound():
        return audited(draws=max(600, draws // 50))


AUDITS: dict[str, tuple[str, Callable[[int], Audit]]] = {
    "one release": (
        "each draw is one release; the training is 20 steps at sampling rate 0.25",
        lambda draws: audited(draws=draws),
    ),
    "ten releases": (
        "each trial is a whole training of 10 steps with full batches",
        lambda draws: audited(EXAMPLES, 10, 10**0.5, draws=draws // 2, steps_per_trial=10, canaries=0),
    ),
    "whole training": (
        "each trial is a whole training of 20 steps at sampling rate 0.25, its coins kept from the adversary",
        lambda draws: audited(draws=draws // 2, steps_per_trial=20, sampled=True, canaries=0),
    ),
    "planted bug": ("the same as the first, clipping at twice the bound", with_a_bug),
}


def repeated(runs: int) -> dict[str, Any]:
    """The bounds of so many one-run audits of the same training, by method."""
    found: dict[str, list[float]] = {}
    for _ in range(runs):
        result = audited(draws=0)
        for bound in result.bounds:
            found.setdefault(bound.method, []).append(bound.epsilon)
    return {"claimed": result.claimed, "bounds": found}


def panels(name: str, figures: dict[str, Any]) -> Iterator[AuditPanel]:
    """What an audit's figures show: the trial's claim beside its bounds, and the training's where they differ."""
    curve = figures["white_box"]["curve"]
    releases = [point["releases"] for point in curve]
    claims = {bound["about"]: float(bound["claimed"]) for bound in figures["bounds"]}
    if name == "one release":
        lines = {"Gaussian": numbers(curve, "gaussian"), "Clopper-Pearson": numbers(curve, "clopper_pearson")}
        yield AuditPanel("one release", claims["trial"], releases, lines)
    elif name != "planted bug":
        lines = {"Gaussian": numbers(curve, "gaussian"), "Clopper-Pearson": numbers(curve, "clopper_pearson")}
        yield AuditPanel(f"{name} seen by every trial", claims["trial"], releases, lines)
        return
    title = "20 steps, from single releases" if name == "one release" else "20 steps, clipped at twice the bound"
    one_run = [bound for bound in figures["bounds"] if bound["method"].startswith("one-run")]
    levels = {bound["method"]: float(bound["epsilon"]) for bound in one_run}
    yield AuditPanel(title, claims["training"], releases, {"Gaussian": numbers(curve, "training")}, levels)


def numbers(curve: Sequence[dict[str, Any]], key: str) -> list[float]:
    """One column of the curve; infinities are text in JSON."""
    return [float(point[key]) for point in curve]


def table(results: dict[str, Any]) -> str:
    """The bounds as Markdown."""
    lines = [
        "| audit | bound | of | claimed epsilon | audited epsilon | share | releases |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, figures in results["audits"].items():
        for bound in figures["bounds"]:
            claimed, found = float(bound["claimed"]), float(bound["epsilon"])
            count = "one training" if bound["method"].startswith("one-run") else f"{figures['white_box']['releases']:,}"
            lines.append(
                f"| {name} | {bound['method']} | {bound['about']} | {claimed:.3f} | {found:.3f} | "
                f"{found / claimed:.0%} | {count} |"
            )
    told = [f"- {name}: {figures['about']}. {figures['verdict']}." for name, figures in results["audits"].items()]
    again = results["repeated"]
    for method, values in again["bounds"].items():
        over = sum(value > again["claimed"] for value in values)
        told.append(
            f"- {method} in {len(values)} audits of one run each, no bug planted: mean {mean(values):.2f}, smallest "
            f"{min(values):.2f}, largest {max(values):.2f} of the claimed {again['claimed']:.2f}; {over} above it."
        )
    machine = in_words(results["machine"])
    return "\n".join(["# Audits", "", *lines, "", *told, "", f"Machine: {machine}", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the audits and writes the files; 1 when a sound engine is not consistent or the bug is not found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=100_000, help="releases of the first audit (default: 100000)")
    parser.add_argument("--runs", type=int, default=200, help="audits of one run each (default: 200)")
    parser.add_argument("--only", nargs="+", choices=tuple(AUDITS), default=tuple(AUDITS), help="default: all")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    path = options.out / "audit.json"
    known = json.loads(path.read_text())["audits"] if path.exists() else {}
    for name in options.only:
        about, run = AUDITS[name]
        known[name] = plain({"about": about} | run(options.draws).figures())
        print(f"{name}: {known[name]['verdict']} ({known[name]['seconds']:.0f} s)", flush=True)
    audits = {name: known[name] for name in AUDITS if name in known}
    results = {"machine": describe(), "audits": audits, "repeated": repeated(options.runs)}
    options.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
    (options.out / "audit.md").write_text(table(results))
    shown = [panel for name, figures in audits.items() for panel in panels(name, figures)]
    first = next(iter(audits.values()))
    (options.out / "audit.png").write_bytes(audit_plot(shown, first["delta"], first["confidence"]))
    return int(any(figures["violated"] != (name == "planted bug") for name, figures in audits.items()))


if __name__ == "__main__":
    sys.exit(main())
