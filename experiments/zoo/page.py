"""The page of models: exact ones with errors, times and memory, the slowest with the reason, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import median
from typing import Any

from .measuring import EXAMPLES, STEPS
from .reasons import REASONS

__all__ = ["page", "verdict"]

# Relative errors in float64, and what one example may move a sum by in float32, in clipping norms.
LIMIT, MOST_MOVED = 1e-8, 1 + 1e-5
SLOW, SLOWEST = 3.0, 10
INTRODUCTION = """\
# Supported models

Every model below is the library's own code, unmodified, from a configuration with random weights, handed to
`ghostclip.GhostClipper` as it is (*BatchNorm replaced* means by
`ghostclip.wrap(model, replace={"BatchNorm2d": "GroupNorm"})`).
"""
COLUMNS = f"""\
Each model is built twice: tiny, for the errors, and larger, so that an ordinary step takes milliseconds, for times and
memory. Each kind of model has a table of errors and one of times and memory. Their columns:

- *Error*: the worst relative error of a per-example norm, of the whole gradient or of one parameter's, and of a clipped
  sum by either second pass, for {EXAMPLES} examples in float64, against one plain backward an example. A parameter
  that is less than a thousandth of the whole gradient is held against that thousandth. Models that compute in float32
  inside do so in float64 here. A model counts as exact if the error is at most {LIMIT:g}, if neighbouring batches
  keep to {MOST_MOVED}, and if each of {STEPS} private steps moves every trained parameter.
- *Rounding*: how far the model's plain gradient of the batch is from the sum over single examples, an error that
  clipping has no part in.
- *Neighbours*: how far the clipped sum moves in float32 when an example leaves the batch, in clipping norms.
- *Measured*: "always" where it is [measured](ownership.md) in every batch which example each row belongs to.
- *Size*: trained parameters and examples of the larger model. *Ordinary*: its ordinary step (mean loss, Adam) in
  milliseconds on one thread. *auto*, *cached*: a private step (clipping, noise, Adam) by the default and by
  `second_pass="cached"` over the ordinary one, median of ratios of steps taken in turn, in the processor's seconds.
- *Memory*: the most that an ordinary step allocates beside model and optimizer. *auto, memory* and *cached, memory*:
  what private steps allocate, over that.

This page is written by `experiments/supported_models.py`.
"""


def verdict(row: dict[str, Any]) -> str:
    """One word on a row."""
    errors = row.get("errors", {})
    if "refused" in errors:
        return "refused"
    if "worst" not in errors:
        return "fails"
    exact = errors["worst"] <= LIMIT and errors["neighbours"] <= MOST_MOVED and errors["steps"] == STEPS
    return "exact" if exact else "WRONG"


def page(results: dict[str, Any]) -> str:
    """The page of what was measured."""
    rows = results["models"]
    exact = {name: row for name, row in rows.items() if "worst" in row.get("errors", {})}
    return (
        "\n".join([INTRODUCTION, *_summary(results), "", COLUMNS, *_exact(exact), *_slowest(exact), *_others(rows)])
        + "\n"
    )


def _summary(results: dict[str, Any]) -> Iterator[str]:
    rows = results["models"]
    over = [row["times"]["over"] for row in rows.values() if "over" in row.get("times", {})]
    kept = [row["memory"] for row in rows.values() if "memory" in row]
    exact = sum(verdict(row) == "exact" for row in rows.values())
    always = sum(row.get("errors", {}).get("measured", False) for row in rows.values())
    yield f"**{exact} of {len(rows)} models are exact.** {always} are measured in every batch."
    if over:
        slow = sum(each["auto"] > SLOW for each in over)
        yield (
            f"A default step takes {median(each['auto'] for each in over):.2f} ordinary steps in the median of "
            f'{len(over)} models, a "cached" one {median(each["cached"] for each in over):.2f}; '
            f"{slow} of them take more than {SLOW:g} by default."
        )
    if kept:
        yield (
            f"Memory: {median(each['auto'] for each in kept):.2f} and {median(each['cached'] for each in kept):.2f} "
            "times an ordinary step's."
        )
    machine, versions = results["machine"], ", ".join(f"{name} {each}" for name, each in results["versions"].items())
    yield f"Versions: {versions}. Commit {results['commit']}; {machine['cpu']}, shared with other programs meanwhile."
    if results["missing"]:
        yield f"Left out, not installed: the models of {', '.join(results['missing'])}."


def _exact(rows: dict[str, Any]) -> Iterator[str]:
    for kind in dict.fromkeys(row["kind"] for row in rows.values()):
        yield f"## {kind[:1].upper()}{kind[1:]}\n"
        those = {name: row for name, row in rows.items() if row["kind"] == kind}
        yield "| model | library | what is particular | error | rounding | neighbours | measured | verdict |"
        yield "|" + " --- |" * 8
        for name, row in those.items():
            yield f"| {' | '.join([name, row['library'], row['about'], *_errors(row), verdict(row)])} |"
        yield ""
        if any("over" in row.get("times", {}) for row in those.values()):
            yield "| model | size | ordinary, ms | auto | cached | memory, MB | auto, memory | cached, memory |"
            yield "|" + " --- |" * 8
            for name, row in those.items():
                if "over" in row.get("times", {}):
                    yield f"| {' | '.join([name, *_costs(row)])} |"
            yield ""


def _errors(row: dict[str, Any]) -> list[str]:
    errors = row["errors"]
    cells = [f"{errors['worst']:.0e}", f"{errors['floor']:.0e}", f"{errors['neighbours']:.6f}"]
    return [*cells, "always" if errors.get("measured") else ""]


def _costs(row: dict[str, Any]) -> list[str]:
    times, memory = row["times"], row.get("memory")
    cells = [f"{_count(times['parameters'])}, {times['examples']}", f"{times['milliseconds']:.1f}"]
    cells += [f"{times['over'][name]:.2f}" for name in ("auto", "cached")]
    if memory is None:
        return [*cells, "", "", ""]
    return [*cells, f"{memory['bytes'] / 1e6:.1f}", f"{memory['auto']:.2f}", f"{memory['cached']:.2f}"]


def _count(number: int) -> str:
    return f"{number / 1e6:.1f}M" if number >= 1e6 else f"{number / 1e3:.0f}k"


def _slowest(rows: dict[str, Any]) -> Iterator[str]:
    times = {name: row["times"]["over"]["auto"] for name, row in rows.items() if "over" in row.get("times", {})}
    ranked = sorted(times, key=times.__getitem__, reverse=True)
    listed = [name for rank, name in enumerate(ranked) if rank < SLOWEST or times[name] > SLOW]
    if not listed:
        return
    yield f"## The {len(listed)} slowest, and why\n"
    yield "| model | auto | reason |"
    yield "| --- | --- | --- |"
    for name in listed:
        yield f"| {name} | {times[name]:.2f} | {REASONS.get(name, '**not known**')} |"
    yield ""


def _others(rows: dict[str, Any]) -> Iterator[str]:
    others = {name: row for name, row in rows.items() if "worst" not in row.get("errors", {})}
    if others:
        yield from ("## Not trained\n", "| model | library | what is particular | verdict | what is said |")
        yield "| --- | --- | --- | --- | --- |"
    for name, row in others.items():
        errors = row.get("errors", {})
        said = re.sub(r"\s+", " ", errors.get("refused") or errors.get("failed", "")).replace("|", "\\|")
        yield f"| {name} | {row['library']} | {row['about']} | {verdict(row)} | {_shortened(said)} |"


def _shortened(said: str, most: int = 600) -> str:
    """A message of many findings by its first ones."""
    return said if len(said) <= most else said[:most].rpartition(" ")[0] + " ..."
