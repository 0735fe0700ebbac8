"""What the commands' arguments and outputs have in common."""

from __future__ import annotations

import argparse
import json
from typing import Any, NoReturn

from ghostclip import accounting
from ghostclip.report import plain
from ghostclip.validate import fraction, positive_int, whole

__all__ = ["OneLineParser", "UsageError", "add_accounting", "add_json", "add_sampling", "print_json", "sampling_of"]


class UsageError(ValueError):
    """The command line does not make sense; the message says why, in one line."""


class OneLineParser(argparse.ArgumentParser):
    """A parser whose complaints are one line, without the usage, and which takes no abbreviated option."""

    def __init__(self, **options: Any) -> None:
        options = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter, **options}
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        """Raises UsageError with argparse's message and where help is."""
        raise UsageError(f"{message} (see {self.prog} --help)")


def add_accounting(parser: argparse._ActionsContainer, about: str) -> None:
    """Adds ``--delta`` and ``--accountant``; ``about`` says what the latter decides."""
    parser.add_argument("--delta", type=float, default=1e-5, help="default: 1e-5")
    parser.add_argument("--accountant", choices=accounting.ACCOUNTANTS, default="pld", help=about)


def add_json(parser: argparse._ActionsContainer) -> None:
    """Adds ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def print_json(value: Any) -> None:
    """Prints one JSON object; infinities and NaN are text, which JSON has no numbers for."""
    print(json.dumps(plain(value), indent=2, allow_nan=False))


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Adds the two ways to say how examples were sampled and how often."""
    rates = parser.add_argument_group("sampling", "either the first two or the other three")
    rates.add_argument("--sample-rate", type=float, metavar="Q", help="probability of each example to be in a batch")
    rates.add_argument("--steps", type=int, metavar="N", help="number of batches")
    rates.add_argument("--examples", type=int, metavar="N", help="size of the training set")
    rates.add_argument("--batch-size", type=int, metavar="B", help="expected batch size")
    rates.add_argument("--epochs", type=int, metavar="E", help="passes over the training set")


def sampling_of(arguments: argparse.Namespace) -> tuple[float, int]:
    """(sample rate, steps) from either way of `add_sampling`.

    Raises:
        UsageError: neither way or both; ValueError: a number is out of range.
    """
    direct = (arguments.sample_rate, arguments.steps)
    counted = (arguments.examples, arguments.batch_size, arguments.epochs)
    if None not in direct and counted == (None, None, None):
        return fraction(sample_rate=arguments.sample_rate), whole(steps=arguments.steps)
    if None not in counted and direct == (None, None):
        examples, batch = positive_int(examples=arguments.examples), positive_int(batch_size=arguments.batch_size)
        if batch > examples:
            raise ValueError(f"batch_size must be at most the number of examples, {examples}; got {batch}")
        return batch / examples, whole(epochs=arguments.epochs) * max(1, round(examples / batch))
    raise UsageError("give --sample-rate and --steps, or --examples, --batch-size and --epochs")
