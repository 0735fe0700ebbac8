"""What was released before a training and is charged with it: private means, each under the random name it has.

Example: a mean of noise multiplier 8 and 20 steps within epsilon 3. The noise of the steps is calibrated for all 21
releases; the mean is charged when the engine is built, and by another engine in the same ledger not again.
"""

from __future__ import annotations

from collections.abc import Iterable

from ghostclip import accounting
from ghostclip.engine.charges import Noises, check_kinds
from ghostclip.events import Event
from ghostclip.ledger import Ledger
from ghostclip.noise.mean import PREFIX, PrivateMean

__all__ = ["Before", "is_of_a_step"]


class Before:
    """The releases before a training.

    Args:
        released: of `ghostclip.private_mean`; one that is there twice counts once.
        private: whether the training's noise is. A training with repeatable noise is planned as its private twin.

    Attributes:
        private: as given.
        events: {name: what it is charged as}.
        noises: which they had.
        planned: what the noise of the steps is calibrated with.

    Raises:
        TypeError: something else than a `PrivateMean` is among them, or one is given without a list.
    """

    def __init__(self, released: Iterable[PrivateMean], private: bool) -> None:
        if isinstance(released, PrivateMean):
            raise TypeError("before must be a list of what ghostclip.private_mean returned; give before=[released]")
        released = list(released) if isinstance(released, Iterable) else [released]
        for each in released:
            if not isinstance(each, PrivateMean):
                raise TypeError(f"before must be a list of what ghostclip.private_mean returned; got {each!r} in it")
        self.private = private
        self._released = {each.name: each for each in released}
        self.events: dict[str, Event] = {name: each.event for name, each in self._released.items()}
        self.noises: Noises = [(each.noise, each.generator) for each in self._released.values()]
        self.planned = [each.event if private else each.planned for each in self._released.values()]

    def check_like(self, step: Event) -> None:
        """Raises PrivacyError where a release is about other neighbours than the training's steps."""
        remedy = "leave before out, or give private_mean the engine's neighboring and the engine no unit_ids"
        check_kinds(self.planned, step, remedy)

    def check_target(self, epsilon: float, delta: float) -> None:
        """Raises ValueError where these releases alone don't leave anything of the target."""
        spent = accounting.epsilon_of(self.planned, delta=delta)
        if spent >= epsilon:
            raise ValueError(
                f"what was released before spends epsilon = {spent:.4g} at delta = {delta:g}, which leaves nothing of "
                f"target_epsilon = {epsilon:g}; raise the target, or release with more noise"
            )

    def charge(self, ledger: Ledger | None) -> None:
        """Charges to the ledger, under its own name, each release that isn't in there yet."""
        if ledger is not None:
            for name, each in self._released.items():
                ledger.take_in({name: {each.event: 1}}, each.noise, each.generator)

    def words(self) -> str:
        """A sentence for the guarantee; "" where there is none."""
        if not self.events:
            return ""
        kinds = "; ".join(f"noise multiplier {event.noise_multiplier:.4g}" for event in self.events.values())
        count = len(self.events)
        return (
            f" It includes {count} release{'s' if count != 1 else ''} over all examples before the training ({kinds})."
        )


def is_of_a_step(run: str) -> bool:
    """Whether a run's charges are steps: those of releases before a training have names of their own."""
    return not run.startswith(PREFIX)
