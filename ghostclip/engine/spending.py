"""What an engine has spent: every step is charged here before anything of it is released."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from ghostclip import accounting
from ghostclip.engine.plan import Plan
from ghostclip.errors import BudgetExceededError
from ghostclip.events import SampledGaussian
from ghostclip.validate import one_of, open_fraction

__all__ = ["Spending"]


class Spending:
    """Counts the releases of one engine and refuses those past the plan.

    Args:
        event: what each step is charged as.
        plan: how many steps were agreed.
    """

    def __init__(self, event: SampledGaussian, plan: Plan) -> None:
        self._event, self._plan = event, plan
        self._spent: Counter[SampledGaussian] = Counter()

    @property
    def events(self) -> list[SampledGaussian]:
        """Everything that was charged."""
        return [replace(event, count=count) for event, count in self._spent.items()]

    @property
    def steps(self) -> int:
        """How many steps were charged."""
        return sum(self._spent.values())

    def charge(self) -> None:
        """Charges one step; to be called before it is released. Raises BudgetExceededError when it is one too many."""
        self.check()
        self._spent[self._event] += 1

    def check(self) -> None:
        """Raises BudgetExceededError when all planned steps were charged."""
        plan = self._plan
        if plan.steps is not None and self.steps >= plan.steps:
            raise BudgetExceededError(
                f"all {plan.steps} planned steps were taken, which spend epsilon = {plan.target_epsilon} at "
                f"delta = {plan.target_delta}; stop here (a new PrivacyEngine would add to what is spent already)"
            )

    def epsilon(self, delta: float | None, accountant: str) -> float:
        """Epsilon of all that was charged; see `PrivacyEngine.epsilon`."""
        delta = self._plan.target_delta if delta is None else open_fraction(delta=delta)
        one_of(accounting.ACCOUNTANTS, accountant=accountant)
        if self._event.noise_multiplier == 0:
            return math.inf
        return accounting.epsilon_of(self.events, delta=delta, accountant=accountant)
