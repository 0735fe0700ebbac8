"""What was agreed before training: the noise, and how many steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ghostclip import accounting
from ghostclip.clipping import Schedule
from ghostclip.events import Event
from ghostclip.validate import nonnegative, positive, positive_int

__all__ = ["Plan", "plan_for"]


@dataclass(frozen=True)
class Plan:
    """The noise, and the number of steps it was calibrated for.

    Attributes:
        noise_multiplier: standard deviation of the noise over the sensitivity, which a schedule multiplies; 0: none.
        target_delta: where epsilon is reported.
        steps: the most steps that may be taken; None: no limit was agreed.
        target_epsilon: what those steps spend at most; None with ``steps``.
    """

    noise_multiplier: float
    target_delta: float
    steps: int | None = None
    target_epsilon: float | None = None


def plan_for(
    events_of: Callable[[float, int | None], list[Event]],
    steps_an_epoch: int,
    noise_multiplier: float | None,
    target_epsilon: float | None,
    target_delta: float,
    epochs: int | None,
    steps: int | None,
    schedule: Schedule | None = None,
) -> Plan:
    """The plan from the engine's arguments: noise that was given, or the least noise for the target by PLD.

    Args:
        events_of: from a noise multiplier, and the number of steps where no schedule has it, to what they are charged
            as.
        steps_an_epoch: how many there are.

    The others as for `PrivacyEngine`.

    Raises:
        ValueError, TypeError: arguments that don't go together, are out of range, or a target no noise reaches.
    """
    if (noise_multiplier is None) == (target_epsilon is None):
        raise ValueError(
            "give either noise_multiplier, or target_epsilon with epochs (or steps) to have it calibrated; got "
            + ("neither" if noise_multiplier is None else "both")
        )
    if noise_multiplier is not None:
        if epochs is not None or steps is not None:
            raise ValueError(
                "epochs and steps say what target_epsilon is to be calibrated for; leave them out with "
                "noise_multiplier, and stop when you like"
            )
        return Plan(nonnegative(noise_multiplier=noise_multiplier), target_delta)
    if schedule is not None:
        if epochs is not None or steps is not None:
            raise ValueError("a schedule has the number of steps; leave epochs and steps out")
        planned, of = schedule.steps, None
    elif (epochs is None) == (steps is None):
        raise ValueError(
            "target_epsilon needs the length of training: give either epochs or steps; got "
            + ("neither" if epochs is None else "both")
        )
    else:
        planned = positive_int(epochs=epochs) * steps_an_epoch if epochs is not None else positive_int(steps=steps)
        of = planned
    target_epsilon = positive(target_epsilon=target_epsilon)
    noise = accounting.noise_for(lambda noise: events_of(noise, of), target_epsilon=target_epsilon, delta=target_delta)
    return Plan(noise, target_delta, planned, target_epsilon)
