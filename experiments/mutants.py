"""Bugs planted one at a time in a copy of the package: which test catches each?

Every row of experiments/mutants/table.py replaces one piece of source text by another. The script fails when a piece is
not there exactly once (the table is stale), when the tests named fail without any bug, and when a bug survives.

    python experiments/mutants.py [NAME ...] [--out FOLDER]

writes mutants.json and mutants.md; with names, only those are planted anew.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("ghostclip", "tests", "experiments", "pyproject.toml", "README.md", "SECURITY.md", "Makefile", "docs")
SECONDS = 300


def table() -> list[Any]:
    """The rows of experiments/mutants/table.py."""
    spec = importlib.util.spec_from_file_location("mutants_table", ROOT / "experiments" / "mutants" / "table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants_table"] = module
    spec.loader.exec_module(module)
    return module.MUTANTS


def stale(mutants: Sequence[Any], root: Path = ROOT) -> list[str]:
    """Names of mutants whose source text is not there exactly once, or that change nothing."""
    texts = {m.file: (root / m.file).read_text() if (root / m.file).is_file() else "" for m in mutants}
    return [m.name for m in mutants if texts[m.file].count(m.source) != 1 or m.source == m.replacement]


def copy_to(folder: Path) -> None:
    """A copy of all that tests need; never the checkout itself is changed."""
    for name in COPIED:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        elif path.exists():
            shutil.copy(path, folder / name)


def run(folder: Path, tests: Sequence[str], seconds: float = SECONDS) -> tuple[int, str]:
    """(exit status, output) of the tests in the copy, which stop at the first failure or after so many seconds."""
    chosen = "not slow or one_in"  # all cases of what `make test` runs a part of
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", chosen, "--tb=no"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*command, *tests], cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return 1, f"FAILED {tests[0]} (no end within {seconds:g} s)"
    return done.returncode, done.stdout + done.stderr


def plant(folder: Path, mutant: Any) -> dict[str, Any]:
    """What came of one mutant: the test that caught it, or None."""
    path = folder / mutant.file
    before = path.read_text()
    path.write_text(before.replace(mutant.source, mutant.replacement))
    started = time.perf_counter()
    try:
        status, output = run(folder, mutant.tests)
    finally:
        path.write_text(before)
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    caught = found.group(1).removeprefix("tests/") if status == 1 and found else None
    row = {"name": mutant.name, "file": mutant.file, "caught_by": caught}
    return row | {"seconds": round(time.perf_counter() - started, 1), "output": "" if caught else output[-2000:]}


def check_baseline(folder: Path, mutants: Sequence[Any]) -> None:
    """SystemExit unless the tests pass without a bug."""
    chosen = {mutant.tests for mutant in mutants}
    plain = {test for tests in chosen if "-k" not in tests for test in tests}
    for tests in [tuple(sorted(plain)), *(tests for tests in chosen if "-k" in tests)]:
        status, output = run(folder, tests, 10 * SECONDS) if tests else (0, "")
        if status:
            raise SystemExit(f"{' '.join(tests)} fails without any bug planted:\n{output[-3000:]}")


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table, as a page."""
    caught = sum(row["caught_by"] is not None for row in rows)
    lines = [f"# Planted bugs: {caught} of {len(rows)} caught", "", "| bug | in | caught by |", "| --- | --- | --- |"]
    cell = "| {} | `{}` | {} |"
    for row in rows:
        by = f"`{row['caught_by']}`".replace("|", "\\|") if row["caught_by"] else "**nothing**"
        lines.append(cell.format(row["name"], row["file"].removeprefix("ghostclip/"), by))
    return "\n".join(lines) + "\n"


def write(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Puts rows into the results, where rows of other mutants of the table stay."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "mutants.json"
    found = {row["name"]: row for row in json.loads(path.read_text())} if path.exists() else {}
    found |= {row["name"]: row for row in rows}
    kept = [found[mutant.name] for mutant in table() if mutant.name in found]
    path.write_text(json.dumps(kept, indent=1) + "\n")
    (out / "mutants.md").write_text(markdown(kept))


def main(arguments: Sequence[str] | None = None) -> int:
    """Plants the bugs; returns 0 when all were caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only these (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "experiments" / "results", help="folder for the results")
    options = parser.parse_args(arguments)
    mutants = [m for m in table() if not options.names or m.name in options.names]
    if unknown := set(options.names) - {mutant.name for mutant in mutants}:
        raise SystemExit(f"no such mutants: {', '.join(sorted(unknown))}")
    if old := stale(mutants):
        raise SystemExit(f"experiments/mutants/table.py is stale; not there exactly once: {', '.join(old)}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_to(folder)
        check_baseline(folder, mutants)
        rows = []
        for mutant in mutants:
            rows.append(plant(folder, mutant))
            print(f"{mutant.name}: {rows[-1]['caught_by'] or 'SURVIVED'} ({rows[-1]['seconds']} s)", flush=True)
    write(rows, options.out)
    survived = [row["name"] for row in rows if row["caught_by"] is None]
    print(
        f"{len(rows) - len(survived)} of {len(rows)} caught"
        + (f"; survived: {', '.join(survived)}" if survived else "")
    )
    return bool(survived)


if __name__ == "__main__":
    sys.exit(main())
