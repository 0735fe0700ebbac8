"""What an engine has spent: every step is charged here before anything of it is released."""

from __future__ import annotations

import math
import os
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

from ghostclip import accounting
from ghostclip.engine.budget import MOST, affordable
from ghostclip.engine.plan import Plan
from ghostclip.errors import BudgetExceededError, PrivacyError
from ghostclip.events import Event, merged
from ghostclip.ledger import Ledger
from ghostclip.validate import one_of, open_fraction, positive

__all__ = ["Runs", "Spending"]

# {random name of a run: how often each event (of count 1) was charged by it}
Runs = Mapping[str, Mapping[Event, int]]


class Spending:
    """Counts the releases of one engine, in memory or in a ledger, and refuses those past the plan or the budget.

    With a ledger everything in it counts, whoever spent it.

    Args:
        event: what each step is charged as.
        plan: how many steps were agreed.
        max_epsilon: which no step may pass, at the plan's delta; None: ``target_epsilon`` of the plan where something
            else was spent besides the steps it was calibrated for, else no limit.
        ledger: the file that every step is charged to, or its path; None: steps are counted in memory.
        noise: the noise's mode, for readers of the ledger.

    Attributes:
        max_epsilon: as given.
        ledger: the `Ledger`, or None.

    Raises:
        LedgerError: the ledger can't be continued.
        PrivacyError: the ledger is about other neighbours than ``event``.
        ValueError, TypeError: ``max_epsilon`` is out of range, or can't be kept.
    """

    def __init__(
        self,
        event: Event,
        plan: Plan,
        *,
        max_epsilon: float | None = None,
        ledger: str | os.PathLike[str] | Ledger | None = None,
        noise: str = "standard",
    ) -> None:
        self.max_epsilon = None if max_epsilon is None else positive(max_epsilon=max_epsilon)
        if self.max_epsilon is not None and event.noise_multiplier == 0:
            raise ValueError(f"max_epsilon={max_epsilon!r} can't be kept without private noise: epsilon would be inf")
        self._event, self._plan = event, plan
        self.ledger = ledger if isinstance(ledger, Ledger | None) else Ledger(ledger)
        self._runs: dict[str, Counter[Event]] = {}
        self._account = None if self.ledger is None else self.ledger.account(noise)
        self._start_run()
        self._added = 0
        self._limit, self._room_for, self._more_to_ask = 0, ("", -1, -1), False
        try:
            self._check_alike(self.events)
        except PrivacyError:
            self.close()
            raise

    def _start_run(self) -> None:
        """A name that no other engine or process has, under which what is charged from now on is known."""
        self._process, self._own = os.getpid(), Counter[Event]()
        self._run = secrets.token_hex(16) if self._account is None else self._account.run
        self._runs[self._run] = self._own

    def _check_alike(self, events: list[Event]) -> None:
        """Raises PrivacyError when what was spent doesn't add up with the steps to come."""
        mine = self._event.relation, self._event.unit
        for other in events:
            if (other.relation, other.unit) != mine:
                raise PrivacyError(
                    f"what was spent before ({other.relation} of one {other.unit}) and the steps of this engine "
                    f"({mine[0]} of one {mine[1]}) protect different things and don't add up to one guarantee; use "
                    "another ledger for them"
                )

    @property
    def runs(self) -> dict[str, Counter[Event]]:
        """{name of a run: how often each event (of count 1) was charged by it}, of all that led to this model."""
        return {run: Counter(spent) for run, spent in self._runs.items()}

    def add(self, runs: Runs) -> None:
        """Takes in what other runs were charged, and never less than is known: a run only ever goes on."""
        self._check_alike([event for spent in runs.values() for event in spent])
        self._added += 1
        for run, spent in runs.items():
            _raise_to(self._runs.setdefault(run, Counter()), spent)

    @property
    def events(self) -> list[Event]:
        """Everything that was charged."""
        return _listed(self._runs if self._account is None else self._with_known(self._account.runs))

    @property
    def steps(self) -> int:
        """How many steps of the model's training were charged."""
        return sum(spent.total() for spent in self._runs.values())

    def charge(self) -> None:
        """Charges one step; to be called before it is released.

        Raises:
            BudgetExceededError: it is one too many.
            LedgerError: it can't be written to the ledger.
        """
        if self._process != os.getpid() and self._account is None:
            # After a fork parent and child go on under the same name otherwise.
            self._start_run()
        if self._account is None:
            self._most(0, {})
        else:
            self._account.charge(self._event, self._most)
        self._own[self._event] += 1

    def check(self) -> None:
        """Raises BudgetExceededError when the next step would be one too many."""
        if self._account is None:
            self._most(0, {})
        else:
            self._account.check(self._event, self._most)

    def close(self) -> None:
        """Gives back to the ledger what was reserved there and is not needed any more."""
        if self._account is not None:
            self._account.close()

    def epsilon(self, delta: float | None, accountant: str) -> float:
        """Epsilon of all that was charged; see `PrivacyEngine.epsilon`."""
        delta = self._plan.target_delta if delta is None else open_fraction(delta=delta)
        one_of(accounting.ACCOUNTANTS, accountant=accountant)
        if self._event.noise_multiplier == 0:
            return math.inf
        return accounting.epsilon_of(self.events, delta=delta, accountant=accountant)

    def _most(self, written: int, ledger: Runs) -> int:
        """How many more steps may be charged, at least 1; computed anew only when another run has spent something.

        Args:
            written: changes whenever other runs spend.
            ledger: what all runs spent according to the ledger, or may still spend.

        Raises:
            BudgetExceededError: none.
        """
        runs = self._with_known(ledger)
        own, state = runs[self._run][self._event], (self._run, written, self._added)
        if state != self._room_for or (own >= self._limit and self._more_to_ask):
            room, self._more_to_ask = self._room(_listed(runs), self._limit - own)
            self._limit, self._room_for = own + room, state
        if own >= self._limit:
            self._refuse(_listed(runs))
        return self._limit - own

    def _room(self, spent: list[Event], before: int) -> tuple[int, bool]:
        """How many steps plan and budget allow on top of ``spent``, and whether there may be more.

        Args:
            spent: by everyone.
            before: how many steps there was room for when this was asked last.
        """
        planned = None if self._plan.steps is None else max(0, self._plan.steps - self._charged_in(spent))
        room = MOST if planned is None else min(planned, MOST)
        epsilon = self._epsilon_limit(spent)
        if epsilon is not None and room:
            # Most of what there was room for will still have some: one question instead of a dozen.
            most = min(room, before // 2) if before > 1 else room
            room = affordable(spent, self._event, max_epsilon=epsilon, delta=self._plan.target_delta, most=most)
            return room, room == most != planned
        return room, room != planned

    def _epsilon_limit(self, spent: list[Event]) -> float | None:
        """What epsilon may not pass. The planned steps keep to the target by themselves, as long as they are alone."""
        alone = all(replace(event, count=1) == self._event for event in spent)
        return self._plan.target_epsilon if self.max_epsilon is None and not alone else self.max_epsilon

    def _charged_in(self, spent: list[Event]) -> int:
        return sum(event.count for event in spent if replace(event, count=1) == self._event)

    def _refuse(self, spent: list[Event]) -> NoReturn:
        plan, where = self._plan, "" if self.ledger is None else f" (all in the ledger {self.ledger.path} counts)"
        if plan.steps is not None and self._charged_in(spent) >= plan.steps:
            raise BudgetExceededError(
                f"all {plan.steps} planned steps were taken{where}, which spend epsilon = {plan.target_epsilon} at "
                f"delta = {plan.target_delta}; stop here (a new PrivacyEngine would add to what is spent already)"
            )
        name = "target_epsilon" if self.max_epsilon is None else "max_epsilon"
        epsilon = accounting.epsilon_of(spent, delta=plan.target_delta)
        raise BudgetExceededError(
            f"one more step would pass {name} = {self._epsilon_limit(spent)} at delta = {plan.target_delta}: "
            f"epsilon = {epsilon:.6g} is spent or reserved{where}; stop here, or agree on a larger one"
        )

    def _with_known(self, runs: Runs) -> dict[str, Counter[Event]]:
        """The runs together with those that are known here, a run that is in both by what is more."""
        found = {run: Counter(spent) for run, spent in self._runs.items()}
        for run, spent in runs.items():
            _raise_to(found.setdefault(run, Counter()), spent)
        return found


def _raise_to(known: Counter[Event], spent: Mapping[Event, int]) -> None:
    for event, count in spent.items():
        known[event] = max(known[event], count)


def _listed(runs: Runs) -> list[Event]:
    """What runs spent, one event a mechanism."""
    return merged(replace(event, count=count) for spent in runs.values() for event, count in spent.items())
