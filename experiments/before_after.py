"""Step times of two checkouts beside each other: is a change slower?

    python experiments/before_after.py OTHER_CHECKOUT [--workloads cnn,vgg11] [--contenders cached,reweight]

Each checkout runs in a process of its own, on the same core, and they take their steps in turn. Two processes with the
same code differ by some percent (where their memory lies, which strategies were measured to be faster), so that there
are several pairs of them: what is printed is the median over the pairs of the median of each one's ratios, this
checkout over the other one, with the least and the largest. ``--seconds`` is for each pair.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 6
WORKER = """
import sys, time, torch
torch.set_num_threads(1)
try:
    from ghostclip.bench.methods import CONTENDERS
except ModuleNotFoundError:  # an older checkout
    from ghostclip.bench.roster import CONTENDERS
from ghostclip.bench.workloads import WORKLOADS
torch.manual_seed(0)
workload = WORKLOADS[sys.argv[1]]
model, inputs, targets = workload.on("cpu", workload.batch_size)
turn = CONTENDERS[sys.argv[2]].prepare(model, workload.losses, 1.0).turn(inputs, targets)
for line in sys.stdin:
    start = time.perf_counter()
    for _ in range(int(line)):
        turn()
    print(time.perf_counter() - start, flush=True)
"""


class Lane:
    """One checkout's process."""

    def __init__(self, tree: Path, workload: str, contender: str, core: int) -> None:
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        command = ["taskset", "-c", str(core), sys.executable, "-c", WORKER, workload, contender]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment, cwd=tree, stdin=pipe, stdout=pipe, text=True)

    def seconds(self, steps: int) -> float:
        """What so many steps take."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def end(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()


def ratios(other: Path, workload: str, contender: str, seconds: float, core: int) -> list[float]:
    """Paired ratios of step times, this checkout's over the other's."""
    lanes = [Lane(tree, workload, contender, core) for tree in (ROOT, other)]
    try:
        for lane in lanes:
            lane.seconds(WARM_UP)
        once = max(lane.seconds(2) / 2 for lane in lanes)
        steps = max(1, round(0.02 / once))
        rounds = max(8, round(seconds / (2 * steps * once)))
        found = []
        for number in range(rounds):
            # Who is first has the cache that the other left; each is as often.
            order = (0, 1) if number % 2 == 0 else (1, 0)
            taken = {lane: lanes[lane].seconds(steps) for lane in order}
            found.append(taken[0] / taken[1])
        return found
    finally:
        for lane in lanes:
            lane.end()


def main() -> None:
    """Prints a row for each workload and contender; writes them all with ``--out``."""
    from ghostclip.bench.workloads import SETS

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("other", type=Path, help="a checkout of the version to compare with")
    parser.add_argument("--workloads", default=",".join(SETS["usual"]))
    parser.add_argument("--contenders", default="cached,reweight")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--pairs", type=int, default=5, help="of processes")
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    rows = []
    for workload in chosen.workloads.split(","):
        for contender in chosen.contenders.split(","):
            found = [
                statistics.median(ratios(chosen.other.resolve(), workload, contender, chosen.seconds, chosen.core))
                for _ in range(chosen.pairs)
            ]
            middle, low, high = statistics.median(found), min(found), max(found)
            rows.append({"workload": workload, "contender": contender, "ratio": middle, "of pairs": sorted(found)})
            print(f"{workload:15} {contender:20} {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)
            if chosen.out is not None:
                chosen.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
