"""From the arguments of `ghostclip train` to the runs it makes: the one asked for first, then those beside it.

Default settings were found on public data; those for the digits on a quarter of their training images, held out, never
on the test images. On private data such a search would spend privacy of its own: start from settings that worked on
similar public data.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ghostclip import accounting
from ghostclip.cli.arguments import UsageError
from ghostclip.cli.methods import Settings
from ghostclip.events import SampledGaussian
from ghostclip.validate import nonnegative, open_fraction, positive, positive_int, whole

__all__ = ["DEFAULT_EPOCHS", "DEFAULT_EPSILON", "PlannedRun", "learning_rate", "runs_of", "wants_comparison"]

DEFAULT_EPSILON = 8.0
DEFAULT_EPOCHS, MAX_NORM = 30, 1.0
# The standard deviation that one step's noise may give a weight, before momentum, and the largest rate, both before
# RATE_TIMES.
NOISE_PER_STEP, LARGEST_RATE = 0.002, 0.5
ADAM_RATE = 1e-3
# Times SGD's rate: gates and layers of sigmoids have small gradients at first. Chosen from 1, 2, 3 and 5, for the MLP 8
# and 12, too, on a quarter of the digits' training images, held out, at epsilon 1, 3 and 8.
RATE_TIMES = {"mlp": 5.0, "lstm": 2.0}
# Of networks whose last layer starts at zero, on features of unit norm.
ADAM_RATES = {"oriented": 0.03, "oriented-linear": 0.03}
LOWER_TARGETS = (3.0, 1.0)  # shown beside the target asked for, where that is larger
# Options that training without privacy does not take; beside a private run it has its own of the others, too.
PRIVATE = ("epsilon", "noise_multiplier", "noise", "max_norm", "max_physical_batch_size", "memory_limit", "ledger")
OWN = ("optimizer", "batch_size", "learning_rate")
# Those that another model beside it has of its own.
OF_MODEL = ("epochs", "max_norm", *OWN)


@dataclass(frozen=True)
class Recipe:
    """Full batches of a network with a private mean: so many steps, clipped at ``max_norm``.

    ``rate`` is SGD's for gradients of clipping norm 1. Of the privacy of all releases the private mean has
    ``mean_share``, as one over the square of their noise adds up. The values are from cross-validation inside the
    digits' training part.
    """

    steps: int
    max_norm: float
    rate: float
    mean_share: float

    def mean_noise(self, noise: float, steps: int) -> float:
        """The noise multiplier of the mean beside ``steps`` full batches of noise multiplier ``noise``."""
        return noise * math.sqrt((1.0 - self.mean_share) / (self.mean_share * steps))


# Examples of a full batch that are in memory at once: their maps fit a processor's cache.
PASS_OF_FULL_BATCH = 128
# {model: {epsilon: recipe}} of networks on oriented features; other epsilons take the nearest.
RECIPES = {
    "oriented": {1.0: Recipe(8, 0.25, 28.0, 0.12), 3.0: Recipe(12, 0.2, 42.0, 0.08), 8.0: Recipe(20, 0.2, 60.0, 0.05)},
    "oriented-linear": {
        1.0: Recipe(8, 0.2, 30.0, 0.14), 3.0: Recipe(12, 0.1, 40.0, 0.06), 8.0: Recipe(20, 0.1, 60.0, 0.04)
    },
}  # fmt: skip
# {model: another one that is trained beside it, and its name in tables}
BESIDE = {"oriented": ("oriented-linear", "linear model")}


@dataclass(frozen=True)
class PlannedRun:
    """A run with the name that tables and plots give it, its number of steps, and how long its calibration took."""

    name: str
    settings: Settings
    steps: int
    calibration_seconds: float = 0.0


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
        yield _planned(arguments, examples, "non-private")
        return
    if arguments.noise_multiplier is not None:
        noise = nonnegative(noise_multiplier=arguments.noise_multiplier)
        name = f"private, noise {noise:g}" if noise else "not private, no noise"
        yield _planned(arguments, examples, name, noise)
    else:
        first = positive(epsilon=DEFAULT_EPSILON if arguments.epsilon is None else arguments.epsilon)
        lower = [target for target in LOWER_TARGETS if target < first and wants_comparison(arguments)]
        for target in (first, *lower):
            yield _planned(arguments, examples, f"private, epsilon {target:g}", target=target)
        if wants_comparison(arguments) and arguments.model in BESIDE:
            model, name = BESIDE[arguments.model]
            beside = argparse.Namespace(**vars(arguments) | dict.fromkeys(OF_MODEL) | {"model": model})
            for target in (first, *lower):
                yield _planned(beside, examples, f"{name}, epsilon {target:g}", target=target)
    if wants_comparison(arguments):
        others = dict.fromkeys((*PRIVATE, *OWN)) | {"method": "nonprivate"}
        yield _planned(argparse.Namespace(**vars(arguments) | others), examples, "non-private")


def _check(arguments: argparse.Namespace, examples: int) -> None:
    """Everything that can be told before the first calculation."""
    if arguments.method == "nonprivate":
        for option in PRIVATE:
            if getattr(arguments, option) is not None:
                raise UsageError(f"--method nonprivate takes no --{option.replace('_', '-')}; leave it out")
    if arguments.method in ("nxbp", "multiloss"):
        if arguments.ledger is not None:
            raise UsageError(f"--method {arguments.method} is there for comparison and keeps no --ledger; leave it out")
        if arguments.max_physical_batch_size == "auto":
            raise UsageError(f"--method {arguments.method} takes a number as --max-physical-batch-size; give one")
        if arguments.model in RECIPES:
            needs = f"which --model {arguments.model} needs"
            raise UsageError(f"--method {arguments.method} releases no mean of features, {needs}")
    if arguments.ledger is not None and arguments.compare:
        raise UsageError("the runs beside yours would be charged to the --ledger, too; give it or --compare, not both")
    if arguments.epsilon is not None and arguments.noise_multiplier is not None:
        raise UsageError("give --epsilon or --noise-multiplier, not both: each determines the other")
    if arguments.batch_size is not None and positive_int(batch_size=arguments.batch_size) > examples:
        raise ValueError(f"batch_size must be at most the {examples} training examples; got {arguments.batch_size}")
    if arguments.max_physical_batch_size != "auto":
        if arguments.memory_limit is not None:
            raise UsageError("--memory-limit is for --max-physical-batch-size auto; give both, or leave it out")
        if arguments.max_physical_batch_size is not None:
            positive_int(max_physical_batch_size=arguments.max_physical_batch_size)
    open_fraction(delta=arguments.delta)
    for option in ("max_norm", "learning_rate"):
        if (value := getattr(arguments, option)) is not None:
            positive(**{option: value})
    if whole(seed=arguments.seed) >= 2**63:
        raise ValueError(f"seed must be below 2**63; got {arguments.seed}")


def _planned(
    arguments: argparse.Namespace, examples: int, name: str, noise: float | None = None, target: float | None = None
) -> PlannedRun:
    """A run with that much noise, or the least that meets the target."""
    private = arguments.method != "nonprivate"
    recipe = _recipe(arguments.model, target) if private and arguments.model in RECIPES else None
    usual = 64 if not private else examples if recipe else 512 if examples < 10_000 else 1024
    batch_size = arguments.batch_size or min(usual, examples)
    usual_epochs = DEFAULT_EPOCHS if recipe is None else recipe.steps
    epochs = usual_epochs if arguments.epochs is None else positive_int(epochs=arguments.epochs)
    # The engine's epochs have steps enough to see each example once, as is expected.
    steps = epochs * (max(1, round(examples / batch_size)) if private else -(-examples // batch_size))
    started = time.perf_counter()
    if target is not None:

        def events(noise: float) -> list[SampledGaussian]:
            alone = [SampledGaussian(batch_size / examples, noise, steps)]
            return alone if recipe is None else [*alone, SampledGaussian(1.0, recipe.mean_noise(noise, steps))]

        noise = accounting.noise_for(events, target_epsilon=target, delta=arguments.delta)
    calibration_seconds = time.perf_counter() - started if target is not None else 0.0
    usual_norm = MAX_NORM if recipe is None else recipe.max_norm
    max_norm = positive(max_norm=usual_norm if arguments.max_norm is None else arguments.max_norm)
    optimizer = arguments.optimizer or ("adam" if not private else "sgd" if recipe is None else "nesterov")
    if (rate := arguments.learning_rate) is None:
        rate = learning_rate(optimizer, noise, batch_size, max_norm, ADAM_RATES.get(arguments.model, ADAM_RATE))
        rate = recipe.rate / max_norm if recipe is not None and optimizer == "nesterov" else rate
        rate *= RATE_TIMES.get(arguments.model, 1.0) if private and optimizer == "sgd" else 1.0
    settings = Settings(
        model=arguments.model,
        method=arguments.method,
        epochs=epochs,
        batch_size=batch_size,
        max_physical_batch_size=arguments.max_physical_batch_size or (PASS_OF_FULL_BATCH if recipe else None),
        max_norm=max_norm,
        learning_rate=positive(learning_rate=rate),
        optimizer=optimizer,
        seed=arguments.seed,
        delta=arguments.delta,
        noise_multiplier=noise,
        target_epsilon=target,
        noise=(arguments.noise or "standard") if private else None,
        ledger=arguments.ledger,
        memory_limit=arguments.memory_limit,
        mean_noise=None if recipe is None or noise is None else recipe.mean_noise(noise, steps),
    )
    return PlannedRun(name, settings, steps, calibration_seconds)


def _recipe(model: str, target: float | None) -> Recipe:
    """The one whose epsilon is nearest."""
    target, recipes = DEFAULT_EPSILON if target is None else target, RECIPES[model]
    return recipes[min(recipes, key=lambda epsilon: abs(math.log(epsilon / target)))]


def learning_rate(
    optimizer: str, noise: float | None, batch_size: int, max_norm: float, adam: float = ADAM_RATE
) -> float:
    """The default rate: Adam's own, which noise does not change much, or for SGD what keeps a step's noise the same.

    A step of SGD moves each weight by noise of standard deviation ``rate * noise * max_norm / batch_size``.
    """
    if optimizer.startswith("adam") or noise is None:
        return adam if optimizer.startswith("adam") else 0.05
    if noise == 0:
        return LARGEST_RATE / max_norm
    return min(LARGEST_RATE, NOISE_PER_STEP * batch_size / noise) / max_norm
