"""``python -m ghostclip.bench``: step times of private training beside ordinary training, on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ghostclip.bench.compare import BASELINE, compare
from ghostclip.bench.contenders import CONTENDERS
from ghostclip.bench.machine import busy_warning, describe
from ghostclip.bench.table import markdown
from ghostclip.bench.workloads import WORKLOADS

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status, 1 when a contender FAILED or its gradients were WRONG.

    Args:
        arguments: as on the command line; None for the process's own.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch finds no CUDA device here; leave it out to measure on the processor")
    torch.set_num_threads(options.threads)
    if warning := busy_warning():
        print(warning, file=sys.stderr, flush=True)
    results: dict[str, Any] = {
        "machine": describe(options.device),
        "seconds": options.seconds,
        "contenders": {name: CONTENDERS[name].about for name in options.contenders},
        "workloads": {},
    }
    chosen = {name: CONTENDERS[name] for name in options.contenders}
    for name in options.workloads:
        print(f"{name}: {WORKLOADS[name].about}", file=sys.stderr, flush=True)
        results["workloads"][name] = compare(WORKLOADS[name], chosen, options.seconds, options.device)
    print(markdown(results))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if _all_correct(results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ghostclip.bench",
        description="Times training steps with per-example clipping beside ordinary ones, in turns, on random data. "
        "Before the clock starts, each contender's clipped sum is compared with a plain loop's.",
        epilog="example: OMP_NUM_THREADS=1 python -m ghostclip.bench --workloads mlp,cnn --seconds 5",
    )
    parser.add_argument("--workloads", type=_names(WORKLOADS), default=list(WORKLOADS), metavar="NAME,NAME",
                        help=f"which to run: {', '.join(WORKLOADS)} (default: all)")  # fmt: skip
    parser.add_argument("--contenders", type=_names(CONTENDERS), default=list(CONTENDERS), metavar="NAME,NAME",
                        help=f"which to time: {', '.join(CONTENDERS)} (default: all)")  # fmt: skip
    parser.add_argument("--seconds", type=_positive, default=10.0, help="measuring time a workload (default: 10)")
    parser.add_argument("--threads", type=int, default=1, help="processor threads torch may use (default: 1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to run (default: cpu)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where to write all figures as JSON")
    return parser


def _names(known: dict[str, Any]) -> Any:
    """A parser of comma-separated names; the baseline is put in where it is known and missing."""

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            wrong = ", ".join(unknown) or "nothing"
            raise argparse.ArgumentTypeError(f"expected names among {', '.join(known)}; got {wrong}")
        return names if BASELINE in names or BASELINE not in known else [BASELINE, *names]

    return parse


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a number of seconds > 0; got {text}")
    return value


def _all_correct(results: dict[str, Any]) -> bool:
    rows = [row for work in results["workloads"].values() for row in work["contenders"].values()]
    return all(row.get("correct", True) and "failed" not in row for row in rows)


if __name__ == "__main__":
    sys.exit(main())
