"""``python -m experiments.peers``: the command ``ghostclip bench`` with other libraries beside ours.

Run it from the repository's root, with the options of ``ghostclip bench``:

    OMP_NUM_THREADS=1 python -m experiments.peers --workloads mlp,cnn --contenders nonprivate,cached,opacus-ghost
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ghostclip.bench import command, register


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status, as `ghostclip.bench.command.run` does."""
    register("experiments.peers")
    return command.main(arguments, "python -m experiments.peers")


if __name__ == "__main__":
    sys.exit(main())
