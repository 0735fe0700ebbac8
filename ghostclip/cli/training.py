"""One training run by any of the paper's methods: model, steps, accuracy, privacy spent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ghostclip import GhostClipper, models
from ghostclip.accounting import ACCOUNTANTS
from ghostclip.cli.keeping import History, Keeping
from ghostclip.cli.methods import METHODS, Ghost, Settings, Steps, cross_entropy
from ghostclip.datasets import Data
from ghostclip.report import PrivacyCurve, TrainingRun

__all__ = ["Outcome", "Watch", "accuracy", "build", "norms_of", "train"]

EVALUATION_BATCH = 512

# Called after each step with its mean loss and the epsilon last computed (None before the first, or without privacy).
Watch = Callable[[float, "float | None"], None]


@dataclass(frozen=True)
class Outcome:
    """A trained model with its figures.

    Attributes:
        curve: epsilon at the steps where it was computed; None where nothing bounds it.
        limit: the most examples that were in memory at once; None: no limit.
    """

    model: nn.Module
    run: TrainingRun
    curve: PrivacyCurve | None
    limit: int | None


def build(name: str, data: Data, seed: int) -> nn.Module:
    """The network for the data set, its first weights drawn from ``seed``; torch's generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return models.build(name, data.input_shape, data.classes, data.vocabulary)


def train(
    settings: Settings,
    data: Data,
    name: str,
    watch: Watch,
    marks: Sequence[int] = (),
    keeping: Keeping | None = None,
) -> Outcome:
    """Trains once and evaluates on the test part.

    Args:
        settings: what to train and how.
        data: both parts.
        name: of the run, for tables and plots.
        watch: told of every step.
        marks: steps after which epsilon is computed by PLD, for ``watch`` and the curve.
        keeping: of checkpoints, for the methods that are engines.

    Raises:
        ValueError, GhostClipError: settings the method or the model does not take, or a checkpoint that does not fit.
        OSError: a checkpoint can't be written or read.
    """
    model = build(settings.model, data, settings.seed)
    steps, seen = METHODS[settings.method](settings, model, data.train), History()
    private = settings.noise_multiplier is not None
    kept = keeping.kept(steps, seen) if keeping and isinstance(steps, Ghost) else nullcontext(lambda: None)
    with kept as after_step:
        for loss in seen.losses:
            watch(loss, None)
        _take(steps, seen, watch, marks if private else (), after_step)
    run = TrainingRun(
        name=name,
        method=settings.method,
        accuracy=accuracy(model, data.test),
        epochs=settings.epochs,
        steps=len(seen.losses),
        seconds=seen.seconds,
        examples_per_second=seen.examples / seen.seconds if seen.seconds else 0.0,
        noise_multiplier=settings.noise_multiplier,
        noise=settings.noise if settings.noise_multiplier else None,
        epsilons={key.upper(): steps.epsilon(key) for key in ACCOUNTANTS} if private else {},
        losses=seen.losses,
        optimizer=settings.optimizer,
        learning_rate=settings.learning_rate,
        batch_size=settings.batch_size,
    )
    return Outcome(model, run, _curve(settings, marks, seen.epsilons), steps.limit)


def _take(steps: Steps, seen: History, watch: Watch, marks: Sequence[int], after_step: Callable[[], None]) -> None:
    """All steps that are left."""
    started = time.perf_counter()
    for losses in steps:
        loss = float(losses.mean())
        seen.seconds += time.perf_counter() - started
        seen.losses.append(loss)
        seen.examples += len(losses)
        if len(seen.losses) in marks:
            for accountant, values in seen.epsilons.items():
                values.append(steps.epsilon(accountant))
        watch(loss, seen.epsilons["pld"][-1] if seen.epsilons["pld"] else None)
        after_step()
        started = time.perf_counter()


def _curve(settings: Settings, marks: Sequence[int], epsilons: dict[str, list[float]]) -> PrivacyCurve | None:
    """Epsilon at the marks, from nothing spent at step 0; None unless it is known and finite at all of them."""
    known = [value for values in epsilons.values() for value in values if math.isfinite(value)]
    if not known or len(known) != len(epsilons) * len(marks):
        return None
    return PrivacyCurve(
        steps=[0, *marks],
        epsilons={name.upper(): [0.0, *values] for name, values in epsilons.items()},
        delta=settings.delta,
        target=settings.target_epsilon,
    )


@torch.no_grad()
def accuracy(model: nn.Module, examples: TensorDataset) -> float:
    """Share of the examples the model classifies correctly; the model is left in the mode it was in."""
    training = model.training
    model.eval()
    correct = sum(
        int((model(inputs).argmax(1) == labels).sum())
        for inputs, labels in DataLoader(examples, batch_size=EVALUATION_BATCH)
    )
    model.train(training)
    return correct / len(examples)


def norms_of(outcome: Outcome, examples: TensorDataset, max_norm: float) -> list[float]:
    """Every training example's gradient norm under the trained model; private data."""
    clipper = GhostClipper(outcome.model, max_norm)
    batches = DataLoader(examples, batch_size=min(EVALUATION_BATCH, outcome.limit or EVALUATION_BATCH))
    return torch.cat([clipper.norms(cross_entropy(outcome.model, batch)) for batch in batches]).tolist()
