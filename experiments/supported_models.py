"""Which published models train exactly: each one's worst error against the loop over single examples, as a table.

The models are the libraries' own code, unmodified, made from tiny configurations with random weights. Each is clipped
in float64 by both second passes, compared with one backward an example, and then trained for a few private steps.

    pip install ".[models]"
    python experiments/supported_models.py [--only WORD ...]

writes results/supported_models.json and ../docs/supported_models.md; models left out by --only, or whose library isn't
installed, keep their rows.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from zoo import SUBJECTS, Subject
from zoo.measuring import EXAMPLES, STEPS, measure

import ghostclip

LIMIT = 1e-8
HERE = Path(__file__).parent
LIBRARIES = ("torch", "transformers", "peft", "timm", "torchvision")
INTRODUCTION = f"""\
# Models that train exactly

Written by `experiments/supported_models.py`; do not edit. Every model is the library's own code, unmodified, from a
tiny configuration with random weights, handed to `ghostclip.GhostClipper` as it is (*BatchNorm replaced* means by
`ghostclip.wrap(model, replace={{"BatchNorm2d": "GroupNorm"}})`).

*Norms* is the worst relative error of a per-example norm, of the whole gradient or of one parameter's; *reweight* and
*cached* are that of a clipped sum by either second pass; all for {EXAMPLES} examples in float64, against one
plain backward an example. A parameter that is less than a thousandth of the whole gradient is held against that
thousandth. *Rounding* is how far the model's plain gradient of the batch is from the sum over single examples, an error
that clipping has no part in. Models that compute in float32 inside do so in float64 here. *Steps* are private steps, of
{STEPS}, that moved every trained parameter.
"""


def measured(subject: Subject) -> dict[str, Any]:
    """The row of one model, as plain values: figures, or why there are none."""
    about = {"library": subject.library, "about": subject.about}
    try:
        figures = measure(subject)
    except ghostclip.GhostClipError as refusal:
        return about | {"refused": str(refusal), "expected": bool(subject.refused)}
    except Exception as error:
        return about | {"failed": f"{type(error).__name__}: {error}"}
    return about | asdict(figures) | {"worst": figures.worst}


def verdict(row: dict[str, Any]) -> str:
    """One word on a row."""
    if "failed" in row:
        return "fails"
    if "refused" in row:
        return "refused"
    return "exact" if row["worst"] <= LIMIT and row["steps"] == STEPS else "WRONG"


def table(results: dict[str, Any]) -> str:
    """The page: exact models, then those that are refused or fail, with the reason."""
    rows = results["models"]
    exact = {name: row for name, row in rows.items() if "worst" in row}
    others = {name: row for name, row in rows.items() if "worst" not in row}
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    count = sum(verdict(row) == "exact" for row in rows.values())
    lines = [INTRODUCTION, f"{count} of {len(rows)} models are exact to {LIMIT:g}. Versions: {versions}.", ""]
    lines += [
        "| model | library | what is particular | parameters | norms | reweight | cached | rounding | steps | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in exact.items():
        errors = [row["norms"], row["sums"]["reweight"], row["sums"]["cached"], row["floor"]]
        cells = [name, row["library"], row["about"], f"{row['parameters']:,}", *(f"{error:.0e}" for error in errors)]
        lines.append(f"| {' | '.join(cells)} | {row['steps']} | {verdict(row)} |")
    if others:
        lines += ["", "## Not trained", "", "| model | library | what is particular | | what is said |"]
        lines.append("| --- | --- | --- | --- | --- |")
    for name, row in others.items():
        said = re.sub(r"\s+", " ", row.get("refused") or row["failed"]).replace("|", "\\|")
        lines.append(f"| {name} | {row['library']} | {row['about']} | {verdict(row)} | {shortened(said)} |")
    return "\n".join(lines) + "\n"


def shortened(said: str, most: int = 600) -> str:
    """A message of many findings by its first ones."""
    return said if len(said) <= most else said[:most].rpartition(" ")[0] + " ..."


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the models and writes both files; returns 1 when one is wrong or fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="WORD", help="models whose names have one of these words in them")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "supported_models.json")
    parser.add_argument("--page", type=Path, default=HERE.parent / "docs" / "supported_models.md")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    chosen = [s for s in SUBJECTS if not options.only or any(word in s.name for word in options.only)]
    there = [s for s in chosen if importlib.util.find_spec(s.library) is not None]
    if len(there) < len(chosen):
        missing = sorted({s.library for s in chosen} - {s.library for s in there})
        print(f'left as they were: the models of {", ".join(missing)}; pip install ".[models]"')
    if not there:
        return 0
    known = json.loads(options.results.read_text())["models"] if options.results.exists() else {}
    for number, subject in enumerate(there, 1):
        row = known[subject.name] = measured(subject)
        error = f"worst error {row['worst']:.1e}" if "worst" in row else row.get("refused", row.get("failed", ""))[:150]
        print(f"{number}/{len(there)} {subject.name}: {verdict(row)}, {error}", flush=True)
        write(known, options.results, options.page)
    return int(any(verdict(row) in ("WRONG", "fails") for row in known.values()))


def write(known: dict[str, Any], results_path: Path, page: Path) -> None:
    """Both files, the models in their order."""
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES if importlib.util.find_spec(name)}
    results = {"versions": versions, "models": {s.name: known[s.name] for s in SUBJECTS if s.name in known}}
    for path, text in ((results_path, json.dumps(results, indent=1) + "\n"), (page, table(results))):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
