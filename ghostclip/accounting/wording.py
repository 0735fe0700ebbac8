"""A guarantee in words: what was spent, how examples were drawn, which data sets are neighbours."""

from __future__ import annotations

from collections.abc import Sequence

from ghostclip.accounting.spent import epsilon_of
from ghostclip.events import Event, JointGaussian, TruncatedGaussian, merged

__all__ = ["guarantee", "neighbours", "samples"]

SAMPLES = {
    "poisson": "Poisson samples",
    "without_replacement": "samples of fixed size, drawn without replacement,",
    "truncated": "Poisson samples, cut down to {cap},",
}


def guarantee(events: Sequence[Event], *, delta: float, accountant: str = "pld") -> str:
    """Epsilon and delta of what happened, and what they are about, in one or two sentences.

    Raises:
        ValueError, TypeError: as `epsilon_of`.
    """
    spent = epsilon_of(events, delta=delta, accountant=accountant)
    figures = f"epsilon {spent:.4g} ({accountant.upper()}) at delta {delta:g}"
    happened = merged(events)
    if not happened:
        return f"{figures}: nothing was released"
    steps = "; ".join(f"{event.count:,} steps over {samples(event)}" for event in happened)
    return f"{figures}, after {steps}. {neighbours(happened[0])}"


def samples(event: Event) -> str:
    """How the event's examples are drawn and how much noise there is, to go after "steps over"."""
    once = event.events[0] if isinstance(event, JointGaussian) else event
    cap = f"{once.max_batch_size:,}" if isinstance(once, TruncatedGaussian) else ""
    noise = f"noise multiplier {event.noise_multiplier:.4g}"
    if isinstance(event, JointGaussian):
        each = ", ".join(f"{part.noise_multiplier:.4g}" for part in event.events)
        noise = f"noise multipliers {each} in one release ({event.noise_multiplier:.4g} together)"
    return f"{SAMPLES[once.sampling].format(cap=cap)} at rate {once.sample_rate:.4g} with {noise}"


def neighbours(event: Event) -> str:
    """The sentence on which data sets the guarantee makes hard to tell apart."""
    what = "example" if event.unit == "example" else "user (all examples of theirs)"
    if event.relation == "replace_one":
        return f"Neighbouring data sets differ in what one {what} is (replace_one)."
    return f"Neighbouring data sets differ by the presence of one {what} (add_or_remove_one)."
