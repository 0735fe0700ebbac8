"""One training run by any of the paper's methods: model, steps, accuracy, privacy spent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ghostclip import GhostClipper, models
from ghostclip.accounting import ACCOUNTANTS
from ghostclip.cli.keeping import History, Keeping
from ghostclip.cli.methods import Ghost, Settings, Steps, cross_entropy, steps_of
from ghostclip.datasets import Data
from ghostclip.report import PrivacyCurve, TrainingRun

__all__ = ["Outcome", "Watch", "accuracy", "build", "norms_of", "train"]

EVALUATION_BATCH = 512

# Called after each step with its mean loss and the epsilon last computed (None before the first, or without privacy).
Watch = Callable[[float, "float | None"], None]


@dataclass(frozen=True)
class Outcome:
    """A trained model with its figures; ``curve`` holds epsilon at the steps where it was computed."""

    model: nn.Module
    run: TrainingRun
    curve: PrivacyCurve | None


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
    steps = steps_of(settings, model, data.train)
    seen = History()
    if keeping is not None and isinstance(steps, Ghost):
        keeping.start(steps, seen)
        for loss in seen.losses:
            watch(loss, None)
        try:
            _take(steps, seen, watch, marks, lambda: keeping.after_step(steps, seen))
        finally:
            # However it ended: at the last step, by Ctrl-C, or by an error, after which nothing half done is stored.
            keeping.save(steps, seen)
    else:
        _take(steps, seen, watch, marks, lambda: None)
    return _outcome(settings, data, name, marks, model, steps, seen)


def _take(steps: Steps, seen: History, watch: Watch, marks: Sequence[int], after_step: Callable[[], None]) -> None:
    """All steps that are left."""
    iterator, started = iter(steps), time.perf_counter()
    while (step := next(iterator, None)) is not None:
        seen.seconds += time.perf_counter() - started
        seen.losses.append(step.loss)
        seen.examples += step.examples
        if steps.private and len(seen.losses) in marks:
            for accountant, values in seen.epsilons.items():
                values.append(steps.epsilon(accountant))
        watch(step.loss, seen.epsilons["pld"][-1] if seen.epsilons["pld"] else None)
        after_step()
        started = time.perf_counter()


def _outcome(
    settings: Settings, data: Data, name: str, marks: Sequence[int], model: nn.Module, steps: Steps, seen: History
) -> Outcome:
    """The figures of a run that is over."""
    curve = seen.epsilons
    run = TrainingRun(
        name=name,
        method=settings.method,
        accuracy=accuracy(model, data.test),
        epochs=settings.epochs,
        steps=len(seen.losses),
        seconds=seen.seconds,
        examples_per_second=seen.examples / seen.seconds if seen.seconds else 0.0,
        noise_multiplier=steps.noise_multiplier,
        noise=settings.noise if steps.noise_multiplier else None,
        epsilons={key.upper(): steps.epsilon(key) for key in ACCOUNTANTS} if steps.private else {},
        losses=seen.losses,
        optimizer=settings.optimizer,
        learning_rate=settings.learning_rate,
        batch_size=settings.batch_size,
    )
    bounded = len(curve["pld"]) == len(marks) > 0 and all(
        math.isfinite(value) for values in curve.values() for value in values
    )
    return Outcome(model, run, _curve(settings, marks, curve) if bounded else None)


def _curve(settings: Settings, marks: Sequence[int], epsilons: dict[str, list[float]]) -> PrivacyCurve:
    """Epsilon at the marks, from nothing spent at step 0."""
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


def norms_of(model: nn.Module, examples: TensorDataset, settings: Settings) -> list[float]:
    """Every training example's gradient norm under the model; private data."""
    clipper = GhostClipper(model, settings.max_norm)
    batch_size = min(EVALUATION_BATCH, settings.max_physical_batch_size or EVALUATION_BATCH)
    norms: list[float] = []
    for batch in DataLoader(examples, batch_size=batch_size):
        norms += clipper.norms(cross_entropy(model, batch)).tolist()
    return norms
