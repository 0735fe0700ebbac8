"""Which published models have compiled private steps: seconds of compilation, and time beside uncompiled steps.

The models are those of experiments/supported_models.py that are exact, in the sizes that are timed there, with batches
of one shape. Each runs in a process of its own, on one thread. A graph is tried beside the uncompiled passes on four
batches, as in any training; what the trial measured is what the table says.

    python experiments/compiled_models.py [--only WORD ...] [--processes P] [--seconds S] [--resume]

writes results/compiled_models.json and .md. Models whose library isn't installed are left out.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from zoo import SUBJECTS, Subject
from zoo.measuring import prepared, replaced
from zoo.subject import Timed, as_floats

from ghostclip import GhostClipper
from ghostclip.bench.machine import commit, describe, in_words

RESULTS = Path(__file__).parent / "results"
# Batches after which no graph is made any more, the ones of its trial included.
BATCHES = 14


def compiled(subject: Subject) -> dict[str, Any]:
    """What came of compiling: seconds and milliseconds, or why there is no graph."""
    size = subject.timed or Timed(subject.build, subject.batch)
    torch.manual_seed(7)
    model = prepared(subject, replaced(subject, size.build()).train(subject.trains))
    batch = as_floats(size.batch(size.examples))
    clipper = GhostClipper(model, 1.0, compile=True)
    for _ in range(BATCHES):
        clipper.clip(subject.losses, batch)
        model.zero_grad()
        if clipper.compiled.refusals:
            break
    trials = [plan.trial for plan in clipper.compiled._plans.values() if plan.trial.eager < float("inf")]
    found = {"examples": size.examples, "seconds": clipper.compiled.seconds}
    if trials:
        found |= {"eager": 1e3 * trials[0].eager, "compiled": 1e3 * trials[0].compiled}
    why = clipper.compiled.refusals or ([] if trials else ["rows are measured in every batch"])
    return found | ({"why": why[0]} if why else {})


def in_a_process(name: str, seconds: float) -> dict[str, Any]:
    """The same by a process of its own, whose caches are empty."""
    with tempfile.TemporaryDirectory() as cache:
        settings = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
        command = [sys.executable, __file__, "--model", name]
        try:
            ran = subprocess.run(
                command, env=os.environ | settings, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return {"why": f"no graph within {seconds:g} s"}
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"why": "failed: " + (ran.stderr.strip().splitlines() or [""])[-1]}


def page(results: dict[str, Any]) -> str:
    """The table."""
    rows = results["models"]
    made = [row for row in rows.values() if "compiled" in row]
    used = [row for row in made if "why" not in row]
    lines = [
        "# Compiled steps of published models", "",
        "Written by `experiments/compiled_models.py`; do not edit. Forward and both passes of one batch, one thread,",
        f"no caches. Of {len(rows)} models that were run {len(made)} have a graph; {len(used)} are faster with it.", "",
        "| model | examples | compiling, s | uncompiled, ms | compiled | why not |",
        "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for name, row in rows.items():
        times = (
            (f"{row['seconds']:.0f}", f"{row['eager']:.3g}", f"{row['compiled'] / row['eager']:.2f}")
            if "compiled" in row else ("", "", "")
        )  # fmt: skip
        why = row.get("why", "").replace("|", "\\|")
        lines.append(f"| {name} | {row.get('examples', '')} | {' | '.join(times)} | {why} |")
    commits = dict.fromkeys(row["commit"] for row in rows.values())
    return "\n".join([*lines, "", f"At commit {', '.join(commits)} on {results['machine']}.", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the models, and writes both files after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="WORD", help="models whose names have one of these words in them")
    parser.add_argument("--processes", type=int, default=1, help="at a time (default: 1)")
    parser.add_argument("--seconds", type=float, default=300.0, help="after which a model is left (default: 300)")
    parser.add_argument("--resume", action="store_true", help="leave out models that have a row")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    subjects = {subject.name: subject for subject in SUBJECTS if find_spec(subject.library) and not subject.refused}
    if options.model:
        torch.set_num_threads(1)
        logging.getLogger("ghostclip").setLevel(logging.ERROR)
        print(json.dumps(compiled(subjects[options.model])), flush=True)
        return 0
    path = options.out / "compiled_models.json"
    known = json.loads(path.read_text())["models"] if path.exists() else {}
    chosen = [name for name in subjects if not options.only or any(word in name for word in options.only)]
    chosen = [name for name in chosen if not (options.resume and name in known)]
    machine = in_words({key: value for key, value in describe().items() if key != "kernels"} | {"threads": 1})
    with ThreadPoolExecutor(options.processes) as pool:
        for name, row in zip(chosen, pool.map(lambda each: in_a_process(each, options.seconds), chosen), strict=True):
            known[name] = row | {"commit": commit()}
            print(f"{name}: {row.get('why', 'compiled')}", flush=True)
            results: dict[str, Any] = {"machine": machine}
            results["models"] = {each: known[each] for each in subjects if each in known}
            path.write_text(json.dumps(results, indent=1) + "\n")
            path.with_suffix(".md").write_text(page(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
