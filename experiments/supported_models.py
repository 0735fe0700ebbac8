"""Which published models train exactly, and what a private step of them takes, as a table.

The models are the libraries' own code, unmodified, made from configurations with random weights. Tiny ones are clipped
in float64 by both second passes and compared with one backward an example, clipped in float32 with and without one
example, and trained for a few private steps. Larger ones take ordinary and private steps in turn, and a process of its
own counts the memory.

    pip install ".[models]"
    python experiments/supported_models.py [--only WORD ...] [--kinds KIND ...] [--parts errors times memory]

writes results/supported_models.json and ../docs/supported_models.md. Rows and parts that a call leaves out stay as they
were if they were measured with the same versions; those of libraries that aren't installed are left out, and named.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from zoo import SUBJECTS, Subject
from zoo.measuring import measure
from zoo.page import page, verdict
from zoo.timing import memory, times

import ghostclip
from ghostclip.bench.machine import commit, describe
from ghostclip.native import library

HERE = Path(__file__).resolve().parent
PARTS = ("errors", "times", "memory")
DISTRIBUTIONS = ("torch", "transformers", "peft", "timm", "torchvision", "torchaudio", "diffusers", "torch-geometric")


def errors_of(subject: Subject) -> dict[str, Any]:
    """Figures against the loop, or why there are none."""
    try:
        figures = measure(subject)
    except ghostclip.GhostClipError as refusal:
        return {"refused": str(refusal), "expected": bool(subject.refused)}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    return asdict(figures) | {"worst": figures.worst}


def times_of(subject: Subject, seconds: float) -> dict[str, Any]:
    """Times of a model that is exact, or why there are none."""
    try:
        return times(subject, seconds)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def memories(subjects: Sequence[Subject]) -> dict[str, Any]:
    """Peak memory of models by name, from a process in which allocations are counted; {} where they can't be."""
    counter = library("allocated") if sys.platform == "linux" else None
    if counter is None:
        print("no memory: counting what the C library allocates takes glibc and a C compiler")
        return {}
    settings = {"LD_PRELOAD": counter._name, "PYTHONMALLOC": "malloc", "OMP_NUM_THREADS": "1"}
    names = json.dumps([subject.name for subject in subjects])
    ran = subprocess.run(
        [sys.executable, __file__, "--count", names],
        capture_output=True,
        text=True,
        env=os.environ | settings,
        check=False,
    )
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode:
        print(f"the process that counts memory failed: {ran.stderr[-500:]}")
    return {line["name"]: line["memory"] for line in lines}


def count(names: Sequence[str]) -> int:
    """What the process that `memories` starts does: prints a line for each model."""
    torch.set_num_threads(1)
    for subject in SUBJECTS:
        if subject.name in names:
            try:
                print(json.dumps({"name": subject.name, "memory": memory(subject)}), flush=True)
            except Exception as error:
                print(f"{subject.name}: {type(error).__name__}: {error}", file=sys.stderr)
    return 0


def versions() -> dict[str, str]:
    """Of the libraries that are installed."""
    found = {}
    for name in DISTRIBUTIONS:
        if importlib.util.find_spec(name.replace("-", "_")) is not None:
            found[name] = importlib.metadata.version(name)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the models and writes both files; returns 1 when one is wrong or fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="WORD", help="models whose names have one of these words in them")
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="models of these kinds")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured (default: all)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of the processor, for the times of a model")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "supported_models.json")
    parser.add_argument("--page", type=Path, default=HERE.parent / "docs" / "supported_models.md")
    parser.add_argument("--resume", action="store_true", help="leave out models that have all of these parts")
    parser.add_argument("--count", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.count:
        return count(json.loads(options.count))
    there = [s for s in SUBJECTS if importlib.util.find_spec(s.library) is not None]
    missing = sorted({s.library for s in SUBJECTS} - {s.library for s in there})
    if missing:
        print(f'left out: the models of {", ".join(missing)}; pip install ".[models]"')
    rows, since = known_rows(options.results, there)
    chosen = [s for s in there if not options.only or any(word in s.name for word in options.only)]
    chosen = [s for s in chosen if not options.kinds or s.kind in options.kinds]
    if options.resume:
        chosen = [s for s in chosen if not is_complete(rows.get(s.name, {}), options.parts)]
    for number, subject in enumerate(chosen, 1):
        row = rows.setdefault(subject.name, {})
        row |= {"library": subject.library, "about": subject.about, "kind": subject.kind}
        if "errors" in options.parts:
            row["errors"] = errors_of(subject)
        exact = verdict(row) == "exact"
        if "times" in options.parts and exact:
            row["times"] = times_of(subject, options.seconds)
        for part in () if exact else ("times", "memory"):
            row.pop(part, None)
        print(f"{number}/{len(chosen)} {subject.name}: {verdict(row)}, {in_short(row)}", flush=True)
        write(rows, since, missing, options.results, options.page)
    if "memory" in options.parts:
        counted = memories([s for s in chosen if verdict(rows[s.name]) == "exact"])
        for name, found in counted.items():
            rows[name]["memory"] = found
    write(rows, since, missing, options.results, options.page)
    return int(any(verdict(row) in ("WRONG", "fails") for row in rows.values()))


def known_rows(path: Path, there: Sequence[Subject]) -> tuple[dict[str, Any], str]:
    """What earlier calls measured of models that are still there, with the same versions, and from which commit on."""
    known = json.loads(path.read_text()) if path.exists() else {}
    if known.get("versions") != versions():
        return {}, commit()
    names = {subject.name for subject in there}
    return {name: row for name, row in known["models"].items() if name in names}, known["commit"].split()[0]


def is_complete(row: dict[str, Any], parts: Sequence[str]) -> bool:
    """Whether a row has the parts; a model that isn't exact has errors only."""
    return all(part in row for part in (parts if verdict(row) == "exact" else ("errors",)))


def in_short(row: dict[str, Any]) -> str:
    """A row's figures in a few words."""
    errors = row.get("errors", {})
    if "worst" not in errors:
        return (errors.get("refused") or errors.get("failed", ""))[:150]
    over = row.get("times", {}).get("over") or row.get("times", {})
    return f"worst error {errors['worst']:.1e}, neighbours {errors['neighbours']:.7f}, {over}"


def write(rows: dict[str, Any], since: str, missing: Sequence[str], results: Path, page_path: Path) -> None:
    """Both files, the models in their order; measured at the commits since that one."""
    now = commit()
    found = {
        "versions": versions(), "machine": describe(), "commit": now if now == since else f"{since} to {now}",
        "missing": list(missing), "models": {s.name: rows[s.name] for s in SUBJECTS if s.name in rows},
    }  # fmt: skip
    for path, text in ((results, json.dumps(found, indent=1) + "\n"), (page_path, page(found))):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
