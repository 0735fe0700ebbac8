"""The terms of a step: its noise, its batch size, its thresholds, and what it is charged as; by the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ghostclip.clipping import Schedule, Stage
from ghostclip.engine.adaptation import step_event
from ghostclip.engine.plan import Plan
from ghostclip.events import Event
from ghostclip.sampling import LogicalBatches, Scheme

__all__ = ["MOST", "StepTerms", "Terms"]

# More steps than anyone takes.
MOST = 10**6


@dataclass(frozen=True)
class Terms:
    """What holds for one step.

    Attributes:
        noise_multiplier: standard deviation of the noise over the sensitivity.
        batch_size: what the noisy sum is divided by; public.
        event: what the step is charged as, with a count of 1.
        threshold_factor: the thresholds over the policy's.
        left: how many steps have these terms from this one on.
    """

    noise_multiplier: float
    batch_size: int
    event: Event
    threshold_factor: float = 1.0
    left: int = MOST


class StepTerms:
    """Terms of every step, by its number among the steps of the model.

    Args:
        schedule: None: all steps are alike.
        loader: whose samples they are.
        policy: of clipping, as `policy_for` returns it.

    Raises:
        TypeError: it is no schedule.
        ValueError: a batch size of the schedule is out of range for the data.
    """

    def __init__(self, schedule: Schedule | None, loader: LogicalBatches, policy: Any) -> None:
        if not isinstance(schedule, Schedule | None):
            raise TypeError(f"schedule must be a ghostclip.clipping.Schedule; got {schedule!r}")
        self._schedule = Schedule([Stage(1)]) if schedule is None else schedule
        self._policy = policy
        sizes = [stage.batch_size or loader.batch_size for stage in self._schedule.stages]
        self._schemes = [loader.scheme_of(size) for size in sizes]
        self._terms: list[Terms] = []

    def scheme(self, step: int) -> Scheme:
        """How the batch of a step is drawn."""
        return self._schemes[self._schedule.at(step)[0]]

    @property
    def largest(self) -> int:
        """About the most units in a batch of any step."""
        return max(scheme.largest for scheme in self._schemes)

    def events(self, noise_multiplier: float, steps: int | None) -> list[Event]:
        """What all stages are charged as; ``steps``, where it is given, in place of the number of the last stage's."""
        stages = self._schedule.stages
        counts = [stage.steps for stage in stages]
        if steps is not None:
            counts[-1] = steps - sum(counts[:-1])
        factors = [stage.noise_factor for stage in stages]
        return [
            replace(step_event(scheme, self._policy, factor * noise_multiplier), count=count)
            for scheme, factor, count in zip(self._schemes, factors, counts, strict=True)
        ]

    def fix(self, plan: Plan, private: bool) -> list[Event]:
        """The noise is known; returns what the planned steps are charged as, with their counts.

        Noise that isn't private, since it can be foretold, protects no one: it is charged as none.
        """
        noise = plan.noise_multiplier
        events = self.events(noise if private else 0.0, plan.steps)
        self._terms = [
            Terms(noise * stage.noise_factor, scheme.batch_size, replace(event, count=1), stage.threshold_factor)
            for stage, scheme, event in zip(self._schedule.stages, self._schemes, events, strict=True)
        ]
        return events

    def at(self, step: int) -> Terms:
        """The terms of a step, from 0."""
        number, left = self._schedule.at(step)
        return self._terms[number] if left is None else replace(self._terms[number], left=left)

    def further(self, done: int, steps: int) -> Sequence[Event]:
        """What ``steps`` steps after the first ``done`` are charged as."""
        found = []
        while steps:
            terms = self.at(done)
            count = min(steps, terms.left)
            found.append(replace(terms.event, count=count))
            done, steps = done + count, steps - count
        return found
