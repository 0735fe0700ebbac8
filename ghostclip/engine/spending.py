"""What an engine has spent: every step is charged here before anything of it is released."""

from __future__ import annotations

import math
import os
import secrets
from collections import Counter
from collections.abc import Mapping
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
        self._runs: dict[str, Counter[SampledGaussian]] = {}
        self._start_run()

    def _start_run(self) -> None:
        """A name that no other engine or process has, under which what is charged from now on is known."""
        self._process, self._own = os.getpid(), Counter[SampledGaussian]()
        self._runs[secrets.token_hex(16)] = self._own

    @property
    def runs(self) -> dict[str, Counter[SampledGaussian]]:
        """{name of a run: how often each event (of count 1) was charged by it}, of all that led to this model."""
        return {run: Counter(spent) for run, spent in self._runs.items()}

    def add(self, runs: Mapping[str, Mapping[SampledGaussian, int]]) -> None:
        """Takes in what other runs were charged, and never less than is known: a run only ever goes on."""
        for run, spent in runs.items():
            known = self._runs.setdefault(run, Counter())
            for event, count in spent.items():
                known[event] = max(known[event], count)

    @property
    def events(self) -> list[SampledGaussian]:
        """Everything that was charged."""
        total = sum(self._runs.values(), Counter[SampledGaussian]())
        return [replace(event, count=count) for event, count in total.items()]

    @property
    def steps(self) -> int:
        """How many steps were charged."""
        return sum(spent.total() for spent in self._runs.values())

    def charge(self) -> None:
        """Charges one step; to be called before it is released. Raises BudgetExceededError when it is one too many."""
        self.check()
        if self._process != os.getpid():  # After a fork parent and child go on under the same name otherwise.
            self._start_run()
        self._own[self._event] += 1

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
