"""What a run of the fuzzer found, added up and kept: experiments/results/fuzz.json and fuzz.md."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .found import FOUND
from .outcome import Outcome

__all__ = ["MOST_FINDINGS", "Totals", "commit", "write"]

ROOT = Path(__file__).resolve().parents[2]
# Findings of one run that are written down one by one.
MOST_FINDINGS = 200


@dataclass
class Totals:
    """The sum of outcomes."""

    cases: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    findings: list[dict[str, Any]] = field(default_factory=list)
    worst_error: dict[str, float] = field(default_factory=dict)
    worst_share: float = 0.0

    def add(self, outcome: Outcome) -> None:
        """Takes what came of one more case."""
        self.cases += 1
        self.counts += outcome.counts
        self.refusals += outcome.refusals
        self.findings += [{"seed": outcome.seed, "what": what, "case": outcome.recipe} for what in outcome.findings]
        for dtype, error in outcome.worst_error.items():
            self.worst_error[dtype] = max(error, self.worst_error.get(dtype, 0.0))
        self.worst_share = max(self.worst_share, outcome.worst_share)

    def as_run(self, **more: Any) -> dict[str, Any]:
        """For the file."""
        return {
            **more,
            "cases": self.cases,
            "batches": self.counts["batches"],
            "pairs": self.counts["pairs"],
            "data_pairs": self.counts["data pairs"],
            "counts": dict(sorted(self.counts.items())),
            "refusals": dict(self.refusals.most_common()),
            "worst_error": self.worst_error,
            "worst_share": self.worst_share,
            "found": len(self.findings),
            "findings": sorted(self.findings, key=lambda finding: finding["seed"])[:MOST_FINDINGS],
        }


def commit() -> str:
    """The commit that runs, with "+" where files were changed since; "unknown" outside of a repository."""
    try:
        name = _git("rev-parse", "--short=12", "HEAD")
        return name + ("+" if _git("status", "--porcelain", "--untracked-files=no", "--", "ghostclip") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def write(run: dict[str, Any], out: Path) -> None:
    """Puts one run behind the earlier ones in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "fuzz.json"
    runs = [*(json.loads(path.read_text())["runs"] if path.exists() else []), run]
    path.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    (out / "fuzz.md").write_text(markdown(runs))


def markdown(runs: Sequence[dict[str, Any]]) -> str:
    """The page: all runs, what they compared, what was found."""
    lines = ["# Random differential tests", ""]
    hours = sum(run["seconds"] for run in runs) / 3600
    # Earlier runs had no data sets.
    batches, pairs, data = (sum(run.get(name, 0) for run in runs) for name in ("batches", "pairs", "data_pairs"))
    lines += [f"{batches:,} clipped batches, {pairs:,} neighbouring pairs and {data:,} neighbouring data sets, each "
              f"collated by itself, in {hours:.1f} hours (`make fuzz`; a row is a run).", "",
              "| commit | started | first seed | minutes | batches | pairs | data sets | refused | worst relative "
              "error of a norm (float32, float64) | worst share of the bound | unexplained |",
              "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for run in runs:
        refused = sum(run["refusals"].values())
        errors = ", ".join(f"{run['worst_error'].get(dtype, 0.0):.1e}" for dtype in ("float32", "float64"))
        lines.append(
            f"| {run['commit']} | {run['started']} | {run['seed']} | {run['seconds'] / 60:.0f} | {run['batches']:,} | "
            f"{run['pairs']:,} | {run.get('data_pairs', 0):,} | {refused} | {errors} | {run['worst_share']:.7f} | "
            f"{run['found']} |"
        )
    lines += ["", "## The last run", "", "| what | how many |", "| --- | --- |"]
    lines += [f"| {name} | {count:,} |" for name, count in runs[-1]["counts"].items()]
    lines += ["", "Refusals:", ""]
    lines += [f"- {count} x {message}" for message, count in runs[-1]["refusals"].items()] or ["None."]
    lines += ["", "Without an explanation:", ""]
    lines += [f"- `--only {f['seed']}`: {f['what']}" for f in runs[-1]["findings"]] or ["None."]
    lines += ["", "## Found and fixed", "", "| found | by | then |", "| --- | --- | --- |"]
    lines += [f"| {each.what} | {each.by} | {each.then} |" for each in FOUND]
    return "\n".join(lines) + "\n"
