"""Schedules: noise, thresholds and batch size that change over the steps of training, stage by stage."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ghostclip.validate import positive, positive_int

__all__ = ["Schedule", "Stage"]


@dataclass(frozen=True)
class Stage:
    """A number of steps with the same settings.

    Args:
        steps: their number, >= 1.
        noise_factor: > 0; the noise multiplier of these steps is the engine's times this factor.
        threshold_factor: > 0; the thresholds of these steps are the policy's times this factor. Sensitivity and noise
            scale with them, as do constants such as AUTO-S's gamma, since the policy is applied to gradients divided
            by the factor.
        batch_size: the expected size of a logical batch, by which noisy sums are divided; None: the engine's.

    Raises:
        ValueError, TypeError: an argument is out of range.
    """

    steps: int
    noise_factor: float = 1.0
    threshold_factor: float = 1.0
    batch_size: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", positive_int(steps=self.steps))
        for name in ("noise_factor", "threshold_factor"):
            object.__setattr__(self, name, positive(**{name: getattr(self, name)}))
        if self.batch_size is not None:
            object.__setattr__(self, "batch_size", positive_int(batch_size=self.batch_size))


@dataclass(frozen=True)
class Schedule:
    """A sequence of stages, from the model's first step on.

    Args:
        stages: in their order. With ``target_epsilon`` they are the whole training, for which the engine calibrates
            the noise multiplier. Otherwise the last stage continues without end.

    Raises:
        ValueError, TypeError: there is no stage, or something else among them.
    """

    stages: Sequence[Stage]

    def __post_init__(self) -> None:
        if isinstance(self.stages, Stage) or not all(isinstance(stage, Stage) for stage in self.stages):
            raise TypeError(f"stages must be a list of ghostclip.clipping.Stage; got {self.stages!r}")
        if not self.stages:
            raise ValueError("stages must be one Stage or more; got none")
        object.__setattr__(self, "stages", tuple(self.stages))

    @classmethod
    def of(
        cls,
        steps: int,
        every: int,
        *,
        noise_factor: Callable[[int], float] = lambda _: 1.0,
        threshold_factor: Callable[[int], float] = lambda _: 1.0,
        batch_size: Callable[[int], int | None] = lambda _: None,
    ) -> Schedule:
        """Stages of ``every`` steps each, ``steps`` in all, by functions of the number of steps before a stage.

        PLD takes about a third of a second for each stage that differs from all others.
        """
        steps, every = positive_int(steps=steps), positive_int(every=every)
        starts = range(0, steps, every)
        return cls(
            [
                Stage(min(every, steps - start), noise_factor(start), threshold_factor(start), batch_size(start))
                for start in starts
            ]
        )

    @property
    def steps(self) -> int:
        """How many steps all stages have."""
        return sum(stage.steps for stage in self.stages)

    def at(self, step: int) -> tuple[int, int | None]:
        """(number of the stage, steps left in it with this one) for a step, from 0; the last stage has None left."""
        ends = list(accumulate(stage.steps for stage in self.stages))
        number = min(bisect_right(ends, step), len(ends) - 1)
        return number, None if number == len(ends) - 1 else ends[number] - step
