"""From the arguments of `ghostclip train` to the runs it makes: the one asked for first, then those beside it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from ghostclip import accounting
from ghostclip.cli.arguments import UsageError
from ghostclip.cli.methods import Settings
from ghostclip.cli.recipes import learning_rate, recipe_for
from ghostclip.validate import nonnegative, open_fraction, positive, positive_int, whole

__all__ = ["DEFAULT_EPSILON", "PlannedRun", "runs_of", "steps_per_epoch", "wants_comparison"]

DEFAULT_EPSILON = 8.0
LOWER_TARGETS = (3.0, 1.0)  # shown beside the target asked for, where that is larger


@dataclass(frozen=True)
class PlannedRun:
    """A run with the name that tables and plots give it, and its number of steps."""

    name: str
    settings: Settings
    steps: int


def wants_comparison(arguments: argparse.Namespace) -> bool:
    """Whether other runs are made too: as asked, else for the digits, which train in seconds."""
    if arguments.compare is None:
        return arguments.data == "digits" and arguments.method != "nonprivate" and arguments.ledger is None
    return arguments.compare


def runs_of(arguments: argparse.Namespace, examples: int) -> Iterator[PlannedRun]:
    """The runs on a training set of so many examples, each calibrated when it is taken, which takes seconds.

    Raises:
        UsageError: options that contradict each other; ValueError: a value out of range.
    """
    _check(arguments, examples)
    if arguments.method == "nonprivate":
        yield _nonprivate(arguments, examples)
        return
    if arguments.noise_multiplier is not None:
        noise = nonnegative(noise_multiplier=arguments.noise_multiplier)
        name = f"private, noise {noise:g}" if noise else "not private, no noise"
        yield _private(arguments, examples, name, noise, None)
    else:
        first = DEFAULT_EPSILON if arguments.epsilon is None else arguments.epsilon
        lower = [target for target in LOWER_TARGETS if target < first and wants_comparison(arguments)]
        for target in (first, *lower):
            yield _calibrated(arguments, examples, target)
    if wants_comparison(arguments):
        yield _nonprivate(arguments, examples)


def _check(arguments: argparse.Namespace, examples: int) -> None:
    """Everything that can be told before the first calculation."""
    if arguments.method == "nonprivate":
        for option in ("epsilon", "noise_multiplier", "noise", "max_norm", "max_physical_batch_size", "ledger"):
            if getattr(arguments, option) is not None:
                raise UsageError(f"--method nonprivate takes no --{option.replace('_', '-')}; leave it out")
    if arguments.ledger is not None and arguments.method in ("nxbp", "multiloss"):
        raise UsageError(f"--method {arguments.method} is there for comparison and keeps no --ledger; leave it out")
    if arguments.ledger is not None and arguments.compare:
        raise UsageError("the runs beside yours would be charged to the --ledger, too; give it or --compare, not both")
    if arguments.epsilon is not None and arguments.noise_multiplier is not None:
        raise UsageError("give --epsilon or --noise-multiplier, not both: each determines the other")
    if arguments.batch_size is not None and positive_int(batch_size=arguments.batch_size) > examples:
        raise ValueError(f"batch_size must be at most the {examples} training examples; got {arguments.batch_size}")
    if arguments.max_physical_batch_size is not None:
        positive_int(max_physical_batch_size=arguments.max_physical_batch_size)
    open_fraction(delta=arguments.delta)
    if not 0 <= whole(seed=arguments.seed) < 2**63:
        raise ValueError(f"seed must be below 2**63; got {arguments.seed}")


def steps_per_epoch(examples: int, batch_size: int) -> int:
    """What the engine calls an epoch."""
    return max(1, round(examples / batch_size))


def _calibrated(arguments: argparse.Namespace, examples: int, target: float) -> PlannedRun:
    """A private run whose noise meets the target."""
    batch_size, steps = _batch_size_and_steps(arguments, examples)
    noise = accounting.noise_multiplier(
        target_epsilon=positive(epsilon=target), sample_rate=batch_size / examples, steps=steps, delta=arguments.delta
    )
    return _private(arguments, examples, f"private, epsilon {target:g}", noise, target)


def _batch_size_and_steps(arguments: argparse.Namespace, examples: int) -> tuple[int, int]:
    """The logical batch size and the number of steps of a private run."""
    recipe = recipe_for(examples, private=True)
    batch_size = recipe.batch_size if arguments.batch_size is None else arguments.batch_size
    epochs = positive_int(epochs=recipe.epochs if arguments.epochs is None else arguments.epochs)
    return batch_size, epochs * steps_per_epoch(examples, batch_size)


def _private(arguments: argparse.Namespace, examples: int, name: str, noise: float, target: float | None) -> PlannedRun:
    """A run with that much noise."""
    recipe = recipe_for(examples, private=True)
    batch_size, steps = _batch_size_and_steps(arguments, examples)
    max_norm = positive(max_norm=recipe.max_norm if arguments.max_norm is None else arguments.max_norm)
    optimizer = arguments.optimizer or recipe.optimizer
    rate = learning_rate(optimizer, noise, batch_size, max_norm)
    settings = Settings(
        model=arguments.model,
        method=arguments.method,
        epochs=recipe.epochs if arguments.epochs is None else arguments.epochs,
        batch_size=batch_size,
        max_physical_batch_size=arguments.max_physical_batch_size,
        max_norm=max_norm,
        learning_rate=rate if arguments.learning_rate is None else positive(learning_rate=arguments.learning_rate),
        optimizer=optimizer,
        seed=arguments.seed,
        delta=arguments.delta,
        noise_multiplier=noise,
        target_epsilon=target,
        noise=arguments.noise or "standard",
        ledger=arguments.ledger,
    )
    return PlannedRun(name, settings, steps)


def _nonprivate(arguments: argparse.Namespace, examples: int) -> PlannedRun:
    """Ordinary training: as asked when it is the method asked for, beside another with settings that suit it."""
    recipe = recipe_for(examples, private=False)
    asked = arguments.method == "nonprivate"
    optimizer = (arguments.optimizer if asked else None) or recipe.optimizer
    batch_size = (arguments.batch_size if asked else None) or recipe.batch_size
    rate = (arguments.learning_rate if asked else None) or learning_rate(optimizer, None, batch_size, recipe.max_norm)
    epochs = positive_int(epochs=recipe.epochs if arguments.epochs is None else arguments.epochs)
    settings = Settings(
        model=arguments.model,
        method="nonprivate",
        epochs=epochs,
        batch_size=batch_size,
        max_physical_batch_size=None,
        max_norm=recipe.max_norm,
        learning_rate=positive(learning_rate=rate),
        optimizer=optimizer,
        seed=arguments.seed,
        delta=arguments.delta,
        noise_multiplier=None,
        noise=None,
    )
    return PlannedRun("non-private", settings, epochs * -(-examples // batch_size))
