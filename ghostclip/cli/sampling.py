"""The arguments that say how examples were sampled, how often, and what the guarantee is about."""

from __future__ import annotations

import argparse
from typing import Any

from ghostclip import accounting
from ghostclip.cli.arguments import UsageError
from ghostclip.events import RELATIONS, SAMPLINGS
from ghostclip.validate import fraction, positive_int, whole

__all__ = ["add_sampling", "fields_of", "sampling_of"]


def fields_of(setting: accounting.Setting) -> dict[str, Any]:
    """The setting as arguments of the accounting functions, without those that are left out."""
    return {name: value for name, value in vars(setting).items() if value is not None}


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Adds the two ways to say how examples were sampled and how often, and the kinds of sampling and neighbours."""
    rates = parser.add_argument_group("sampling", "either the first two or the next three")
    rates.add_argument("--sample-rate", type=float, metavar="Q", help="expected share of the examples in a batch")
    rates.add_argument("--steps", type=int, metavar="N", help="number of batches")
    rates.add_argument("--examples", type=int, metavar="N", help="size of the training set")
    rates.add_argument("--batch-size", type=int, metavar="B", help="expected batch size")
    rates.add_argument("--epochs", type=int, metavar="E", help="passes over the training set")
    rates.add_argument(
        "--sampling",
        choices=SAMPLINGS,
        default="poisson",
        help="how a batch is drawn: each example by a coin of its own; so many of them; or by coins, cut down to "
        "--max-batch-size (default: poisson)",
    )
    rates.add_argument("--max-batch-size", type=int, metavar="M", help="with --sampling truncated, and --examples")
    rates.add_argument(
        "--neighboring",
        choices=RELATIONS,
        default="add_or_remove_one",
        help="what neighbouring data sets differ by: one example's presence, or what it is (default: "
        "add_or_remove_one)",
    )


def sampling_of(arguments: argparse.Namespace) -> tuple[accounting.Setting, int]:
    """What the arguments of `add_sampling` say: how each step's batch is drawn, and how many steps there are.

    Raises:
        UsageError: the steps are given in neither way or in both; ValueError: a number is out of range.
    """
    rate, steps = _rate_and_steps(arguments)
    kind = arguments.sampling, arguments.neighboring
    if arguments.sampling != "truncated":
        if arguments.max_batch_size is not None:
            raise UsageError("--max-batch-size is for --sampling truncated")
        return accounting.Setting(rate, *kind), steps
    if arguments.examples is None or arguments.max_batch_size is None:
        raise UsageError("--sampling truncated needs --examples, --batch-size, --epochs and --max-batch-size")
    return accounting.Setting(rate, *kind, arguments.examples, arguments.max_batch_size), steps


def _rate_and_steps(arguments: argparse.Namespace) -> tuple[float, int]:
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
