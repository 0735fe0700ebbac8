"""Audits of the engine at 100,000 canary draws, of composed and of sampled releases, and of an engine with a bug.

Every draw is a step of the engine on a small network: sampling, both passes, clipping, noise, release. Nothing is
simulated. Draws are of one training's configuration: sampled batches, twenty steps.

    python experiments/audit.py [--draws N] [--runs N] [--turns N] [--only NAME ...] [--out FOLDER]

writes audit.json, audit.md and audit.png; audits that are left out, or of 0 runs, keep the figures they had.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
from ghostclip.noise import BandedToeplitz, BufferedToeplitz
from ghostclip.noise.history import NoiseHistory
from ghostclip.report import plain
from ghostclip.report.plots import AuditPanel, audit_plot

EXAMPLES, FEATURES, CLASSES = 2000, 20, 3


def losses(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy, one loss an example."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none")


def audited(
    batch_size: int = 500, steps: int = 20, noise_multiplier: float = 1.0, examples: int = EXAMPLES, **attack: Any
) -> Audit:
    """A small network on random numbers."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(examples, FEATURES), torch.randint(0, CLASSES, (examples,)))
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


@contextmanager
def columns_half_as_long() -> Iterator[None]:
    """A planted bug: columns of C have norm 1/2, so that noise is half of what is charged for."""
    init = NoiseHistory.__init__

    def changed(self: NoiseHistory, *given: Any) -> None:
        init(self, *given)
        self._norms = self._norms / 2

    NoiseHistory.__init__ = changed  # type: ignore[method-assign]
    try:
        yield
    finally:
        NoiseHistory.__init__ = init  # type: ignore[method-assign]


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


def repeated(runs: int, **training: Any) -> dict[str, Any]:
    """The bounds of so many one-run audits of the same training, by method."""
    found: dict[str, list[float]] = {}
    for _ in range(runs):
        result = audited(draws=0, **training)
        for bound in result.bounds:
            found.setdefault(bound.method, []).append(bound.epsilon)
    return {"claimed": result.claimed, "bounds": found}


# Trainings with correlated noise, in which each example has one turn, with and without a bug.
BY_TURNS: dict[str, dict[str, Any]] = {
    "8 bands, cyclic_poisson": {"sampling": "cyclic_poisson", "correlation": BandedToeplitz(bands=8)},
    "3 buffers, cyclic": {"sampling": "cyclic", "correlation": BufferedToeplitz(buffers=3)},
}
BUGS = {
    "none": nullcontext, "clipping at twice the bound": clip_at_twice_the_bound,
    "columns of C half as long": columns_half_as_long,
}  # fmt: skip


def by_turns(runs: int) -> list[dict[str, Any]]:
    """Audits of whole mechanisms by one run: so many of each without a bug, a tenth as many with each bug."""
    rows = []
    for name, training in BY_TURNS.items():
        for bug, planted in BUGS.items():
            with planted():
                found = repeated(
                    runs if bug == "none" else max(1, runs // 10), examples=8000, batch_size=1000, steps=8,
                    noise_multiplier=2.0, canaries=4000, **training,
                )  # fmt: skip
            rows.append({"training": name, "bug": bug, **found})
            print(name, bug, flush=True)
    return rows


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
    turns = [
        "Correlated noise, audited as a whole by one run: 8,000 examples, of which 4,000 are canaries, one turn for "
        "each in 8 steps, noise multiplier 2.",
        "",
        "| training | planted bug | runs | claimed epsilon | bound | mean | smallest | largest | above |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in results["by_turns"]:
        for method, values in row["bounds"].items():
            above = sum(value > row["claimed"] for value in values)
            turns.append(
                f"| {row['training']} | {row['bug']} | {len(values)} | {row['claimed']:.3f} | {method} | "
                f"{mean(values):.2f} | {min(values):.2f} | {max(values):.2f} | {above} |"
            )
    machine = in_words(results["machine"])
    return "\n".join(["# Audits", "", *lines, "", *told, "", *turns, "", f"Machine: {machine}", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the audits and writes the files; 1 when a sound engine is not consistent or the bug is not found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=100_000, help="releases of the first audit (default: 100000)")
    parser.add_argument("--runs", type=int, default=200, help="audits of one run each (default: 200)")
    parser.add_argument(
        "--turns", type=int, default=100, help="audits of one run by turns, of each kind (default: 100)"
    )
    parser.add_argument("--only", nargs="*", choices=tuple(AUDITS), default=tuple(AUDITS), help="default: all")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    path = options.out / "audit.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    known = results.get("audits", {})
    for name in options.only:
        about, run = AUDITS[name]
        known[name] = plain({"about": about} | run(options.draws).figures())
        print(f"{name}: {known[name]['verdict']} ({known[name]['seconds']:.0f} s)", flush=True)
    audits = {name: known[name] for name in AUDITS if name in known}
    results |= {"machine": describe(), "audits": audits}
    if options.runs:
        results["repeated"] = repeated(options.runs)
    if options.turns:
        results["by_turns"] = by_turns(options.turns)
    options.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
    (options.out / "audit.md").write_text(table(results))
    shown = [panel for name, figures in audits.items() for panel in panels(name, figures)]
    first = next(iter(audits.values()))
    (options.out / "audit.png").write_bytes(audit_plot(shown, first["delta"], first["confidence"]))
    return int(any(figures["violated"] != (name == "planted bug") for name, figures in audits.items()))


if __name__ == "__main__":
    sys.exit(main())
