"""Random models, batches and neighbouring pairs through every way to clip, until time is up.

A case is one whole number. Five in eight clip some batches of a random model in a random way and compare each with the
loop over single examples in float64 (experiments/fuzzing/batches.py, truth.py). Two in eight add an example to a data
set and see how far it moves what the engine would release (pairs.py). One in eight does so with data sets that are
loaded, padded and collated each by itself, by examples or users, with hooks on tensors (data_pairs.py, collates.py): a
collate function that minds other examples must be refused, and no other. Ctrl-C ends a run with what it has so far.

    python experiments/fuzz.py [--seconds N] [--seed S] [--processes P] [--out FOLDER]
    python experiments/fuzz.py --only SEED      that case again, with its model and differences

appends to fuzz.json and fuzz.md; returns 1 when a difference has no explanation.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "experiments"))

from fuzzing.record import Totals, commit, write  # noqa: E402
from fuzzing.work import outcomes, run_case  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs and writes; 1 when something is unexplained."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="how long (default: 600)")
    parser.add_argument("--seed", type=int, default=None, help="the first case (default: from the clock)")
    parser.add_argument("--processes", type=int, default=1, help="of one thread each (default: 1)")
    parser.add_argument("--only", type=int, default=None, metavar="SEED", help="that one case, shown")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    options = parser.parse_args(arguments)
    if options.only is not None:
        return _show(options.only)
    seed = int(time.time()) % 10**8 * 100 if options.seed is None else options.seed
    totals, began = Totals(), time.monotonic()
    more = {"commit": commit(), "started": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M}", "seed": seed}
    print(f"cases from {seed} on, {options.processes} process(es), {options.seconds:g} s, commit {more['commit']}")
    try:
        for outcome in outcomes(seed, options.seconds, options.processes):
            totals.add(outcome)
            for what in outcome.findings:
                print(f"--only {outcome.seed}: {what}", flush=True)
    except KeyboardInterrupt:
        print("stopped")
    seconds = round(time.monotonic() - began)
    write(totals.as_run(**more, seconds=seconds, processes=options.processes), options.out)
    counts, refused = totals.counts, sum(totals.refusals.values())
    print(
        f"{counts['batches']} batches, {counts['pairs']} pairs, {counts['data pairs']} pairs of data sets, {refused} "
        f"refused, in {seconds} s; "
        f"{len(totals.findings)} without an explanation"
    )
    return bool(totals.findings)


def _show(seed: int) -> int:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    outcome = run_case(seed, show=True)
    print(*outcome.findings or ["nothing unexplained"], *outcome.refusals, sep="\n")
    return bool(outcome.findings)


if __name__ == "__main__":
    sys.exit(main())
