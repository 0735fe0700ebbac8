"""One mechanism of correlated noise or of sampling by turns in a training: its name, its history, and when it ends.

Steps of one mechanism share noise, and its charges add up to turns of an example. Both hold only while each step
follows the one before: where a checkpoint older than the last charge is restored, where noise was interrupted, and in a
fork, a new mechanism begins with a new name and an empty history, and its first step is a turn again.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.engine.budget import Spending
from ghostclip.engine.charges import Runs, steps_of
from ghostclip.engine.distributed import Ranks
from ghostclip.engine.step_plan import StepPlan, StepSettings, new_name
from ghostclip.events import within
from ghostclip.noise import Noise
from ghostclip.noise.history import history_of
from ghostclip.sampling import LogicalBatches
from ghostclip.sharding.plain import Sharding, local_part

__all__ = ["Mechanism"]

# {name: the mechanism of an engine of this process that may take its next step}.
_going_on: weakref.WeakValueDictionary[str, Mechanism] = weakref.WeakValueDictionary()


class Mechanism(Noise):
    """Comes between the engine and its noise, and between it and its charges.

    Where several processes train together all have the mechanism's name, and who draws noise has the history of it:
    the leading one, or, of a sharded model and noise that nobody can repeat, each of its own shards.

    ``source`` gives independent noise. The events of ``plan`` bear the mechanism's name. Groups of ``loader`` take
    turns.
    """

    def __init__(self, ranks: Ranks, source: Noise, plan: StepPlan, spending: Spending, loader: LogicalBatches) -> None:
        self._ranks, self._source, self._plan = ranks, source, plan
        self._spending, self._loader = spending, loader
        self.mode, self.private = source.mode, source.private
        self.begin(0)

    def begin(self, step: int) -> None:
        """A new mechanism, whose first step is the model's step of that number."""
        self.end()
        self._plan.rename(step, self._ranks.led(new_name))
        self._process, chosen = os.getpid(), self._plan.correlation
        # None where noise is independent.
        self._history: Any = None if chosen is None else history_of(chosen.matrix, chosen.steps)
        _going_on[self._plan.mechanism] = self

    def end(self) -> None:
        """Takes no further step of its mechanism, which another engine may then go on with."""
        if _going_on.get(self._plan.mechanism) is self:
            del _going_on[self._plan.mechanism]

    def charge(self, settings: StepSettings) -> None:
        """`Spending.charge`, under the mechanism's name; after an interruption or a fork under a new one."""
        if self._is_broken():
            self.begin(self._plan.began + self._charged())
        self._spending.charge(replace(settings, event=within(settings.event, self._plan.mechanism)))

    def _is_broken(self) -> bool:
        """Whether no step can follow the last one: its noise was interrupted on a rank, or this is a fork."""
        own = self._process != os.getpid() or not (self._history is None or self._history.whole)
        return any(self._ranks.all_gathered(own))

    def _charged(self) -> int:
        """How many steps of this mechanism were charged."""
        return self._spending.steps_of(self._plan.mechanism)

    def release(self, sums: Sequence[Tensor], std: float, divisor: float = 1.0) -> list[Tensor]:
        """See `Noise.release`; the noise of steps that were charged and not released is drawn and dropped."""
        if self._history is None:
            return self._source.release(sums, std, divisor)
        while self._history.step < self._charged() - 1:
            self._history.skip(self._source, std)
        return self._history.release(self._source, sums, std, divisor)

    @property
    def growth(self) -> float:
        """See `Noise.growth`."""
        return 1.0 if self._history is None else self._history.growth(max(1, self._charged()))

    @property
    def _shards(self) -> Sharding | None:
        """Whose parts the history is of; None where the leading rank has all of it."""
        return self._ranks.sharding if self._ranks.sharding.sharded and self.private else None

    def state_dict(self, parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
        """For the private part of a checkpoint: the name, the groups, and the history of noise; all ranks ask for it.

        ``parameters`` are those that are trained.
        """
        groups = self._loader.groups
        history = None if self._history is None else self._history.state_dict()
        if history is not None and (shards := self._shards) is not None:
            pairs = zip(history["kept"], parameters, strict=False)  # none before the first step
            whole = self._ranks.whole
            history["kept"] = [torch.stack([whole(shards.shard_of(each, p)) for each in kept]) for kept, p in pairs]
        return {
            "name": self._plan.mechanism,
            "began": self._plan.began,
            "groups": None if groups is None else torch.from_numpy(groups),
            "history": history,
            "broken": self._is_broken(),
        }

    def restore(
        self, state: Mapping[str, Any] | None, saved: Runs, step: int, parameters: Sequence[nn.Parameter]
    ) -> None:
        """Goes on with a checkpoint's mechanism; begins a new one where steps were charged to it since, or none could
        follow its last one.

        Args:
            state: what `state_dict` gave; None: there is none.
            saved: what the checkpoint says was charged.
            step: the number of the model's next step.
            parameters: as for `state_dict`.
        """
        self.begin(step)
        if state is None:
            return
        if state["groups"] is not None and self._loader.groups is not None:
            self._loader.groups[:] = state["groups"].numpy()
        # Of engines that share a ledger one alone goes on: their steps would be counted as if one followed another.
        taken = self._spending.ledger is not None and state["name"] in _going_on
        charged = self._spending.steps_of(state["name"], everyone=True) != steps_of(state["name"], saved)
        if any(self._ranks.all_gathered(taken)) or charged or state.get("broken", False):
            return
        self.end()
        self._plan.rename(state["began"], state["name"])
        _going_on[state["name"]] = self
        if self._history is None or (history := state["history"]) is None:
            return
        if (shards := self._shards) is not None:
            pairs = zip(history["kept"], parameters, strict=False)
            parts = [torch.stack([local_part(shards.part(each, p)) for each in kept]) for kept, p in pairs]
            self._history.load_state_dict({**history, "kept": parts}, parameters)
        elif self._ranks.leads:
            self._history.load_state_dict(history, parameters)
