"""``python -m ghostclip.bench``: step times of private training beside ordinary training, on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ghostclip.bench.command import add_arguments, run

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status, as `ghostclip.bench.command.run` does.

    Args:
        arguments: as on the command line; None for the process's own.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ghostclip.bench",
        description="Times training steps with per-example clipping beside ordinary ones, in turns, on random data. "
        "Before the clock starts, each contender's clipped sum is compared with a plain loop's.",
        epilog="example: OMP_NUM_THREADS=1 python -m ghostclip.bench --workloads mlp,cnn --seconds 5",
    )
    add_arguments(parser)
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
