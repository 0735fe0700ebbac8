"""What is planned before training: how many steps, and for each its noise, batch size, thresholds and charge."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ghostclip import accounting
from ghostclip.clipping import Schedule, Stage
from ghostclip.engine.adaptation import step_event
from ghostclip.engine.before import Before
from ghostclip.engine.correlation import ChosenCorrelation, chosen_correlation
from ghostclip.events import Event, within
from ghostclip.noise import Correlation
from ghostclip.sampling import CyclicPoisson, LogicalBatches, Scheme
from ghostclip.validate import nonnegative, open_fraction, positive, positive_int

__all__ = ["MOST", "StepPlan", "StepSettings", "new_name"]

# More steps than anyone takes.
MOST = 10**6


@dataclass(frozen=True)
class StepSettings:
    """What holds for one step.

    Attributes:
        batch_size: what the noisy sum is divided by; public.
        event: what the step is charged as, with a count of 1.
        threshold_factor: the thresholds over the policy's.
        left: how many steps have these settings from this one on.
    """

    noise_multiplier: float
    batch_size: int
    event: Event
    threshold_factor: float = 1.0
    left: int = MOST


class StepPlan:
    """The settings of every step, by its number among the steps of the model.

    Arguments are those of `PrivacyEngine`, with ``length`` for (epochs, steps). The noise is the one that was given, or
    the least noise for the target by PLD.

    Args:
        policy: of clipping, as `policy_for` returns it.
        before: what was released before, which the noise is calibrated with, and whether noise is private. Noise that
            can be foretold protects no one: it is charged as none.

    Attributes:
        noise_multiplier: which a schedule multiplies; 0: none.
        planned_steps: the most steps that may be taken; None: no limit was agreed.
        target_epsilon: what those steps spend at most; None with ``planned_steps``.
        events: what the planned steps are charged as, with their counts; without a plan counts don't matter.
        correlation: of the noise; None: steps are independent.
        mechanism: a random name: steps add up to turns of a unit under one name only.
        began: the number of the mechanism's first step.

    Raises:
        TypeError: it is no schedule.
        ValueError: arguments don't go together or are out of range, or no noise reaches the target.
    """

    def __init__(
        self, schedule: Schedule | None, loader: LogicalBatches, policy: Any, noise_multiplier: float | None,
        target_epsilon: float | None, target_delta: float, length: tuple[int | None, int | None],
        correlation: Correlation | None, before: Before,
    ) -> None:  # fmt: skip
        if not isinstance(schedule, Schedule | None):
            raise TypeError(f"schedule must be a ghostclip.clipping.Schedule; got {schedule!r}")
        if schedule is not None and isinstance(loader.scheme, CyclicPoisson):
            raise ValueError(
                'schedule and sampling="cyclic" or "cyclic_poisson" don\'t go together: the steps of a stage are no '
                'whole number of turns; leave the schedule out, or take sampling="poisson"'
            )
        self._given = schedule
        self.correlation: ChosenCorrelation | None = None
        self._schedule = Schedule([Stage(1)]) if schedule is None else schedule
        self._policy, self._steps_an_epoch, self.before = policy, len(loader), before
        self.target_delta = open_fraction(target_delta=target_delta)
        if correlation is not None:
            self.correlation = chosen_correlation(
                correlation, loader, self._planned(length), target_epsilon, self.target_delta, before.planned
            )
        sizes = [stage.batch_size or loader.batch_size for stage in self._schedule.stages]
        self._schemes = [loader.scheme_of(size) for size in sizes]
        self._fields = self._turn_fields(loader.scheme)
        self.mechanism, self.began = new_name(), 0
        self._plan(noise_multiplier, target_epsilon, length)
        self.rename(0, self.mechanism)

    def _turn_fields(self, scheme: Scheme) -> dict[str, Any]:
        """What events say of the noise, where units take turns."""
        if self.correlation is None or not isinstance(scheme, CyclicPoisson) or not self.correlation.matrix.buffers:
            return {}
        matrix, steps = self.correlation.matrix, self.correlation.steps
        return {"correlation": repr(matrix), "sensitivity": matrix.turn_sensitivity(steps, scheme.separation)}

    def rename(self, began: int, name: str) -> None:
        """From now on steps are of the mechanism of that name, whose first step has the number ``began``."""
        self.began, self.mechanism = began, name
        noise = self.noise_multiplier
        self.events = self._events(noise if self.before.private else 0.0)
        self._settings = [
            StepSettings(noise * stage.noise_factor, scheme.batch_size, replace(event, count=1), stage.threshold_factor)
            for stage, scheme, event in zip(self._schedule.stages, self._schemes, self.events, strict=True)
        ]

    def scheme(self, step: int) -> Scheme:
        """How the batch of a step is drawn."""
        return self._schemes[self._schedule.at(step)[0]]

    @property
    def largest(self) -> int:
        """About the most units in a batch of any step."""
        return max(scheme.largest for scheme in self._schemes)

    def _plan(
        self, noise_multiplier: float | None, target_epsilon: float | None, length: tuple[int | None, int | None]
    ) -> None:
        """Finds the noise, and the number of steps it is calibrated for."""
        if (noise_multiplier is None) == (target_epsilon is None):
            raise ValueError(
                "give either noise_multiplier, or target_epsilon with epochs (or steps) to have it calibrated; got "
                + ("neither" if noise_multiplier is None else "both")
            )
        self.planned_steps: int | None = None
        self.target_epsilon = target_epsilon
        self.before.check_like(self._events(1.0)[0])
        if noise_multiplier is not None:
            if self.correlation is not None:
                self.planned_steps = self.correlation.steps
            elif length != (None, None):
                raise ValueError(
                    "epochs and steps say what target_epsilon is to be calibrated for; leave them out with "
                    "noise_multiplier, and stop when you like (an epoch has len(engine.batches()) steps)"
                )
            self.noise_multiplier = nonnegative(noise_multiplier=noise_multiplier)
            return
        self.planned_steps = self._planned(length)
        self.target_epsilon = positive(target_epsilon=target_epsilon)
        self.before.check_target(self.target_epsilon, self.target_delta)
        self.noise_multiplier = accounting.noise_for(
            lambda noise: [*self.before.planned, *self._events(noise)],
            target_epsilon=self.target_epsilon,
            delta=self.target_delta,
        )

    def _planned(self, length: tuple[int | None, int | None]) -> int:
        """How many steps there will be."""
        epochs, steps = length
        if self._given is not None:
            if epochs is not None or steps is not None:
                raise ValueError("a schedule has the number of steps; leave epochs and steps out")
            return self._given.steps
        if (epochs is None) == (steps is None):
            raise ValueError(
                "target_epsilon, or correlation, needs the length of training: give either epochs or steps; got "
                + ("neither" if epochs is None else "both")
            )
        return positive_int(steps=steps) if epochs is None else positive_int(epochs=epochs) * self._steps_an_epoch

    def _events(self, noise_multiplier: float) -> list[Event]:
        """What all stages are charged as; without a plan with the counts of the stages."""
        stages = self._schedule.stages
        counts = [stage.steps for stage in stages]
        if self.planned_steps is not None:
            counts[-1] += self.planned_steps - sum(counts)
        factors = [stage.noise_factor for stage in stages]
        return [
            replace(
                within(step_event(scheme, self._policy, factor * noise_multiplier), self.mechanism, **self._fields),
                count=count,
            )
            for scheme, factor, count in zip(self._schemes, factors, counts, strict=True)
        ]

    def at(self, step: int) -> StepSettings:
        """The settings of a step, from 0."""
        number, left = self._schedule.at(step)
        return self._settings[number] if left is None else replace(self._settings[number], left=left)

    def further(self, done: int, steps: int) -> Sequence[Event]:
        """What ``steps`` steps after the first ``done`` are charged as."""
        found = []
        while steps:
            settings = self.at(done)
            count = min(steps, settings.left)
            found.append(replace(settings.event, count=count))
            done, steps = done + count, steps - count
        return found


def new_name() -> str:
    """A name that no other mechanism has."""
    return secrets.token_hex(8)
