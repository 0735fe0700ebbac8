"""What a user waits for first: imports, ``--version``, ``--help``, the first private step; and the size of the wheel.

The first private step is measured with the kernels compiled before, and with none, as on a new machine; so is the
longest time in which a terminal shows nothing new.

    python experiments/first_minutes.py [--before REVISION]

measures the checkout, and REVISION beside it, in turns; writes results/first_minutes.json and .md. Each time is the
median of ten processes, with compiled bytecode, as an installed package has it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
PROCESSES = 10
NEW_MACHINES = 3
EXAMPLE = "README's example up to its first private step"
FIRST_STEP = """\
engine = ghostclip.PrivacyEngine(model, optimizer, data, batch_size=64, target_epsilon=3.0, target_delta=1e-5, epochs=4)
engine.step(next(iter(engine.batches())), lambda model, batch: criterion(model(batch[0]), batch[1]))
"""


def commands() -> dict[str, list[str]]:
    """Each measured process."""
    example = re.search(r"```python\n(.*?)engine = ", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example is not None
    return {
        "import torch": ["-c", "import torch"],
        "import torch, ghostclip": ["-c", "import torch, ghostclip"],
        "python -m ghostclip --version": ["-m", "ghostclip", "--version"],
        "python -m ghostclip --help": ["-m", "ghostclip", "--help"],
        EXAMPLE: ["-c", example[1] + FIRST_STEP],
    }


def environment(source: Path, cache: str) -> dict[str, str]:
    """Of a process on one core that finds the package in ``source``."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPATH": str(source), "PYTHONPYCACHEPREFIX": cache, "OMP_NUM_THREADS": "1"}


def seconds(command: list[str], source: Path, cache: str) -> float:
    """Of one process."""
    start = time.perf_counter()
    kept = environment(source, cache)
    subprocess.run([sys.executable, *command], env=kept, cwd=cache, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def on_a_terminal(command: list[str], source: Path, cache: str, kernels: str | None = None) -> tuple[float, float]:
    """Seconds of one process, and the longest of them without output; ``kernels`` is where compiled kernels are."""
    kept = environment(source, cache) | ({} if kernels is None else {"XDG_CACHE_HOME": kernels})
    ours, its = os.openpty()
    start = last = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], env=kept, cwd=cache, stdin=its, stdout=its, stderr=its)
    os.close(its)
    silent = 0.0
    with open(ours, "rb", buffering=0) as output:
        shown = True
        while shown:
            try:
                shown = bool(output.read(1 << 16))
            except OSError:  # what Linux says when the process has closed its end
                shown = False
            now = time.perf_counter()
            silent, last = max(silent, now - last), now
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, command)
    return last - start, silent


def wheel_bytes(source: Path) -> int:
    """The size of the wheel built from ``source``."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, str(source)]
        subprocess.run(command, check=True)
        return next(Path(folder).glob("*.whl")).stat().st_size


def first_steps(source: Path, cache: str) -> dict[str, float]:
    """The example's first step on a terminal: medians with kernels compiled before, and on new machines."""
    command = commands()[EXAMPLE]
    warm = [on_a_terminal(command, source, cache) for _ in range(PROCESSES)]
    new = []
    for _ in range(NEW_MACHINES):
        with tempfile.TemporaryDirectory() as kernels:
            new.append(on_a_terminal(command, source, cache, kernels))
    return {
        "silent": median(silent for _, silent in warm),
        "new_seconds": median(whole for whole, _ in new),
        "new_silent": median(silent for _, silent in new),
    }


def measured(sources: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Medians and sizes of each source, whose processes take turns."""
    taken: dict[str, dict[str, list[float]]] = {name: {what: [] for what in commands()} for name in sources}
    with tempfile.TemporaryDirectory() as cache:
        for turn in range(PROCESSES + 1):
            for name, source in sources.items():
                for what, command in commands().items():
                    each = seconds(command, source, cache)
                    if turn:  # the first writes bytecode
                        taken[name][what].append(each)
        return {
            name: {
                "seconds": {what: median(each) for what, each in taken[name].items()},
                "first_step": first_steps(source, cache),
                "wheel_bytes": wheel_bytes(source),
            }
            for name, source in sources.items()
        }


def markdown(results: dict[str, Any]) -> str:
    """The figures as a table."""
    found = results["measured"]
    lines = [
        f"| seconds, median of {results['processes']} processes | {' | '.join(found)} |",
        "| --- |" + " --- |" * len(found),
    ]
    for what in next(iter(found.values()))["seconds"]:
        lines.append(f"| `{what}` | " + " | ".join(f"{row['seconds'][what]:.2f}" for row in found.values()) + " |")
    for what, title in (
        ("silent", "longest time without output in it"),
        ("new_seconds", "the same where no kernel is compiled yet"),
        ("new_silent", "longest time without output in that"),
    ):
        lines.append(f"| {title} | " + " | ".join(f"{row['first_step'][what]:.2f}" for row in found.values()) + " |")
    added = [row["seconds"]["import torch, ghostclip"] - row["seconds"]["import torch"] for row in found.values()]
    lines.append("| added by `import ghostclip` | " + " | ".join(f"{each:.2f}" for each in added) + " |")
    lines.append(
        "| size of the wheel, kB | " + " | ".join(f"{row['wheel_bytes'] / 1000:.0f}" for row in found.values()) + " |"
    )
    return "# The first minutes\n\n" + "\n".join(lines) + f"\n\nLoad average before: {results['load']:.2f}.\n"


def main() -> int:
    """Measures and writes the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="REVISION", help="a commit to measure beside the checkout")
    before = parser.parse_args().before
    with tempfile.TemporaryDirectory() as folder:
        sources = {"now": ROOT}
        if before is not None:
            archive = subprocess.run(["git", "archive", before], cwd=ROOT, capture_output=True, check=True).stdout
            with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
                packed.extractall(folder, filter="data")
            sources = {before: Path(folder), **sources}
        load = os.getloadavg()[0]
        results = {"processes": PROCESSES, "load": load, "measured": measured(sources)}
    (RESULTS / "first_minutes.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "first_minutes.md").write_text(markdown(results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
