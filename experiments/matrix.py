"""Tests the wheel in clean environments, one for each Python and torch that can be had.

    python experiments/matrix.py [--pairs PYTHON:TORCH ...] [--download] [--tests FILE ...]

builds a source archive and a wheel of it by ``python -m build``, asks pip what each pair would install, and runs the
tests against the installed wheel. A pair for which pip would download packages of CUDA, gigabytes of them, runs with
--download only. Every other pair is stated as not run, with the reason. Writes results/matrix.json and .md, where pairs
that are not asked for keep what was found before. A package index that has torch for processors (pip's
--extra-index-url, or PIP_EXTRA_INDEX_URL) makes all pairs run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = {"2.6": "torch==2.6.*", "2.13": "torch==2.13.*", "newest": "torch"}
CUDA = ("nvidia-", "cuda-", "triton")
TESTERS = ["pytest", "hypothesis"]
TESTS = [
    "layers/test_layers.py",
    "clipper/test_clipper.py",
    "clipper/test_clipping.py",
    "engine/test_engine.py",
    "layers/test_native.py",
    "privacy/test_accounting.py",
]


def ran(command: list[str], folder: str) -> subprocess.CompletedProcess[str]:
    """A process that sees the checkout in no way but by the paths it is given."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=folder, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )


def interpreter(version: str) -> str | None:
    """The path of that Python, of pyenv, or on PATH."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    of_pyenv = sorted(versions.glob(f"{version}.*/bin/python{version}"))
    # A shim of pyenv on PATH runs only the versions that are switched on.
    return str(of_pyenv[-1]) if of_pyenv else shutil.which(f"python{version}")


def obstacle(python: str, torch: str, folder: str, download: bool) -> str | None:
    """Why the pair isn't run; None when it can be."""
    report = Path(folder) / "report.json"
    asked = ["install", "--dry-run", "--ignore-installed", "--quiet", "--report", str(report), torch]
    done = ran([python, "-m", "pip", *asked], folder)
    if done.returncode:
        return "pip finds no such torch: " + done.stderr.strip().splitlines()[-1]
    found = {
        each["metadata"]["name"]: each["download_info"]["url"] for each in json.loads(report.read_text())["install"]
    }
    needless = [name for name, url in found.items() if name.startswith(CUDA) and not url.startswith("file:")]
    if needless and not download:
        return f"pip would download {len(needless)} packages of CUDA; --download allows it"
    return None


def pair(version: str, torch: str, wheel: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What became of one Python and torch."""
    python = interpreter(version)
    if python is None:
        return {"ran": False, "why": f"no python{version} here"}
    with tempfile.TemporaryDirectory() as folder:
        if (why := obstacle(python, torch, folder, options.download)) is not None:
            return {"ran": False, "why": why}
        ran([python, "-m", "venv", "venv"], folder)
        own = f"{folder}/venv/bin/python"
        done = ran([own, "-m", "pip", "install", "--quiet", torch, f"{wheel}[cli]", *TESTERS], folder)
        if done.returncode:
            return {"ran": False, "why": "installation failed: " + done.stderr.strip().splitlines()[-1]}
        # The tests without the checkout beside them, so that what they import is the wheel.
        shutil.copytree(ROOT / "tests", f"{folder}/tests")
        shutil.copy(ROOT / "pyproject.toml", folder)
        about = ran([own, "-c", "import torch, ghostclip; print(torch.__version__, ghostclip.__file__)"], folder)
        found, _, place = about.stdout.strip().partition(" ")
        inside = place.startswith(f"{folder}/venv")
        done = ran([own, "-m", "pytest", "-m", "not slow", *(f"tests/{name}" for name in options.tests)], folder)
        lines = done.stdout.strip().splitlines()
        failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        print("\n".join(failures), flush=True)
        return {"ran": inside, "torch": found, "passed": inside and done.returncode == 0, "pytest": (lines or [""])[-1]}


def build(folder: str) -> Path:
    """The wheel, made of the source archive as ``python -m build`` makes it, in an environment of its own."""
    ran([sys.executable, "-m", "venv", "builder"], folder)
    own = f"{folder}/builder/bin/python"
    for command in (["pip", "install", "--quiet", "build"], ["build", "--outdir", f"{folder}/dist", str(ROOT)]):
        done = ran([own, "-m", *command], folder)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
    return next(Path(folder, "dist").glob("*.whl"))


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    lines = ["# Versions of Python and torch", "", "| Python | torch | commit | result |", "| --- | --- | --- | --- |"]
    for row in rows:
        result = (
            f"{'passed' if row['passed'] else 'FAILED'}: {row['pytest']}" if row["ran"] else f"not run: {row['why']}"
        )
        lines.append(f"| {row['python']} | {row.get('torch', row['asked'])} | {row.get('commit', '')} | {result} |")
    return "\n".join([*lines, "", f"Tests, against the installed wheel: {', '.join(TESTS)}.", ""])


def commit() -> str:
    """The checkout's commit, with a plus where files differ from it."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [f"{version}:{asked}" for version in PYTHONS for asked in TORCHES]
    parser.add_argument("--pairs", nargs="+", default=every, choices=every, metavar="PAIR", help="such as 3.10:2.6")
    parser.add_argument("--download", action="store_true", help="also pairs that bring packages of CUDA")
    parser.add_argument(
        "--tests", nargs="+", default=TESTS, metavar="FILE", help="files of tests/; others aren't recorded"
    )
    return parser.parse_args()


def main() -> int:
    """Runs the pairs; 1 when the tests of one fail."""
    options, recorded = parsed(), RESULTS / "matrix.json"
    known = json.loads(recorded.read_text())["rows"] if recorded.exists() else []
    rows = {f"{row['python']}:{row['asked']}": row for row in known if row["asked"] in TORCHES}
    with tempfile.TemporaryDirectory() as folder:
        wheel, built = build(folder), commit()
        for name in options.pairs:
            version, asked = name.split(":")
            outcome = pair(version, TORCHES[asked], wheel, options)
            print(version, asked, outcome, flush=True)
            if outcome["ran"] or not rows.get(name, {}).get("ran"):
                rows[name] = {"python": version, "asked": asked, "commit": built, **outcome}
            if options.tests == TESTS:
                recorded.write_text(json.dumps({"tests": TESTS, "rows": list(rows.values())}, indent=1) + "\n")
                recorded.with_suffix(".md").write_text(markdown(list(rows.values())))
    return int(any(rows[name]["ran"] and not rows[name]["passed"] for name in options.pairs))


if __name__ == "__main__":
    sys.exit(main())
