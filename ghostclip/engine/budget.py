"""Charges every step before it is released, and refuses those past the plan or the budget."""

from __future__ import annotations

import logging
import math
import os
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from torch import nn

from ghostclip import accounting
from ghostclip.engine.before import is_of_a_step
from ghostclip.engine.charges import Noises, Runs, Told, check_kinds, counted, events_of, joined, steps_of
from ghostclip.engine.distributed import Ranks
from ghostclip.engine.step_plan import MOST, StepPlan, StepSettings
from ghostclip.errors import BudgetExceededError, PrivacyError
from ghostclip.events import Event, mechanism_of, within
from ghostclip.ledger import Ledger
from ghostclip.noise import Noise
from ghostclip.validate import one_of, positive

__all__ = ["Spending"]

log = logging.getLogger("ghostclip")

OTHER_LEDGER = "use another ledger for them"

# {path of a ledger: what the leading rank told any engine of this process last, about everything in it}
_told_last: dict[str, Told] = {}


class Spending:
    """Counts the releases of one engine, in memory or in a ledger, and refuses those past the plan or the budget.

    With a ledger everything in it counts, whoever spent it. Where several processes train together, the leading one
    counts, has the ledger and may refuse; the others are told, and refuse with it.

    Args:
        max_epsilon: which no step may pass, at the plan's delta; None: ``target_epsilon`` of the plan where something
            else was spent besides the steps it was calibrated for, else no limit.
        ledger: the file that every step is charged to, or its path; None: steps are counted in memory.
        noise: its mode and generator for the ``model`` are recorded for readers of the ledger.

    Attributes:
        ledger: the `Ledger`, or None; None too on ranks that don't lead.

    Raises:
        LedgerError: the ledger can't be continued.
        PrivacyError: the ledger is about other neighbours than the planned steps.
        ValueError, TypeError: ``max_epsilon`` is out of range, or can't be kept.
    """

    def __init__(
        self,
        ranks: Ranks,
        plan: StepPlan,
        max_epsilon: float | None,
        ledger: str | os.PathLike[str] | Ledger | None,
        noise: Noise,
        model: nn.Module,
    ) -> None:
        self._ranks, self._plan = ranks, plan
        self._planned = counted(plan.events)
        self._first = next(iter(self._planned))
        self._runs: defaultdict[str, Counter[Event]] = defaultdict(Counter)
        self._noise, self._noises = (noise.mode, noise.generator_for(model)), dict.fromkeys(plan.before.noises)
        self._told = Told({}, {}, None, None, [])
        self._running = accounting.RunningEpsilon()
        # How many steps of its own the run may take; for which run, records of others and checkpoints that was found.
        self._limit, self._limit_for, self._added = 0, ("", self._first, -1, -1), 0
        if ranks.size > 1:
            facts = {
                "what was released before": list(plan.before.events), "max_epsilon": max_epsilon,
                "target_delta": plan.target_delta, "whether there is a ledger": ledger is not None,
            }  # fmt: skip
            ranks.check_alike(facts, "when engines are built")
        self._shared(partial(self._open, max_epsilon, ledger))
        if not ranks.leads:
            self._open(max_epsilon, None)

    def _open(self, max_epsilon: float | None, ledger: str | os.PathLike[str] | Ledger | None) -> None:
        self.max_epsilon = None if max_epsilon is None else positive(max_epsilon=max_epsilon)
        if self.max_epsilon is not None and not self.private:
            raise ValueError(f"max_epsilon={max_epsilon!r} can't be kept without private noise: epsilon would be inf")
        target = self._plan.target_epsilon
        if self.max_epsilon is not None and target is not None and self.max_epsilon < target and self._ranks.leads:
            log.warning(
                "max_epsilon=%s is below target_epsilon=%s: training ends before its last step", max_epsilon, target
            )
        self.ledger = ledger if isinstance(ledger, Ledger | None) else Ledger(ledger)
        self._account = None if self.ledger is None else self.ledger.account(*self._noise)
        self._start_run()
        before = self._plan.before
        try:
            check_kinds(self.events, self._first, OTHER_LEDGER)
            before.charge(self.ledger)
        except PrivacyError:
            self.close()
            raise
        for name, event in before.events.items():
            self._runs[name][event] = 1

    def _start_run(self) -> None:
        """A name that no other engine or process has, under which what is charged from now on is known."""
        self._process = os.getpid()
        self._run = secrets.token_hex(16) if self._account is None else self._account.run
        self._own = self._runs[self._run]

    def _shared(self, work: Callable[[], object]) -> None:
        """``work`` on the leading rank; afterwards, or when it refuses, all ranks know the same."""
        if self._ranks.size == 1:
            work()
            return

        def told() -> Told:
            work()
            path = None if self.ledger is None else os.fspath(self.ledger.path)
            return Told(self._everything, self.runs, self.head, path, self.noises)

        self._told = self._ranks.led(told)
        if self._told.ledger is not None:
            _told_last[self._told.ledger] = self._told

    @property
    def head(self) -> dict[str, Any] | None:
        """How far the ledger is, `ghostclip.ledger.Head` as a dict; None without one. It is the same on all ranks."""
        if not self._ranks.leads:
            return self._told.head
        return None if self.ledger is None else dict(vars(self.ledger.head))

    @property
    def unit(self) -> str:
        """Whose presence the guarantee is about."""
        return self._first.unit

    @property
    def private(self) -> bool:
        """Whether steps have private noise."""
        return self._first.noise_multiplier > 0

    @property
    def runs(self) -> dict[str, Counter[Event]]:
        """{name of a run: how often each event (of count 1) was charged by it}, of all that led to this model."""
        return {run: Counter(spent) for run, spent in (self._runs if self._ranks.leads else self._told.runs).items()}

    @property
    def _everything(self) -> Runs:
        """What all runs were charged; on a rank that doesn't lead, as of the last step that was charged there."""
        if self._ranks.leads:
            return self._runs if self._account is None else joined(self._runs, self._account.runs)
        last = _told_last[self._told.ledger].everything if self._told.ledger else {}
        # It is less where another ledger was put in the place of that one.
        return max(last, self._told.everything, key=lambda runs: sum(sum(spent.values()) for spent in runs.values()))

    @property
    def events(self) -> list[Event]:
        """Everything that was charged."""
        return events_of(self._everything)

    @property
    def noises(self) -> Noises:
        """Of everything that was charged."""
        if self._ranks.leads:
            return list(dict.fromkeys([*([] if self._account is None else self._account.noises), *self._noises]))
        last = _told_last[self._told.ledger].noises if self._told.ledger else []
        return list(dict.fromkeys([*last, *self._told.noises]))

    @property
    def steps(self) -> int:
        """How many steps of the model's training were charged."""
        return sum(spent.total() for run, spent in self.runs.items() if is_of_a_step(run))

    def steps_of(self, mechanism: str, everyone: bool = False) -> int:
        """How many steps of a mechanism were charged by the model's runs, or by ``everyone`` in the ledger."""
        return steps_of(mechanism, self._everything if everyone else self.runs)

    def add(self, runs: Runs, noises: Noises) -> None:
        """Takes in what other runs were charged, with which noise, and never less than is known."""
        self._shared(partial(self._add, runs, noises))

    def _add(self, runs: Runs, noises: Noises) -> None:
        check_kinds(events_of(runs), self._first, OTHER_LEDGER)
        self._refuse_two_continuations(runs)
        self._added += 1
        for run, spent in runs.items():
            self._runs[run] |= Counter(spent)
        self._noises |= dict.fromkeys(noises)
        # Of several modes the ledger records the one that claims least.
        modes = {mode for mode, _ in noises}
        generator = " or ".join(name or "a generator that was not recorded" for _, name in noises)
        noise = modes.pop() if len(modes) == 1 else "standard", generator
        if self.ledger is not None and (count := self.ledger.take_in(runs, *noise)):
            log.warning(
                "%d releases that led to this model weren't in the ledger %s and are now", count, self.ledger.path
            )
        if self._account is not None:
            self._account.give_back()

    def _refuse_two_continuations(self, runs: Runs) -> None:
        """Raises PrivacyError where these runs and the known ones went on with one mechanism after different steps.

        Steps of a mechanism are counted as if each followed the one before: the ninth of eight groups is the second
        turn of the first group, and so is the ninth of another continuation.
        """
        known = self._everything
        names = {mechanism_of(event) for spent in runs.values() for event in spent}
        for mechanism in (name for name in names if name is not None):
            if steps_of(mechanism, joined(known, runs)) > max(steps_of(mechanism, runs), steps_of(mechanism, known)):
                raise PrivacyError(
                    "the checkpoint and what this engine, or its ledger, knows of went on from one earlier checkpoint "
                    "with the same correlated noise or the same turns, each in its own way, which don't add up: a new "
                    "engine can restore either (with a ledger that has neither), and won't know of the other. Give "
                    "such trainings one ledger=... from the start, which counts both"
                )

    def charge(self, settings: StepSettings) -> None:
        """Charges one step; to be called before it is released, by all ranks.

        Raises:
            BudgetExceededError: it is one too many.
            LedgerError: it can't be written to the ledger.
        """
        self._shared(partial(self._charge, settings))

    def _charge(self, settings: StepSettings) -> None:
        accounting.note_charges(self._runs)
        if self._account is not None:
            self._account.charge(settings.event, partial(self._most, settings))
        else:
            if self._process != os.getpid():
                # After a fork parent and child go on under the same name otherwise.
                self._start_run()
            self._most(settings, 0, {})
        self._own[settings.event] += 1
        self._noises[self._noise] = None

    def check(self, settings: StepSettings) -> None:
        """Raises BudgetExceededError when the next step would be one too many; to be called by all ranks."""
        self._shared(partial(self._check, settings))

    def _check(self, settings: StepSettings) -> None:
        if self._account is None:
            self._most(settings, 0, {})
        else:
            self._account.check(settings.event, partial(self._most, settings))

    def close(self) -> None:
        """Gives back to the ledger what was reserved there and is not needed any more."""
        if self._account is not None:
            self._account.close()

    def epsilon(self, delta: float, accountant: str) -> float:
        """Epsilon of all that was charged; see `PrivacyEngine.epsilon`."""
        one_of(accounting.ACCOUNTANTS, accountant=accountant)
        if not self.private:
            return math.inf
        runs = self._everything
        if accountant == "rdp":
            return accounting.epsilon_of(events_of(runs), delta=delta, accountant=accountant)
        found, target = self._running.epsilon(events_of(runs), delta), self._plan.target_epsilon
        # The noise was calibrated for all planned steps, and a running figure may be a little above.
        return min(found, target) if target is not None and self._is_planned(runs, delta) else found

    def _most(self, settings: StepSettings, written: int, ledger: Runs) -> int:
        """The number of further steps that may be charged, >= 1. The last limit holds until it is used up, or
        another run has spent something.

        Args:
            settings: of the steps.
            written: changes whenever other runs spend.
            ledger: what all runs spent according to the ledger, or may still spend.

        Raises:
            BudgetExceededError: none.
        """
        runs = joined(self._runs, ledger) if ledger else self._runs
        own, state = runs[self._run][settings.event], (self._run, settings.event, written, self._added)
        if state != self._limit_for or own >= self._limit:
            before = self._limit - own if state[1] == self._limit_for[1] else 0
            self._limit, self._limit_for = own + self._room(settings.event, runs, before), state
        if own >= self._limit:
            self._refuse(settings.event, runs)
        return min(self._limit - own, settings.left)

    def _room(self, event: Event, runs: Runs, before: int) -> int:
        """How many steps of ``event`` plan and budget allow on top of ``runs``; a lower bound where it is asked again.

        ``before``: how many steps there was room for when this was asked last.
        """
        room = MOST if self._plan.planned_steps is None else max(0, self._plan.planned_steps - self._charged_in(runs))
        epsilon = self._epsilon_limit(event, runs)
        if epsilon is None and self._plan.target_epsilon is not None:
            steps = counted(self._steps_in(runs))
            room = min(room, self._planned[within(event, "")] - steps[within(event, "")])
        if epsilon is None or not room:
            return room
        # Half of the steps that were affordable before usually still are: then one evaluation of epsilon suffices.
        most, spent = min(room, before // 2) if before > 1 else room, events_of(runs)
        return accounting.affordable(spent, event, max_epsilon=epsilon, delta=self._plan.target_delta, most=most)

    def _epsilon_limit(self, event: Event, runs: Runs) -> float | None:
        """What epsilon may not pass with ``event``. The planned steps alone keep to the target by themselves."""
        planned = self._is_planned(runs, self._plan.target_delta, event)
        return self._plan.target_epsilon if self.max_epsilon is None and not planned else self.max_epsilon

    def _is_planned(self, runs: Runs, delta: float, *further: Event) -> bool:
        """Whether only planned steps were taken, asked about at no smaller delta than they were planned for.

        Steps of two mechanisms may have more turns than as many steps of one.
        """
        spent = [*self._steps_in(runs), *further]
        alone = len({mechanism_of(event) for event in spent} - {None}) <= 1
        planned = all(count <= self._planned[once] for once, count in counted(spent).items())
        return alone and planned and delta >= self._plan.target_delta

    def _charged_in(self, runs: Runs) -> int:
        """How many of the planned steps were taken; without a target those that the matrix of noise is made for."""
        if self._plan.target_epsilon is None and mechanism_of(self._first) is None:
            return self.steps
        if self._plan.target_epsilon is None:
            return self._plan.began + steps_of(self._plan.mechanism, runs)
        steps = counted(self._steps_in(runs))
        return sum(count for event, count in steps.items() if event in self._planned)

    def _steps_in(self, runs: Runs) -> list[Event]:
        """What runs were charged, without the releases before the training, which may be like steps."""
        return events_of({run: spent for run, spent in runs.items() if run not in self._plan.before.events})

    def _refuse(self, event: Event, runs: Runs) -> NoReturn:
        plan, where = self._plan, ""
        if self.ledger is not None:
            where = (
                f" (all in the ledger {self.ledger.path} counts, also what a run that isn't over has reserved, which "
                "its engine.detach() gives back, and what a killed one had)"
            )
        if plan.planned_steps is not None and self._charged_in(runs) >= plan.planned_steps:
            spend = "for which the noise is correlated" if plan.target_epsilon is None else (
                f"which spend epsilon = {plan.target_epsilon} at delta = {plan.target_delta}"
            )  # fmt: skip
            raise BudgetExceededError(
                f"all {plan.planned_steps} planned steps were taken{where}, {spend}; stop here (a new PrivacyEngine "
                "would add to what is spent already)"
                + ("" if self.ledger is None else f". For other data, name another ledger than {self.ledger.path}")
            )
        name = "target_epsilon" if self.max_epsilon is None else "max_epsilon"
        epsilon = accounting.epsilon_of(events_of(runs), delta=plan.target_delta)
        raise BudgetExceededError(
            f"one more step would pass {name} = {self._epsilon_limit(event, runs)} at delta = {plan.target_delta}: "
            f"epsilon = {epsilon:.6g} is spent or reserved{where}; stop here, or agree on a larger one"
        )
