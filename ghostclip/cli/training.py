"""One training run by any of the paper's methods: model, steps, checkpoints, accuracy, privacy spent."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ghostclip import GhostClipper, models
from ghostclip.accounting import ACCOUNTANTS, FALSE_POSITIVE_RATES, Risk, epsilon_of
from ghostclip.cli.arguments import UsageError
from ghostclip.cli.methods import METHODS, Ghost, Settings, Steps, cross_entropy
from ghostclip.cli.progress import bar
from ghostclip.datasets import Data
from ghostclip.native import seconds_compiling
from ghostclip.report import PrivacyCurve, TrainingRun

__all__ = ["Keeping", "Outcome", "Watch", "build", "norms_of", "predicted", "train"]

EVALUATION_BATCH = 512

log = logging.getLogger("ghostclip")

# Called after each step with its mean loss and the epsilon last computed (None before the first, or without privacy).
Watch = Callable[[float, "float | None"], None]


@dataclass(frozen=True)
class Outcome:
    """A trained model with its figures.

    Attributes:
        settings: what it was trained by.
        curve: epsilon at the steps where it was computed; None where nothing bounds it.
        limit: the most examples that were in memory at once; None: no limit.
    """

    settings: Settings
    model: nn.Module
    run: TrainingRun
    curve: PrivacyCurve | None
    limit: int | None


@dataclass
class History:
    """What a run has seen so far, for its report; private data.

    Attributes:
        losses: the mean training loss of each step.
        seconds: of training.
        compilation_seconds: that the steps waited for the C compiler; not among ``seconds``.
        accuracies: on the test examples after each epoch; NaN where it was not computed.
        epsilons: {accountant: epsilon at each mark so far}.
        options: {option: value} of the command, which a run that goes on must have again: its optimizer is restored,
            and its first weights were drawn.

    Raises:
        UsageError: from `load_state_dict`, where an option is another one than when the run was begun.
    """

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    compilation_seconds: float = 0.0
    accuracies: list[float] = field(default_factory=list)
    epsilons: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in ACCOUNTANTS})
    options: dict[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, whose private part it is in."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes it back; raises UsageError where the run was begun with other options."""
        for option, value in state["options"].items():
            if self.options.get(option) != value:
                raise UsageError(
                    f"--resume goes on with the run as it was begun, with {option} {value}; got "
                    f"{self.options.get(option)}. Give {option} {value}, or start another run in another folder"
                )
        vars(self).update(state)


@dataclass(frozen=True)
class Keeping:
    """Keeps a run's checkpoints.

    Attributes:
        path: where the last one is.
        every: steps between two; None: one after each epoch.
        resume: go on from what is there.
    """

    path: Path
    every: int | None
    resume: bool

    @contextmanager
    def kept(self, steps: Ghost, history: History) -> Iterator[Callable[[], None]]:
        """Goes on from the checkpoint, where that was asked for; gives what to call after each step."""
        if self.resume:
            found = steps.engine.restore(self.path, extra={"history": history})
            steps.first_epoch = found.epoch
            # A step that was interrupted after its release and before it was noted down.
            history.losses += [math.nan] * (found.steps - len(history.losses))
        every = self.every or len(steps.engine.batches())

        def after_step() -> None:
            if len(history.losses) % every == 0:
                steps.engine.save(self.path, extra={"history": history})

        try:
            yield after_step
        finally:
            # However it ended: at the last step, by Ctrl-C, or by an error, after which nothing half done is stored.
            steps.engine.save(self.path, extra={"history": history})


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
    epoch: int | None = None,
) -> Outcome:
    """Trains once and evaluates on the test part, after each epoch of so many steps too, or at the end only.

    ``watch`` is told of every step, and of epsilon, which is computed after the steps at the ``marks``. Checkpoints are
    kept for the methods that are engines.
    """
    model = build(settings.model, data, settings.seed)
    # Where a run goes on, its mean was released, and is in the checkpoint.
    resumes = keeping is not None and keeping.resume  # it goes on to its planned steps
    to_take = replace(settings, mean_noise=None, target_epsilon=None) if resumes else settings
    options = {"--learning-rate": settings.learning_rate, "--seed": settings.seed}
    steps, seen = METHODS[settings.method](to_take, model, data.train), History(options=options)
    private = settings.noise_multiplier is not None
    kept = keeping.kept(steps, seen) if keeping and isinstance(steps, Ghost) else nullcontext(lambda: None)
    with kept as after_step:
        taken = len(seen.losses)
        for loss in seen.losses:
            watch(loss, None)
        _take(steps, seen, watch, marks if private else (), epoch, partial(accuracy, model, data.test), after_step)
    if keeping and keeping.resume and len(seen.losses) == taken:
        log.info(
            "the run at %s had ended: nothing was trained, and the figures are those of its %d steps",
            keeping.path,
            taken,
        )
    run = TrainingRun(
        name=name,
        method=settings.method,
        accuracy=accuracy(model, data.test),
        epochs=settings.epochs,
        steps=len(seen.losses),
        seconds=seen.seconds,
        # Not as many as were drawn: the report shows it, and true sizes of Poisson samples are private.
        examples_per_second=settings.batch_size * len(seen.losses) / seen.seconds if seen.seconds else 0.0,
        noise_multiplier=settings.noise_multiplier,
        noise=settings.noise if settings.noise_multiplier else None,
        epsilons={key.upper(): steps.epsilon(key) for key in ACCOUNTANTS} if private else {},
        losses=seen.losses,
        optimizer=settings.optimizer,
        learning_rate=settings.learning_rate,
        batch_size=settings.batch_size,
        seed=settings.seed,
        model=settings.model,
        accuracies=seen.accuracies,
        compilation_seconds=seen.compilation_seconds,
        generator=steps.generator if settings.noise_multiplier else "",
    )
    curve = _curve(settings, marks, seen.epsilons, steps.risk)
    return Outcome(settings, model, run, curve, steps.limit)


def _take(
    steps: Steps,
    seen: History,
    watch: Watch,
    marks: Sequence[int],
    epoch: int | None,
    evaluate: Callable[[], float],
    after_step: Callable[[], None],
) -> None:
    """All steps that are left, with an accuracy after each epoch where ``epoch`` says how many steps it has."""
    started, compiled = time.perf_counter(), seconds_compiling()
    for losses in steps:
        loss = float(losses.mean())
        compilation = seconds_compiling() - compiled
        seen.compilation_seconds += compilation
        seen.seconds += time.perf_counter() - started - compilation
        seen.losses.append(loss)
        if len(seen.losses) in marks:
            for accountant, values in seen.epsilons.items():
                values.append(steps.epsilon(accountant))
        watch(loss, seen.epsilons["pld"][-1] if seen.epsilons["pld"] else None)
        if epoch and len(seen.losses) % epoch == 0:
            seen.accuracies += [math.nan] * (len(seen.losses) // epoch - 1 - len(seen.accuracies))
            seen.accuracies.append(evaluate())
        after_step()
        started, compiled = time.perf_counter(), seconds_compiling()


def _curve(
    settings: Settings, marks: Sequence[int], epsilons: dict[str, list[float]], risk: Callable[[], Risk | None]
) -> PrivacyCurve | None:
    """Epsilon at the marks, from what was spent before step 1; None unless it is known and finite at all of them."""
    known = [value for values in epsilons.values() for value in values if math.isfinite(value)]
    if not known or len(known) != len(epsilons) * len(marks):
        return None
    bound = risk()
    first = {name: epsilon_of(settings.before, delta=settings.delta, accountant=name) for name in epsilons}
    return PrivacyCurve(
        steps=[0, *marks],
        epsilons={name.upper(): [first[name], *values] for name, values in epsilons.items()},
        delta=settings.delta,
        target=settings.target_epsilon,
        advantage=bound.advantage if bound else None,
        true_positive_rates={rate: bound.true_positive_rate(rate) for rate in FALSE_POSITIVE_RATES} if bound else {},
    )


@torch.no_grad()
def predicted(model: nn.Module, examples: TensorDataset) -> Tensor:
    """The likeliest class [N] of each example by ``model``, which is left in the mode it was in."""
    training = model.training
    model.eval()
    batches = DataLoader(examples, batch_size=EVALUATION_BATCH)
    classes = torch.cat([model(inputs).argmax(1) for inputs, _ in batches])
    model.train(training)
    return classes


def accuracy(model: nn.Module, examples: TensorDataset) -> float:
    """Share of the examples that ``model`` classifies correctly."""
    return float((predicted(model, examples) == examples.tensors[1]).sum()) / len(examples)


def norms_of(outcome: Outcome, examples: TensorDataset) -> list[float]:
    """Every training example's gradient norm under the trained model, under a bar; private data."""
    clipper = GhostClipper(outcome.model, outcome.settings.max_norm)
    batches = DataLoader(examples, batch_size=min(EVALUATION_BATCH, outcome.limit or EVALUATION_BATCH))
    found: list[float] = []
    with bar("gradient norms", len(batches), "batch") as advance:
        for batch in batches:
            found += clipper.norms(cross_entropy(outcome.model, batch)).tolist()
            advance()
    return found
