"""ghostclip epsilon: privacy spent by a setting"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ghostclip import accounting
from ghostclip.cli.arguments import UsageError, add_accounting, add_json, print_json
from ghostclip.cli.sampling import add_sampling, fields_of, sampling_of
from ghostclip.report.plots import epsilon_plot
from ghostclip.validate import positive

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
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also write epsilon over the steps to a .png file")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints epsilon by each accountant that bounds it, and draws it over the steps."""
    if arguments.plot is not None and arguments.plot.suffix != ".png":
        raise UsageError(f"--plot must name a .png file; got {arguments.plot}")
    sampling, steps = sampling_of(arguments)
    noise = positive(noise_multiplier=arguments.noise_multiplier)
    setting: dict[str, Any] = {
        "noise_multiplier": noise,
        **fields_of(sampling),
        "steps": steps,
        "delta": arguments.delta,
    }
    event = sampling.event(noise, steps)
    names = dict.fromkeys([arguments.accountant, *accounting.accountants_for(event)])
    spent = {name: accounting.epsilon(**setting, accountant=name) for name in names}
    if arguments.plot is not None:
        curves = {name.upper(): accounting.epsilon_over_time(**setting, accountant=name) for name in names}
        marks = next(iter(curves.values()))[0]
        about = f"{arguments.sampling} sampling, neighbours: {arguments.neighboring}"
        values = {name: curve for name, (_, curve) in curves.items()}
        arguments.plot.write_bytes(epsilon_plot(marks, values, arguments.delta, None, about=about))
    if arguments.json:
        chosen = arguments.accountant
        print_json({"epsilon": spent[chosen], "accountant": chosen, "epsilons": spent, **setting})
        return 0
    for name, value in spent.items():
        print(f"epsilon {value:.4g} ({name.upper()})")
    print(f"at delta {arguments.delta:g}, after {steps:,} steps over {accounting.samples(event)}")
    print(accounting.neighbours(event))
    return 0
