"""The wheel in an environment without a C compiler: behavioural tests, and steps beside kernels compiled here.

    make test-wheel              # or: python experiments/wheel.py [--rounds N] [--no-tests] [--out FOLDER]

Builds the wheel, installs it in a fresh environment whose PATH has no compiler and whose home folder is empty, and runs
the tests of layers, clipper, noise and engine there. Then private steps of some networks take turns, each in a process
of its own on one thread: with the wheel's kernels, with those that the checkout compiled for this processor, and with
none. Writes wheel.json and wheel.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
TESTS = ("tests/layers", "tests/clipper", "tests/engine", "tests/privacy/test_noise.py",
         "tests/privacy/test_noise_cipher.py")  # fmt: skip
FOR_TESTS = ("pytest", "pytest-xdist", "hypothesis", "safetensors", "pyarrow", "transformers", "peft",
             "torch-geometric", "opacus", "pandas", "scikit-learn", "tqdm", "matplotlib", "jinja2")  # fmt: skip
WORKLOADS = ("rnn", "lstm", "embedding", "transformer", "gpt-128", "mlp")
# {way: what else its process has in the environment}
WAYS = {"compiled here": {}, "wheel": {}, "none": {"GHOSTCLIP_COMPILE": "0"}}
WARM_UP = 20


def built(folder: Path) -> Path:
    """The wheel, made in a folder."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", folder, ROOT], check=True)
    return next(folder.glob("ghostclip-*.whl"))


def installed(wheel: Path, folder: Path) -> str:
    """The interpreter of a fresh environment that has the wheel and what its tests need."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    pinned = ["--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *pinned, wheel, *FOR_TESTS], check=True)
    return python


def without_compiler(home: Path) -> dict[str, str]:
    """An environment with an empty home folder, in which no program is found by its name."""
    home.mkdir(exist_ok=True)
    return {"PATH": str(home / "bin"), "HOME": str(home), "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8"}


def tested(python: str, folder: Path) -> str:
    """pytest's last line about the wheel; raises CalledProcessError where a test fails."""
    for name in ("tests", "experiments", "docs", "CONTRIBUTING.md", "README.md", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    command = [python, "-m", "pytest", "-m", "not slow", "--numprocesses", "2", *TESTS]
    ran = subprocess.run(command, cwd=folder, env=without_compiler(folder / "home"), text=True, stdout=subprocess.PIPE)
    print("\n".join(line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), flush=True)
    ran.check_returncode()
    return ran.stdout.strip().splitlines()[-1]


class Stepping:
    """A process that takes private steps of a workload when it is told to."""

    def __init__(self, python: str, environment: dict[str, str], workload: str) -> None:
        self._process = subprocess.Popen(
            [python, str(Path(__file__).resolve()), "--steps", workload], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/",
        )  # fmt: skip
        self.kernels = self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def milliseconds(self, steps: int) -> float:
        """The median of so many steps, in the processor's time."""
        assert self._process.stdin is not None
        print(steps, file=self._process.stdin, flush=True)
        return self._read()

    def end(self) -> None:
        """Ends the process."""
        self._process.communicate()


def step(workload: str) -> None:
    """What such a process does: says which kernels it has, then answers each number of steps on its input."""
    import time

    import torch

    from ghostclip.bench.methods import CONTENDERS
    from ghostclip.bench.workloads import WORKLOADS as KNOWN
    from ghostclip.native import kernels

    torch.set_num_threads(1)
    torch.manual_seed(0)
    work = KNOWN[workload]
    model, *batch = work.on("cpu", work.batch_size)
    turn = CONTENDERS["cached"].prepare(model, work.losses, 1.0).turn(*batch)
    for _ in range(WARM_UP):
        turn()
    print(json.dumps(kernels()), flush=True)
    for line in sys.stdin:
        taken = []
        for _ in range(int(line)):
            start = time.thread_time()
            turn()
            taken.append(1e3 * (time.thread_time() - start))
        print(json.dumps(statistics.median(taken)), flush=True)


def measured(pythons: dict[str, str], home: Path, rounds: int) -> dict[str, Any]:
    """{workload: milliseconds and ratios of each way}."""
    own = os.environ | {"OMP_NUM_THREADS": "1"}
    places = {way: (without_compiler(home) if way == "wheel" else own) | more for way, more in WAYS.items()}
    found = {}
    for workload in WORKLOADS:
        ways = {way: Stepping(pythons[way], places[way], workload) for way in WAYS}
        steps = max(1, min(40, int(200 / ways["none"].milliseconds(2))))
        taken: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way, stepping in ways.items():
                taken[way].append(stepping.milliseconds(steps))
        ratios = {
            way: statistics.median(mine / base for mine, base in zip(taken[way], taken["compiled here"], strict=True))
            for way in WAYS
        }
        found[workload] = {"ms": {way: statistics.median(each) for way, each in taken.items()}, "ratios": ratios,
                           "kernels": {way: stepping.kernels for way, stepping in ways.items()}}  # fmt: skip
        print(workload, {way: round(ratio, 3) for way, ratio in ratios.items()}, flush=True)
        for stepping in ways.values():
            stepping.end()
    return found


def page(results: dict[str, Any]) -> str:
    """The table."""
    lines = ["# Kernels of the wheel, compiled here, and none", "",
             "Written by `experiments/wheel.py`; do not edit. Private steps (cached, noise, Adam) on one thread, in",
             "turns; ratios are medians of those of a round, over kernels made by this machine's compiler.", "",
             "| network | compiled here, ms | wheel | none |", "| --- | --- | --- | --- |"]  # fmt: skip
    for name, found in results["workloads"].items():
        ratios = found["ratios"]
        lines.append(f"| {name} | {found['ms']['compiled here']:.3g} | {ratios['wheel']:.2f} | {ratios['none']:.2f} |")
    some = next(iter(results["workloads"].values()))["kernels"]
    lines += ["", *(f"- {way}: {said}" for way, said in some.items())]
    lines += ["", f"Wheel: {results['wheel']}, {results['bytes']:,} bytes. Tests in it: {results['tests']}."]
    return "\n".join([*lines, "", f"At commit {results['commit']} on {results['machine']}.", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds, tests, measures, and writes both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="of turns (default: 15)")
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of wheel.json and wheel.md")
    parser.add_argument("--steps", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.steps:
        step(options.steps)
        return 0
    from ghostclip.bench.machine import commit, describe, in_words

    machine = {key: value for key, value in describe().items() if key != "kernels"} | {"threads": 1}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        wheel = built(folder)
        python = installed(wheel, folder / "environment")
        results: dict[str, Any] = {"commit": commit(), "machine": in_words(machine), "wheel": wheel.name}
        results |= {"bytes": wheel.stat().st_size}
        results["tests"] = "not run" if options.no_tests else tested(python, folder)
        pythons = {"compiled here": sys.executable, "wheel": python, "none": sys.executable}
        results["workloads"] = measured(pythons, folder / "home", options.rounds)
    (options.out / "wheel.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "wheel.md").write_text(page(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
