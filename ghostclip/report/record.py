"""What a report tells, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["NormSnapshot", "PrivacyCurve", "Record", "RunGroup", "ShownExample", "TrainingRun", "grouped", "plain"]


@dataclass(frozen=True)
class TrainingRun:
    """One trained model.

    Attributes:
        name: in tables and legends; runs that differ in their seed alone have the same name.
        method: "nonprivate", "nxbp", "multiloss", "auto", "cached" or "reweight".
        accuracy: share of the test examples it classifies correctly.
        epochs: passes over the training data (expected ones, where batches are sampled).
        steps: optimizer steps taken.
        seconds: wall time of training, without evaluation, calibration and compilation.
        examples_per_second: expected examples of all steps over those seconds; how many were drawn is private.
        noise_multiplier: None without noise.
        epsilons: {accountant: epsilon}; empty for non-private training.
        losses: mean training loss of each step's batch; private data.
        noise: the mode the noise was made in, "standard", "hardened" or "test"; None without noise.
        optimizer, learning_rate, batch_size: settings in which the runs of a report may differ; None: not shown.
        seed: of the initial weights; None: not shown.
        accuracies: accuracy after each epoch; NaN for an epoch without evaluation, empty for none.
        calibration_seconds: time to find the noise for a target; 0 in all runs of a name but the first.
        compilation_seconds: time for which training waited for the C compiler.
        model: the network; None: the one that the report is about.
        generator: where the noise's random numbers came from, in words; "" without noise.
        confusion: K rows of K numbers of test examples: those of a class, by their predicted class; empty: not counted.
    """

    name: str
    method: str
    accuracy: float
    epochs: int
    steps: int
    seconds: float
    examples_per_second: float
    noise_multiplier: float | None = None
    epsilons: Mapping[str, float] = field(default_factory=dict)
    losses: Sequence[float] = ()
    noise: str | None = None
    optimizer: str | None = None
    learning_rate: float | None = None
    batch_size: int | None = None
    seed: int | None = None
    accuracies: Sequence[float] = ()
    calibration_seconds: float = 0.0
    compilation_seconds: float = 0.0
    generator: str = ""
    model: str | None = None
    confusion: Sequence[Sequence[int]] = ()


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in their seed alone.

    Attributes:
        runs: one or more, in order.
    """

    runs: Sequence[TrainingRun]

    @property
    def first(self) -> TrainingRun:
        """The first run, from which a report takes what all runs have in common."""
        return self.runs[0]

    @property
    def accuracies(self) -> list[float]:
        """Each run's accuracy at the end of training."""
        return [run.accuracy for run in self.runs]

    @property
    def confusion(self) -> list[list[int]]:
        """The sum of the runs' tables of classes; empty where one has none."""
        tables = [run.confusion for run in self.runs]
        return (
            [[sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*tables, strict=True)]
            if all(tables)
            else []
        )

    def mean(self, name: str) -> float:
        """The mean over the runs of their attribute ``name``, a number."""
        return self.total(name) / len(self.runs)

    def total(self, name: str) -> float:
        """The sum over the runs of their attribute ``name``, a number."""
        return float(sum(getattr(run, name) for run in self.runs))


@dataclass(frozen=True)
class PrivacyCurve:
    """How epsilon grew during training, by accountant.

    Attributes:
        steps: S numbers of steps taken.
        epsilons: {accountant: S epsilons at ``delta``, one after each number of steps}.
        delta: of the guarantee.
        target: the epsilon that noise was calibrated to; None for noise that was given.
        advantage: the largest one of a membership attack on the model, `ghostclip.accounting.Risk`; None: not known.
        true_positive_rates: {false-positive rate: the largest true-positive rate of such an attack}.
        forecast_steps, forecasts: like ``steps`` and ``epsilons``, from the last step on, if training goes on with the
            same settings; empty: not known.
    """

    steps: Sequence[int]
    epsilons: Mapping[str, Sequence[float]]
    delta: float
    target: float | None = None
    advantage: float | None = None
    true_positive_rates: Mapping[float, float] = field(default_factory=dict)
    forecast_steps: Sequence[int] = ()
    forecasts: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class NormSnapshot:
    """Norms of the examples' gradients at the end of training. They are private data.

    Attributes:
        norms: one per example, before clipping.
        max_norm: the clipping norm.
    """

    norms: Sequence[float]
    max_norm: float

    @property
    def clipped(self) -> float:
        """Share of the examples whose norm is above ``max_norm``, or is not finite."""
        above = [norm for norm in self.norms if not norm <= self.max_norm]
        return len(above) / len(self.norms) if self.norms else 0.0


@dataclass(frozen=True)
class ShownExample:
    """A public test image and what the trainings take it for.

    Attributes:
        pixels: H rows of W shares of white, in [0, 1].
        label: its class.
        predicted: {training: class by its first run's model}.
    """

    pixels: Sequence[Sequence[float]]
    label: int
    predicted: Mapping[str, int]


@dataclass(frozen=True)
class Record:
    """The data of a report.

    Attributes:
        title: of the page.
        settings: {name: value} of the main run.
        runs: the trained models, the main one first.
        speeds: {method: examples a second} of training steps that took turns on one machine.
        speed_batch_size: examples in the batch of these steps.
        privacy: how epsilon grew in the main run; None if it was not private.
        norms: the main run's per-example norms; None if it was not private.
        machine: {fact: value} about the machine.
        versions: {program: version}.
        command: the command line that made the report; None: not shown.
        date: of the report; None: not shown.
        shown: test images, for the page alone.
        weights: file beside the page that has the first run's weights; None: they weren't saved.
    """

    title: str
    settings: Mapping[str, str | int | float | None]
    runs: Sequence[TrainingRun]
    speeds: Mapping[str, float] = field(default_factory=dict)
    speed_batch_size: int = 0
    privacy: PrivacyCurve | None = None
    norms: NormSnapshot | None = None
    machine: Mapping[str, str | int | float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    command: str | None = None
    date: str | None = None
    shown: Sequence[ShownExample] = ()
    weights: str | None = None


def grouped(runs: Sequence[TrainingRun]) -> list[RunGroup]:
    """Groups runs of the same name, in the order of each name's first run."""
    names = dict.fromkeys(run.name for run in runs)
    return [RunGroup([run for run in runs if run.name == name]) for name in names]


def plain(value: Any) -> Any:
    """``value`` with mappings and sequences as dicts and lists, and infinities and NaN as text, as JSON needs it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    return value
