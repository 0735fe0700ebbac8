"""The page of `experiments.peers.trl_trainers`: one row for each question, one column for each library."""

from __future__ import annotations

import statistics
from typing import Any

from ghostclip.bench.machine import in_words

from .trl_scripts import GHOSTCLIP, LIBRARIES, OPAKE, TRL

__all__ = ["DELTA", "TARGET", "page"]

# The largest epsilon of the trainings with a target, and its delta.
TARGET, DELTA = 4.0, 1e-3


def page(results: dict[str, Any]) -> str:
    """The tables."""
    found, versions = results["libraries"], results["versions"]
    lines = [
        "# Private SFT and DPO: GhostClip and opake",
        "",
        f"opake {versions['opake']}, TRL {versions['trl']}, transformers {versions['transformers']}; the same Llama, "
        "data and noise multiplier in both. Completions have the token at their end already, which TRL adds to pairs, "
        "and opake doesn't.",
        "",
        "| | GhostClip | opake |",
        "| --- | --- | --- |",
    ]
    for question, answer in ROWS.items():
        lines.append(f"| {question} | {' | '.join(answer(found[name], results) for name in (GHOSTCLIP, OPAKE))} |")
    if any(results["steps"].values()) and all(rows[TRL] for rows in results["steps"].values()):
        lines += ["", *_steps(results["steps"])]
    lines += ["", f"At commit {results['commit']} on {in_words(results['machine'])}.", ""]
    return "\n".join([*lines, "Written by `python -m experiments.peers.trl_trainers`.", ""])


def _steps(steps: dict[str, Any]) -> list[str]:
    """Seconds and memory of a larger model's step."""
    lines = ["| | milliseconds a step | over TRL's | peak memory above the process's start, MiB |", "| --- " * 4 + "|"]
    for task, rows in steps.items():
        for name in LIBRARIES:
            seconds = statistics.median(row["seconds"] for row in rows[name])
            over = statistics.median(
                row["seconds"] / plain["seconds"] for row, plain in zip(rows[name], rows[TRL], strict=True)
            )
            memory = statistics.median(row["mib"] for row in rows[name])
            lines.append(f"| {task}, {name} | {1000 * seconds:.0f} | {over:.2f} | {memory:.0f} |")
    rounds = len(steps["SFT"][TRL])
    told = (
        f"Medians of {rounds} rounds, in which each library has a process of its own: of each training the median of "
        "steps 9 to 16, which leaves out GhostClip's checks of the first ones. The peak has all of them."
    )
    return [*lines, "", told]


def _error(text: str) -> str:
    """An error in a cell, by its first clause."""
    kind, _, said = text.partition(": ")
    return f"`{kind}`: {said.partition(';')[0].partition(':')[0]}"


def _packing(found: dict[str, Any], _: dict[str, Any]) -> str:
    return _error(found["said_to_packing"]) if found["said_to_packing"] else "trains; each text stays an example"


def _target(found: dict[str, Any], _: dict[str, Any]) -> str:
    at = found["at_the_target"]
    return f"ends after {at['steps']} of 40 steps, at epsilon {at['epsilon']:.3f}"


def _again(found: dict[str, Any], results: dict[str, Any]) -> str:
    if found["said_again"]:
        return _error(found["said_again"])
    again = found["again"]
    return (
        f"trains {again['steps']} steps and reports epsilon {again['epsilon']:.3f} of them; both trainings are "
        f"{results['epsilon_of_both']:.2f}"
    )


def _noise(found: dict[str, Any], _: dict[str, Any]) -> str:
    ratios = found["repeated_noise"]
    if max(ratios.values()) > 2:
        return f"differ by {min(ratios.values()):.0f} clipping norms: each has its own noise"
    return f"differ by {max(ratios.values()):.2f} clipping norms, with `seed=7` or none given: the noise repeats"


def _dropout(found: dict[str, Any], _: dict[str, Any]) -> str:
    """Copies of one text have parallel gradients where they have the same masks."""
    return "one mask for all of them" if found["shared_dropout"] > 1 - 1e-4 else "a mask for each"


def _mixing(found: dict[str, Any], _: dict[str, Any]) -> str:
    text = found["said_to_mixing"]
    return _error(text) if text else "trains another function: each example is a batch by itself (vmap)"


# {question: (facts of a library, all results) -> its cell}.
ROWS = {
    "statements of TRL's script that change, SFT and DPO": lambda found, _: (
        f"{found['SFT lines']} and {found['DPO lines']}"
    ),
    "first clipped sum of padded texts over the loop over TRL's losses of single examples, SFT and DPO (relative "
    "difference)": lambda found, _: f"{found['SFT from the loop']:.1e} and {found['DPO from the loop']:.1e}",
    f"epsilon of 10 steps at delta {DELTA:g}, noise 1, rate 1/4": lambda found, _: f"{found['epsilon']:.4f}",
    "`packing=True`": _packing,
    f"40 steps planned, the largest epsilon {TARGET:g}": _target,
    "the same script again, in the same folder": _again,
    "noisy sums of two data sets, of which one has an example more": _noise,
    "dropout of the examples of a batch": _dropout,
    "a model that subtracts half the batch's mean from its scores": _mixing,
}  # fmt: skip
