"""ghostclip bench: step times on this machine, beside non-private training and what else is installed"""

from __future__ import annotations

import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    from ghostclip.bench import command

    parser.description = (
        "Times training steps with per-example clipping beside ordinary ones, in turns, on random data. Before the\n"
        "clock starts, each contender's clipped sum is compared with a plain loop's. Other libraries take part where\n"
        'they are installed: pip install "ghostclip[bench]".'
    )
    parser.epilog = "example: ghostclip bench --workloads mlp,cnn --seconds 5"
    command.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the benchmark and prints its table."""
    from ghostclip.bench import command

    return command.run(arguments)
