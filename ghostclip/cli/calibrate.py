"""ghostclip calibrate: the least noise that keeps a setting within a target epsilon"""

from __future__ import annotations

import argparse
import math
from typing import Any

from ghostclip import accounting
from ghostclip.cli.arguments import add_accounting, add_json, print_json
from ghostclip.cli.sampling import add_sampling, fields_of, sampling_of

__all__ = ["add_arguments", "run"]

DIGITS = 4  # decimals shown; rounded up, so that what is shown keeps the promise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = (
        "example: ghostclip calibrate --epsilon 3 --examples 60000 --batch-size 256 --epochs 20 --delta 1e-5"
    )
    parser.add_argument("--epsilon", type=float, required=True, help="the target")
    add_accounting(parser, "which bound must be within the target (default: pld, which needs less noise)")
    add_sampling(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the noise multiplier and what it spends."""
    setting, steps = sampling_of(arguments)
    choice = {"delta": arguments.delta, "accountant": arguments.accountant}
    where: dict[str, Any] = {**fields_of(setting), "steps": steps, **choice}
    noise = accounting.noise_multiplier(target_epsilon=arguments.epsilon, **where)
    noise = math.ceil(noise * 10**DIGITS) / 10**DIGITS
    spent = accounting.epsilon(noise_multiplier=noise, **where) if steps else 0.0
    if arguments.json:
        print_json({"noise_multiplier": noise, "epsilon": spent, "target_epsilon": arguments.epsilon, **where})
        return 0
    event = setting.event(noise)
    print(f"noise multiplier {noise:.{DIGITS}f}")
    print(
        f"epsilon {spent:.4g} ({arguments.accountant.upper()}) at delta {arguments.delta:g}, "
        f"after {steps:,} steps over {accounting.samples(event)}"
    )
    print(accounting.neighbours(event))
    return 0
