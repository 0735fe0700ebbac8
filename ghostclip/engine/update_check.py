"""Whether the trained parameters moved in charged steps only, by torch's version counters."""

from __future__ import annotations

import operator
from typing import Any, NoReturn

from torch import nn

from ghostclip.errors import GradientLeakError, PrivacyError

__all__ = ["UpdateCheck"]


class UpdateCheck:
    """Knows the versions of a model's parameters after the last charged step, and refuses to go on from others.

    Every change that torch counts is seen: another optimizer's step, ``copy_``, ``load_state_dict``, a parameter or a
    type exchanged for another. Values written through ``parameter.data`` are not. Frozen parameters may change.

    Args:
        model: whose parameters are watched, as they are now: later ones are not accepted in their place.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._named = list(model.named_parameters())
        self._types = [parameter.dtype for _, parameter in self._named]
        self._places = self._now()
        # (version, address) of each parameter; None: nothing was trained yet, or a charged step is under way.
        self._known: list[tuple[int, int]] | None = None

    def _now(self) -> list[tuple[dict[str, Any], list[Any]]]:
        """Each module's parameters and submodules: the dicts they are in, and what these hold."""
        owners = [found for module in self._model.modules() for found in (module._parameters, module._modules)]
        return [(owner, list(owner.values())) for owner in owners]

    def begin(self) -> None:
        """A logical batch begins; of the first one, and after a step that failed, the parameters are as they may be."""
        if self._known is None:
            self.accept()

    def expect(self) -> None:
        """A step was charged: what moves from now on until `accept` is its update."""
        self._known = None

    def accept(self) -> None:
        """Takes the parameters as they are for those of the last charged step."""
        self._known = [(parameter._version, parameter.data_ptr()) for _, parameter in self._named]

    def check(self) -> None:
        """Raises PrivacyError where a trained parameter isn't as the last charged step left it."""
        self.check_model()
        if (name := self._moved(by_address=True)) is not None:
            self._refuse(name)

    def check_within(self, gathered: int) -> None:
        """`check` within a logical batch, before its step.

        Args:
            gathered: how many physical batches were, whose sums may have been stepped with.

        Raises:
            GradientLeakError: they may have been.
            PrivacyError: as `check`.
        """
        self.check_model()
        # Not by address: recurrent layers on a GPU may gather their weights in one piece of memory in the forward.
        if (name := self._moved(by_address=False)) is None:
            return
        if not gathered:
            self._refuse(name)
        raise GradientLeakError(
            f"the parameter {name!r} was changed between engine.backward() and the step. If another optimizer did "
            "that, it stepped with clipped sums that have no noise yet, which nothing charges: don't use this model. "
            "Give all parameters to the engine's optimizer, and change them after its step only"
        )

    def _moved(self, by_address: bool) -> str | None:
        """The name of a trained parameter that was written to, or has its values elsewhere, since `accept`."""
        for (name, parameter), (version, address) in zip(self._named, self._known or (), strict=False):
            moved = parameter._version != version or (by_address and parameter.data_ptr() != address)
            if moved and parameter.requires_grad:
                return name
        return None

    def _refuse(self, name: str) -> NoReturn:
        raise PrivacyError(
            f"the parameter {name!r} was changed outside of this engine's charged steps (by a second optimizer, an "
            "assignment, or an optimizer without the engine's hooks), so epsilon may not cover the model. Step with "
            "the engine's optimizer only; where only public data or released weights went into the change, call "
            "engine.accept_parameters()"
        )

    def check_model(self) -> None:
        """Raises PrivacyError unless the model has the parameters it had when the engine was built, of their types."""
        if not all(len(owner) == len(held) and all(map(operator.is_, owner.values(), held))
                   for owner, held in self._places):  # fmt: skip
            self._refuse_others()
            self._places = self._now()
        for (name, parameter), dtype in zip(self._named, self._types, strict=True):
            if parameter.dtype != dtype:
                raise PrivacyError(
                    f"the parameter {name!r} is {parameter.dtype} and was {dtype} when the engine was built, for which "
                    "its sums are made; call engine.detach(), then build optimizer and engine anew, with the same "
                    "ledger=... so that both count"
                )

    def _refuse_others(self) -> None:
        """Raises PrivacyError for a parameter that was exchanged, added or removed; other modules may come and go."""
        now, before = dict(self._model.named_parameters()), dict(self._named)
        for name in [*before, *now]:
            if now.get(name) is not before.get(name):
                raise PrivacyError(
                    f"the model's parameter {name!r} is another object than when the engine was built (by an "
                    "assignment, load_state_dict(assign=True) or another module), so it would not be trained; copy "
                    "values into parameters instead, or call engine.detach() and build optimizer and engine anew, with "
                    "the same ledger=... so that both count"
                )
