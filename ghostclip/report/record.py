"""What a report tells, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["NormSnapshot", "PrivacyCurve", "Record", "RunGroup", "TrainingRun", "grouped", "plain"]


@dataclass(frozen=True)
class TrainingRun:
    """One trained model.

    Attributes:
        name: as tables and legends call it; runs that differ in their seed alone have the same one.
        method: "nonprivate", "nxbp", "multiloss", "auto", "cached" or "reweight".
        accuracy: share of the test examples it classifies correctly.
        epochs: passes over the training data (expected ones, where batches are sampled).
        steps: optimizer steps taken.
        seconds: wall time of training, without evaluation, calibration and compilation.
        examples_per_second: examples that went through training, over those seconds.
        noise_multiplier: None without noise.
        epsilons: {accountant: epsilon}; empty for non-private training.
        losses: mean training loss of each step's batch; private data.
        noise: the mode the noise was made in, "standard", "hardened" or "test"; None without noise.
        optimizer, learning_rate, batch_size: what the runs of a report may differ in; None where that isn't told.
        seed: of the initial weights; None where that isn't told.
        accuracies: the same share after each epoch; NaN where it is not known, empty where nothing is.
        calibration_seconds: that finding the noise for a target took; 0 in all but one of the runs of a name.
        compilation_seconds: that training waited for the C compiler.
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


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in their seed alone, one or more, the first one first."""

    runs: Sequence[TrainingRun]

    @property
    def first(self) -> TrainingRun:
        """The run that stands for what all have in common."""
        return self.runs[0]

    @property
    def accuracies(self) -> list[float]:
        """The runs' accuracies at the end of training."""
        return [run.accuracy for run in self.runs]

    def mean(self, name: str) -> float:
        """The mean of an attribute over the runs."""
        return self.total(name) / len(self.runs)

    def total(self, name: str) -> float:
        """The sum of an attribute over the runs."""
        return float(sum(getattr(run, name) for run in self.runs))


@dataclass(frozen=True)
class PrivacyCurve:
    """Epsilon at ``delta`` after so many steps, by accountant.

    Attributes:
        target: what noise was calibrated to.
        forecast_steps, forecasts: the same as ``steps`` and ``epsilons``, from the last step taken on, if training went
            on as before; empty where that isn't known.
    """

    steps: Sequence[int]
    epsilons: Mapping[str, Sequence[float]]
    delta: float
    target: float | None = None
    forecast_steps: Sequence[int] = ()
    forecasts: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class NormSnapshot:
    """Per-example gradient norms at the end of training and the clipping norm; private data."""

    norms: Sequence[float]
    max_norm: float

    @property
    def clipped(self) -> float:
        """Share of the examples whose norm is above ``max_norm``, or is not finite."""
        above = [norm for norm in self.norms if not norm <= self.max_norm]
        return len(above) / len(self.norms) if self.norms else 0.0


@dataclass(frozen=True)
class Record:
    """Everything a report is written from.

    Attributes:
        title: of the page.
        settings: what was asked for, by name.
        runs: the trained models, the main one first.
        speeds: {method: examples a second} of training steps, measured in turns on this machine.
        speed_batch_size: examples in the batch they were measured on.
        privacy: how epsilon grew in the main run; None when it was not private.
        norms: the main run's per-example norms; None when it was not private.
        machine: {fact: value} about where it ran.
        versions: {program: version} of what it ran with.
        command: that made the report; None where that isn't told.
        date: when; None where that isn't told.
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


def grouped(runs: Sequence[TrainingRun]) -> list[RunGroup]:
    """The runs by their names, in the order in which these first come."""
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
