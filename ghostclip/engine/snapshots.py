"""Saves an engine to a checkpoint and restores it, where the two belong together."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ghostclip import checkpoint
from ghostclip.checkpoint import packed, unpacked
from ghostclip.checkpoint.contents import (
    configuration_of,
    describe_model,
    in_words,
    optimizer_state,
    put_optimizer_state,
    random_states,
    set_random_states,
)
from ghostclip.engine.budget import Spending
from ghostclip.engine.charges import Noises
from ghostclip.engine.mechanism import Mechanism
from ghostclip.engine.step import LogicalStep
from ghostclip.errors import LedgerError, PrivacyError
from ghostclip.events import Event
from ghostclip.ledger import Head
from ghostclip.ledger.records import decoded, encoded
from ghostclip.noise import Noise
from ghostclip.sampling import LogicalBatches

__all__ = ["Restored", "Snapshots", "Stateful"]

log = logging.getLogger("ghostclip")

# Where `Snapshots.state_dict` keeps what is no tensor, as JSON.
PROGRESS = "progress"
# So many differences are told; the rest is counted.
SHOWN = 4


class Stateful(Protocol):
    """Anything that gives its state as plain data and tensors, and takes it back: a learning rate scheduler, say."""

    def state_dict(self) -> Any:
        """The state."""

    def load_state_dict(self, state: Any) -> Any:
        """Takes it back."""


@dataclass(frozen=True)
class Restored:
    """The position in training after `PrivacyEngine.restore`.

    Attributes:
        path: the folder that was read: the one asked for, or its ``.previous``.
        steps: the number of steps that the model took. `PrivacyEngine.steps_taken` also counts steps charged elsewhere.
        epoch: the number of finished epochs.
        steps_in_epoch: the number of logical batches taken in the current epoch. The next loop over
            ``engine.batches()`` gives the rest.
    """

    path: Path
    steps: int
    epoch: int
    steps_in_epoch: int


@dataclass
class Snapshots:
    """Saves and restores an engine of these parts. Of several ranks the leading one writes, and all read.

    ``agreed`` are arguments {name: value, as JSON} that must be the same when the checkpoint is restored. The state of
    the clipping policy is kept where it has ``state_dict`` and ``load_state_dict``. ``mechanism`` is None where
    steps are independent.
    """

    steps: LogicalStep
    loader: LogicalBatches
    noise: Noise
    spending: Spending
    agreed: dict[str, Any]
    mechanism: Mechanism | None = None

    def __post_init__(self) -> None:
        release, clipper = self.steps.release, self.steps.release.clipper
        self.model, self.sharding = clipper.model, clipper.sharding
        self.policy: Any = clipper.clipping
        self.optimizer, self.ranks = release.optimizer, release.ranks
        # Steps that were charged and that the model has not behind it.
        self._elsewhere = 0

    @property
    def model_steps(self) -> int:
        """How many steps the model has behind it; `Spending.steps` counts those charged since a checkpoint, too."""
        return self.spending.steps - self._elsewhere

    def start_alike(self) -> None:
        """All ranks begin with the leading one's model; raises PrivacyError where they were built differently."""
        if self.ranks.size > 1:
            facts = self._configuration() | describe_model(self.model.state_dict())
            facts |= {"batch_size": self.loader.batch_size, "unit_ids": self.loader.units_digest}
            facts["the rows of the data set (a digest of Subset.indices)"] = self.loader.rows_digest()
            facts["the state of clipping"] = in_words(self._policy_state())
            self.ranks.check_alike(facts, "when engines are built")
            self.ranks.start_alike(self.model)

    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Stateful] | None) -> None:
        """See `PrivacyEngine.save`."""
        self.ranks.agreed(self._check_savable)
        states = self.ranks.all_gathered(random_states())
        # All ranks ask together for what is sharded.
        model = {name: self.ranks.whole(value) for name, value in self.model.state_dict().items()}
        optimizer = tree_map(self.ranks.whole, optimizer_state(self.optimizer)) if self.sharding.sharded else None
        mechanism = None if self.mechanism is None else self.mechanism.state_dict(self._trained())

        def write() -> None:
            _, _, sampler = self._position()
            private = {
                "sampler": None if sampler is None else dict(sampler),
                "noise": self.noise.positions(),
                "users": self.loader.units_digest,
                "rows": self._rows_in_turn(),
                "random": states[0],
                "random of other ranks": states[1:],
                "extra": {name: thing.state_dict() for name, thing in _checked(extra).items()},
                "mechanism": mechanism,
            }
            # What isn't sharded is asked for here alone: other ranks have none of ZeroRedundancyOptimizer's.
            own = optimizer_state(self.optimizer) if optimizer is None else optimizer
            checkpoint.save(path, {**self.progress(), "model": model, "optimizer": own}, private)

        self.ranks.led(write)

    def _check_savable(self) -> None:
        """Raises PrivacyError where private sums would be stored, or parameters that moved outside of charged steps."""
        self.steps.updates.check()
        self.steps.check_between("engine.save()")

    def _position(self) -> tuple[int, int, Mapping[str, Any] | None]:
        """Where sampling stands; a batch that was handed out and interrupted before its step comes again."""
        return self.loader.position(again=self.steps.release.lacks_step)

    def progress(self) -> dict[str, Any]:
        """What was spent and where training stands: plain data, and what the clipping policy learnt."""
        epoch, taken, _ = self._position()
        return {
            "configuration": self._configuration(),
            "progress": {"steps": self.model_steps, "epoch": epoch, "steps_in_epoch": taken},
            "spent": {run: [[encoded(e), n] for e, n in spent.items()] for run, spent in self.spending.runs.items()},
            "ledger": self.spending.head,
            "clipping": self._policy_state(),
            "noises": [list(each) for each in self.spending.noises],
            "untested": self.steps.self_check.untested,
        }

    def state_dict(self) -> dict[str, Any]:
        """See `PrivacyEngine.state_dict`. One text, whichever the state: stores of others ask for the same keys."""
        self.sharding.reshard_between_batches("engine.state_dict()")
        tensors: dict[str, Tensor] = {}
        text = json.dumps(packed(self.progress(), tensors, "clipping"), allow_nan=False)
        return {PROGRESS: text, **tensors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `PrivacyEngine.load_state_dict`."""
        place = "of the state_dict"

        def check() -> Mapping[str, Any]:
            self.steps.check_between("engine.load_state_dict()")
            try:
                found: dict[str, Any] = unpacked(json.loads(state[PROGRESS]), state)
                _spent_in(found)
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                raise PrivacyError("load_state_dict() takes what engine.state_dict() gave, and got another") from error
            self._check_configuration(place, found["configuration"], self._configuration(), "weights alone")
            self._check_state(place, found)
            return found

        found = self.ranks.agreed(check)
        self._check_alike(found, "when they load a state")
        self._count(found)
        self._resume_mechanism(None, found)
        self.loader.resume(found["progress"]["epoch"], 0, None)

    def _count(self, found: Mapping[str, Any]) -> None:
        """Takes in what was spent with which noise, whether losses were tested, and what the clipping policy learnt."""
        self.spending.add(_spent_in(found), _noises_in(found))
        self._elsewhere = self.spending.steps - found["progress"]["steps"]
        self.steps.self_check.went_on |= found.get("untested", False)  # older checkpoints don't say
        if found["clipping"] is not None:
            self.policy.load_state_dict(found["clipping"])

    def restore(self, path: str | os.PathLike[str], extra: Mapping[str, Stateful] | None) -> Restored:
        """See `PrivacyEngine.restore`. Everything is checked before anything is changed."""
        extra = _checked(extra)
        stored = self.ranks.agreed(lambda: self._read(path, extra))
        public, private = stored.public, stored.private
        self._check_alike(public, "when they restore it (from a folder that all of them see)")
        # First of all, so that whatever fails after it, nothing that was spent is forgotten.
        self._count(public)
        self.steps.release.forget()
        self.steps.updates.expect()
        own = self.model.state_dict()
        self.model.load_state_dict(
            {name: self.sharding.part(each, own[name]) for name, each in public["model"].items()}
        )
        put_optimizer_state(self.optimizer, self._parts_of_state(public["optimizer"]))
        for name, thing in extra.items():
            thing.load_state_dict(private["extra"][name])
        progress = public["progress"]
        self._resume_mechanism(private.get("mechanism"), public)
        self.loader.resume(progress["epoch"], progress["steps_in_epoch"], private["sampler"])
        self.noise.resume(private["noise"])
        states = [private["random"], *private.get("random of other ranks", [])]
        if self.ranks.rank < len(states):
            set_random_states(states[self.ranks.rank])
        self.steps.updates.accept()
        return Restored(stored.place, **progress)

    def _check_alike(self, found: Mapping[str, Any], where: str) -> None:
        """Raises PrivacyError unless all ranks go on from the same steps and spending."""
        self.ranks.check_alike({"the steps of a checkpoint": found["progress"], "what it spent": found["spent"]}, where)

    def _resume_mechanism(self, state: Mapping[str, Any] | None, public: Mapping[str, Any]) -> None:
        """Goes on with the checkpoint's mechanism, or begins a new one where it was charged for more steps since."""
        if self.mechanism is not None:
            self.mechanism.restore(state, _spent_in(public), self.model_steps, self._trained())
            self.steps.release.renew_settings()

    def _trained(self) -> list[nn.Parameter]:
        """In the order of a release's sums."""
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    def _parts_of_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """An optimizer's state of whole parameters, as it is of this rank's."""
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        held = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        parameter_of = dict(zip(numbers, held, strict=True))
        parts = dict(state["state"])
        for number in parts.keys() & parameter_of.keys():
            parts[number] = tree_map(partial(self.sharding.part, like=parameter_of[number]), parts[number])
        return {**state, "state": parts}

    def _policy_state(self) -> Any:
        """What the clipping policy learnt; None where it learns nothing."""
        return self.policy.state_dict() if _is_stateful(self.policy) else None

    def _read(self, path: str | os.PathLike[str], extra: Mapping[str, Stateful]) -> checkpoint.Stored:
        """The checkpoint; PrivacyError unless it is of an engine like this one and no logical batch is half done."""
        self.steps.check_between("engine.restore()")
        stored = checkpoint.load(path)
        place, public = stored.place, stored.public
        there = {**public["configuration"], **describe_model(public["model"])}
        here = {**self._configuration(), **describe_model(self.model.state_dict())}
        alone = f"the weights alone from {place / 'model.safetensors'}"
        self._check_configuration(place, there, here, alone)
        if set(stored.private["extra"]) != set(extra):
            raise PrivacyError(
                f"the checkpoint {place} was saved with extra={sorted(stored.private['extra'])}, and restore got "
                f"{sorted(extra)}; give it the same names, each with an object that takes the state back"
            )
        if stored.private["users"] != self.loader.units_digest:
            raise PrivacyError(
                f"in the checkpoint {place} users have other rows than here, and a user's rows would count as those of "
                "several; give unit_ids and max_rows_per_unit as they were then"
            )
        self._check_rows(place, stored.private)
        self._check_state(place, public)
        return stored

    def _rows_in_turn(self) -> str | None:
        """Tells other rows of the data set apart, where examples take turns; None where they don't."""
        return None if self.loader.groups is None else self.loader.rows_digest()

    def _check_rows(self, place: Any, private: Mapping[str, Any]) -> None:
        """Raises PrivacyError where examples would take turns that others had before a checkpoint."""
        if self.loader.groups is None:
            return
        if "rows" not in private:
            log.warning(
                "the checkpoint %s, of an earlier version, doesn't say which rows a Subset picked: epsilon holds only "
                "if they are the same, in the same order", place,
            )  # fmt: skip
        elif private["rows"] != self._rows_in_turn():
            raise PrivacyError(
                f"in the checkpoint {place} the data set picked other rows, or the same in another order, and examples "
                "would have more turns than are charged; pick them as they were then: seed random_split "
                "(generator=torch.Generator().manual_seed(...)) or keep Subset.indices"
            )

    @staticmethod
    def _check_configuration(place: Any, there: Mapping[str, Any], here: Mapping[str, Any], alone: str) -> None:
        """Raises PrivacyError where a checkpoint is of another run; ``alone``: what may be loaded of it."""
        differences = [
            f"{name} is {there.get(name, 'not there')} in it and {here.get(name, 'not there')} here"
            for name in dict.fromkeys([*there, *here])
            if there.get(name) != here.get(name) or (name in there) != (name in here)
        ]
        if differences:
            more = f" and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
            raise PrivacyError(
                f"the checkpoint {place} is of another configuration: {'; '.join(differences[:SHOWN])}{more}. Build "
                f"model, optimizer and engine as they were then; to train on with others, load {alone}, and let one "
                "ledger=... count what both runs spend"
            )

    def _check_state(self, place: Any, found: Mapping[str, Any]) -> None:
        """Raises PrivacyError or LedgerError unless clipping policy and ledger go with those of a checkpoint.

        What it spent must be in the ledger that the engine has.
        """
        if (found["clipping"] is not None) != _is_stateful(self.policy):
            raise PrivacyError(f"the checkpoint {place} and the clipping policy differ in whether they have a state")
        if not self.ranks.leads or found["ledger"] is None:
            return
        if (ledger := self.spending.ledger) is None:
            raise LedgerError(
                f"the checkpoint {place} belongs to a run with a ledger, in which more may have been charged since; "
                "build the engine with ledger=... and that file"
            )
        if not ledger.contains(Head(**found["ledger"])):
            raise LedgerError(
                f"the ledger {ledger.path} doesn't have what it had when the checkpoint {place} was saved: it is "
                "another one, or an older copy; put the file of that run back, or what it spent is forgotten"
            )

    def _configuration(self) -> dict[str, Any]:
        data = {"sampling": in_words(self.loader.scheme), "the number of examples": self.loader.dataset_size}
        return configuration_of(self.model, self.optimizer, self.policy) | data | self.agreed


def _spent_in(found: Mapping[str, Any]) -> dict[str, Counter[Event]]:
    """Of each run how often each event was charged."""
    return {run: Counter({decoded(event): n for event, n in own}) for run, own in found["spent"].items()}


def _noises_in(found: Mapping[str, Any]) -> Noises:
    """Of all that was charged; an older version left generators to the ledger, if there was one."""
    if "noises" in found:
        return [(mode, generator) for mode, generator in found["noises"]]
    return [(found["configuration"]["noise"], "")] if found["ledger"] is None and any(found["spent"].values()) else []


def _is_stateful(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def _checked(extra: Mapping[str, Stateful] | None) -> dict[str, Stateful]:
    """The objects by name; TypeError when they aren't such."""
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise TypeError(f"extra must be a dict {{name: object with state_dict and load_state_dict}}; got {extra!r}")
    for name, thing in extra.items():
        if not isinstance(name, str) or not _is_stateful(thing):
            raise TypeError(
                f"extra[{name!r}] must be an object with state_dict() and load_state_dict(), like a learning rate "
                f"scheduler; got {type(thing).__name__}"
            )
    return dict(extra)
