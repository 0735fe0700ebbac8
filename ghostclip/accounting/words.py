"""What was spent, in words: a guarantee of one or two sentences, and what each event was."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ghostclip.accounting.spent import epsilon_of, used_for
from ghostclip.events import (
    CyclicGaussian,
    CyclicPoissonGaussian,
    Event,
    JointGaussian,
    Selection,
    TruncatedGaussian,
    merged,
)

__all__ = ["guarantee", "neighbours", "samples", "steps", "warn_of_delta"]

log = logging.getLogger("ghostclip")

SAMPLES = {
    "poisson": "Poisson samples",
    "without_replacement": "samples of fixed size, drawn without replacement,",
    "truncated": "Poisson samples, cut down to {cap},",
    "cyclic_poisson": "Poisson samples of {separation} groups in turn",
    "cyclic": "batches in a fixed order, each example once in {separation} steps,",
}


def warn_of_delta(delta: float, units: int, unit: str = "example") -> None:
    """Logs a warning where ``delta`` is no less than one over the number of examples (or users)."""
    if 1 / units <= delta < 1:
        log.warning(
            "delta %g is not below 1 / %d %ss: the guarantee then allows that one of them is published as it is; "
            "take well below %.1g",
            delta, units, unit, 1 / units,
        )  # fmt: skip


def guarantee(events: Sequence[Event], *, delta: float, accountant: str = "pld") -> str:
    """The guarantee in one or two sentences: epsilon, delta, sampling, noise and neighbouring data sets.

    Args:
        events, delta, accountant: as for `epsilon_of`.

    Raises:
        ValueError, TypeError: as `epsilon_of`.
    """
    spent = epsilon_of(events, delta=delta, accountant=accountant)
    figures = f"epsilon {spent:.4g} ({used_for(events, accountant).upper()}) at delta {delta:g}"
    happened = merged(events)
    if not happened:
        return f"{figures}: nothing was released"
    in_order = [event for event in happened if _is_cyclic(event)]
    return f"{figures}, after {'; '.join(map(steps, happened))}. {neighbours([*in_order, *happened][0])}"


def steps(event: Event) -> str:
    """Words for what happened how often: "20 steps over Poisson samples at rate 0.01 with noise multiplier 1"."""
    if isinstance(event, Selection):
        times = "" if event.count == 1 else f"{event.count:,} times "
        return f"{times}{samples(event)}"
    return f"{event.count:,} step{'s' if event.count != 1 else ''} over {samples(event)}"


def samples(event: Event) -> str:
    """Words for the sampling and noise of ``event``: "Poisson samples at rate 0.01 with noise multiplier 1"."""
    if isinstance(event, Selection):
        drawn = event.distribution
        law = (
            f"{drawn} distribution" if isinstance(drawn, str) else f"negative binomial distribution of shape {drawn:g}"
        )
        runs = " and ".join(map(steps, event.events))
        return f"the best of a random number of runs ({law} of mean {event.expected_runs:g}), each of {runs}"
    once = event.events[0] if isinstance(event, JointGaussian) else event
    cap = f"{once.max_batch_size:,}" if isinstance(once, TruncatedGaussian) else ""
    cyclic = once if isinstance(once, CyclicPoissonGaussian) else None
    noise = f"noise multiplier {event.noise_multiplier:.4g}"
    if isinstance(event, JointGaussian):
        each = ", ".join(f"{part.noise_multiplier:.4g}" for part in event.events)
        noise = f"noise multipliers {each} in one release ({event.noise_multiplier:.4g} together)"
    if cyclic is not None and cyclic.correlation:
        noise += f", correlated by {cyclic.correlation}"
    if cyclic is not None and cyclic.sensitivity != 1:
        noise += f" of sensitivity {cyclic.sensitivity:.4g}"
    drawn = SAMPLES[once.sampling].format(cap=cap, separation=cyclic and cyclic.separation)
    return f"{drawn} at rate {once.sample_rate:.4g} with {noise}"


def neighbours(event: Event) -> str:
    """A sentence that says how neighbouring data sets differ, by the event's ``neighboring`` and unit."""
    what = "example" if event.unit == "example" else "user (all examples of theirs)"
    if event.relation == "replace_one":
        return f"Neighbouring data sets differ in what one {what} is (replace_one)."
    place = ", whose place in the order stays empty without it" if _is_cyclic(event) else ""
    return f"Neighbouring data sets differ by the presence of one {what}{place} (add_or_remove_one)."


def _is_cyclic(event: Event) -> bool:
    return isinstance(event.events[0] if isinstance(event, JointGaussian) else event, CyclicGaussian)
