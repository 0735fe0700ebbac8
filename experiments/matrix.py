"""Tests the wheel in clean environments, one for each Python and torch that can be had without CUDA's libraries.

    python experiments/matrix.py [--tests FILE ...]

builds the wheel, asks pip what each pair would install, and runs the tests where that has no package of CUDA; every
other pair is stated as not run, with the reason. Writes results/matrix.json and .md. A package index that has torch for
processors (pip's --extra-index-url, or PIP_EXTRA_INDEX_URL) makes all pairs run.
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
    "test_layers.py",
    "test_clipper.py",
    "test_clipping.py",
    "test_engine.py",
    "test_native.py",
    "test_accounting.py",
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


def obstacle(python: str, torch: str, folder: str) -> str | None:
    """Why the pair isn't run; None when it can be."""
    report = Path(folder) / "report.json"
    command = [
        python,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--quiet",
        "--report",
        str(report),
        torch,
    ]
    done = ran(command, folder)
    if done.returncode:
        return "pip finds no such torch: " + done.stderr.strip().splitlines()[-1]
    names = [each["metadata"]["name"] for each in json.loads(report.read_text())["install"]]
    needless = [name for name in names if name.startswith(CUDA)]
    return f"the torch that pip finds brings {len(needless)} packages of CUDA" if needless else None


def pair(version: str, torch: str, wheel: Path, tests: list[str]) -> dict[str, Any]:
    """What became of one Python and torch."""
    python = interpreter(version)
    if python is None:
        return {"ran": False, "why": f"no python{version} here"}
    with tempfile.TemporaryDirectory() as folder:
        if (why := obstacle(python, torch, folder)) is not None:
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
        done = ran([own, "-m", "pytest", "-m", "not slow", *(f"tests/{name}" for name in tests)], folder)
        lines = done.stdout.strip().splitlines()
        return {"ran": inside, "torch": found, "passed": inside and done.returncode == 0, "pytest": (lines or [""])[-1]}


def markdown(rows: list[dict[str, Any]], tests: list[str]) -> str:
    """The rows as a table."""
    lines = ["# Versions of Python and torch", "", "| Python | torch | result |", "| --- | --- | --- |"]
    for row in rows:
        result = (
            f"{'passed' if row['passed'] else 'FAILED'}: {row['pytest']}" if row["ran"] else f"not run: {row['why']}"
        )
        lines.append(f"| {row['python']} | {row.get('torch', row['asked'])} | {result} |")
    return "\n".join([*lines, "", f"Tests, against the installed wheel: {', '.join(tests)}.", ""])


def main() -> int:
    """Runs every pair; 1 when the tests of one fail."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="FILE", help="files of tests/ to run")
    tests, rows = parser.parse_args().tests, []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, str(ROOT)]
        subprocess.run(command, check=True)
        wheel = next(Path(folder).glob("*.whl"))
        for version in PYTHONS:
            for asked, torch in TORCHES.items():
                rows.append({"python": version, "asked": asked, **pair(version, torch, wheel, tests)})
                print(rows[-1], flush=True)
                (RESULTS / "matrix.json").write_text(json.dumps({"tests": tests, "rows": rows}, indent=1) + "\n")
                (RESULTS / "matrix.md").write_text(markdown(rows, tests))
    return int(any(row["ran"] and not row["passed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
