"""``python -m experiments.peers``: the command ``ghostclip bench`` with other libraries beside ours.

Run it from the repository's root, with the options of ``ghostclip bench``:

    OMP_NUM_THREADS=1 python -m experiments.peers --workloads mlp,cnn --contenders nonprivate,cached,opacus-ghost
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ghostclip import cli
from ghostclip.bench import register


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status, as `ghostclip.cli.main` does."""
    register("experiments.peers")
    return cli.main(["bench", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
