"""ghostclip epsilon: privacy spent by a setting"""

from __future__ import annotations

import argparse

from ghostclip import accounting
from ghostclip.cli.arguments import add_accounting, add_json, add_sampling, print_json, sampling_of

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = (
        "example: ghostclip epsilon --noise-multiplier 1.1 --examples 60000 --batch-size 256 --epochs 20 --delta 1e-5"
    )
    parser.add_argument(
        "--noise-multiplier",
        type=float,
        required=True,
        metavar="SIGMA",
        help="standard deviation of the noise over the clipping norm",
    )
    add_accounting(parser, "which bound is the answer; both are shown (default: pld, the tighter one)")
    add_sampling(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints epsilon by both accountants."""
    sample_rate, steps = sampling_of(arguments)
    setting = {
        "noise_multiplier": arguments.noise_multiplier,
        "sample_rate": sample_rate,
        "steps": steps,
        "delta": arguments.delta,
    }
    spent = {name: accounting.epsilon(**setting, accountant=name) for name in accounting.ACCOUNTANTS}
    if arguments.json:
        print_json(
            {"epsilon": spent[arguments.accountant], "accountant": arguments.accountant, "epsilons": spent, **setting}
        )
        return 0
    for name in sorted(spent, key=lambda name: name != arguments.accountant):
        print(f"epsilon {spent[name]:.4g} ({name.upper()})")
    print(f"at delta {arguments.delta:g}, after {steps:,} steps of sample rate {sample_rate:.4g}")
    return 0
