"""ghostclip check: what stands in a model's way to private training, all of it at once"""

from __future__ import annotations

import argparse
from dataclasses import asdict

import ghostclip
from ghostclip.cli.arguments import add_json, print_json
from ghostclip.cli.subject import add_subject, subject_of

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = "example: ghostclip check mypackage.networks:make\nexit status: 0 nothing found, 1 something found"
    add_subject(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints every finding and its remedy; 1 when there are any."""
    findings = ghostclip.check(subject_of(arguments))
    if arguments.json:
        print_json({"model": arguments.model, "trainable": not findings, "findings": [asdict(f) for f in findings]})
    elif not findings:
        print(f"{arguments.model}: nothing stands in the way of private training")
    else:
        print(f"{arguments.model}: {len(findings)} thing(s) to change")
        for number, finding in enumerate(findings, 1):
            print(f"  {number}. {finding}")
    return 1 if findings else 0
