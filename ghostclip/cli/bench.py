"""ghostclip bench: step times on this machine, beside non-private training and the naive loop"""

from __future__ import annotations

import argparse

from ghostclip.bench import command
from ghostclip.bench.command import run

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = "example: ghostclip bench --workloads mlp,cnn --seconds 5"
    command.add_arguments(parser)
