"""Refuses to go on where trained parameters moved outside of charged steps; torch's version counters show that."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ghostclip.errors import PrivacyError, UnsupportedModelError
from ghostclip.sharding.detection import check_sharding, is_fully_sharded
from ghostclip.sharding.plain import Sharding

__all__ = ["UpdateCheck", "held_parameters"]


class UpdateCheck:
    """Knows the versions of a model's parameters after the last charged step, and refuses to go on from others.

    Every change that torch counts is seen: another optimizer's step, ``copy_``, ``load_state_dict``, a parameter or a
    type exchanged for another. Not seen are values written through ``parameter.data``, and those that fused optimizers
    write, which torch doesn't count. Frozen parameters may change.

    Parameters that a model gets later are not accepted in their place. Of a sharded model shards are watched, whichever
    Parameters are in their places.

    Attributes:
        left: (version, where its values lie) of each parameter after the last charged step; [] before the first.
    """

    def __init__(self, model: nn.Module, sharding: Sharding) -> None:
        self._model, self._sharding = model, sharding
        self._names = [name for name, _ in model.named_parameters()]
        self._parameters = list(model.parameters())
        self._types = [parameter.dtype for parameter in self._parameters]
        self._look_around()
        self.left: list[tuple[int, int]] = []
        # Of each parameter, with where its values lie; None: nothing was trained yet, or a step is under way.
        self._versions: list[int] | None = None
        self._addresses: list[int] = []

    def _look_around(self) -> None:
        """Remembers which parameters and submodules each module has."""
        self._owners: list[dict[str, Any]] = []
        for module in self._model.modules():
            self._owners += (module._parameters, module._modules)
        # They are held, so that no other object gets the id of one that is gone.
        self._held: list[Any] = [value for owner in self._owners for value in owner.values()]
        self._ids = self._ids_now()

    def _ids_now(self) -> list[int]:
        found = [*map(id, chain.from_iterable(map(dict.values, self._owners)))]
        if stepped := self._sharding.stepped:
            return [id(stepped[each]) if each in stepped else each for each in found]
        return found

    def begin(self) -> None:
        """A logical batch begins; at the first one, and after a step that failed, parameters are as they may be."""
        if self._versions is None:
            self.accept()

    def expect(self) -> None:
        """A step was charged: what moves from now on until `accept` is its update."""
        self._versions = None

    def accept(self) -> None:
        """Takes the parameters as they are for those of the last charged step."""
        self._addresses = self._sharding.addresses(self._parameters)
        self._versions = self._sharding.versions(self._parameters)
        self.left[:] = zip(self._versions, self._addresses, strict=True)

    def has_any_as(self, left: Sequence[tuple[int, int]]) -> bool:
        """Whether a trained parameter is as the model's engine before this one left it."""
        now = zip(self._sharding.versions(self._parameters), self._sharding.addresses(self._parameters), strict=True)
        both = zip(self._parameters, now, left, strict=False)
        return any(this == that and parameter.requires_grad for parameter, this, that in both)

    def check(self) -> None:
        """Raises PrivacyError where a trained parameter isn't as the last charged step left it."""
        self.check_model()
        self.check_written()
        if self._versions is not None and (now := self._sharding.addresses(self._parameters)) != self._addresses:
            self._refuse_other(now, self._addresses)

    def check_written(self) -> None:
        """Raises PrivacyError where a trained parameter was written to since the last charged step.

        Within a logical batch values may lie elsewhere: recurrent layers on a GPU gather weights in the forward.
        """
        if self._versions is not None and (now := self._sharding.versions(self._parameters)) != self._versions:
            self._refuse_other(now, self._versions)

    def _refuse_other(self, now: list[int], before: list[int]) -> None:
        """Raises PrivacyError where the number of a trained parameter differs."""
        for name, parameter, this, that in zip(self._names, self._parameters, now, before, strict=True):
            if this != that and parameter.requires_grad:
                raise PrivacyError(
                    f"the parameter {name!r} was changed outside of this engine's charged steps: after loading weights "
                    "that this training released (of the best epoch, an average), or another change without private "
                    "data (a max-norm constraint), call engine.accept_parameters(); else (another engine or optimizer, "
                    "a clamp, a swap of weights) step with this engine's optimizer alone, the outermost as Lookahead, "
                    "and use torch.nn.utils.parametrize where a forward writes weights"
                )

    def check_model(self) -> None:
        """Raises PrivacyError unless the model has the parameters it had when the engine was built, of their types."""
        if self._ids_now() != self._ids:
            self._refuse_others()
            self._look_around()
        now = [*map(attrgetter("dtype"), self._parameters)]
        if now == self._types:
            return
        for name, this, that in zip(self._names, now, self._types, strict=True):
            if this != that:
                raise PrivacyError(
                    f"the parameter {name!r} is {this} and was {that} when the engine was built, for which its sums "
                    "are made; call engine.detach(), then build optimizer and engine anew, with the same ledger=... "
                    "so that both count"
                )

    def _refuse_others(self) -> None:
        """Raises PrivacyError for a parameter that was exchanged, added or removed; other modules may come and go.

        UnsupportedModelError where that is because the model was sharded.
        """
        check_sharding(self._model)
        before = dict(zip(self._names, self._parameters, strict=True))
        now = {name: self._sharding.stepped.get(id(p), p) for name, p in self._model.named_parameters()}
        for name in [*before, *now]:
            if now.get(name) is not before.get(name):
                if is_fully_sharded(self._model) and not hasattr(before.get(name), "device_mesh"):
                    raise UnsupportedModelError(
                        f"{name} was sharded by fully_shard after the engine was built; build optimizer and engine "
                        "after it, with the same ledger=... so that both count"
                    )
                raise PrivacyError(
                    f"the model's parameter {name!r} is another object than when the engine was built (by an "
                    "assignment, load_state_dict(assign=True) or another module), so it would not be trained; copy "
                    "values into parameters instead, or call engine.detach() and build optimizer and engine anew, with "
                    "the same ledger=... so that both count"
                )


def held_parameters(owned: Set[nn.Parameter], optimizer: Optimizer) -> dict[nn.Parameter, None]:
    """The optimizer's parameters, in its order; PrivacyError where one isn't among those that the model ``owned``."""
    held: dict[nn.Parameter, None] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in owned:
                raise PrivacyError(
                    f"the optimizer holds a parameter of shape {list(parameter.shape)} (group {number}) that the model "
                    "doesn't own, so its gradient would be neither clipped nor noisy; build the optimizer from "
                    "model.parameters() once the model is complete; a loss function whose parameters are to be trained "
                    "must be a submodule of the model"
                )
            held[parameter] = None
    return held
