"""Says once what was changed in mid-run and has training do something else than before."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

__all__ = ["MidRunChanges"]

log = logging.getLogger("ghostclip")

EVAL_MODE = "a private step was taken in eval mode, without dropout: call model.train() after an evaluation"
FROZEN = "%d of the parameters that were trained so far are frozen: they get no update any more"
OTHER_STATE = (
    "optimizer.load_state_dict() put another state into the optimizer in mid-run, whose momentum is not of the last "
    "steps: engine.restore(path) puts back model, optimizer and what was spent together"
)


class MidRunChanges:
    """Compares each step with the one before: the model's mode, how many parameters are trained, optimizer state.

    Args:
        model: in training.
        optimizer: of the engine.
        leads: whether this process says it; others that train with it don't.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, leads: bool) -> None:
        self._model, self._optimizer = model, optimizer
        self._said = set[str]() if leads else {EVAL_MODE, FROZEN, OTHER_STATE}
        self._had_train_mode = False
        self.forget()

    def forget(self) -> None:
        """The next step is compared with none: a checkpoint is put back."""
        self._trained, self._state = 0, None

    def look(self, stepped: Sequence[nn.Parameter]) -> None:
        """A step is being taken, which moves the parameters ``stepped``."""
        if self._model.training:
            self._had_train_mode = True
        elif EVAL_MODE not in self._said and (self._had_train_mode or _has_dropout(self._model)):
            self._say(EVAL_MODE)
        if len(stepped) < self._trained:
            self._say(FROZEN, self._trained - len(stepped))
        state: Any = getattr(self._optimizer, "state", None)
        # Optimizers around others may make theirs anew whenever they are asked.
        if self._state is not None and state is not self._state and state is getattr(self._optimizer, "state", None):
            self._say(OTHER_STATE)
        self._trained, self._state = len(stepped), state

    def _say(self, message: str, *numbers: int) -> None:
        if message not in self._said:
            self._said.add(message)
            log.warning(message, *numbers)


def _has_dropout(model: nn.Module) -> bool:
    return any(isinstance(module, _DropoutNd) and module.p > 0 for module in model.modules())
