"""Says once what a training shows nowhere else: few finite examples, and what was changed in mid-run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from ghostclip.clipper import ClippingResult

__all__ = ["Notices"]

log = logging.getLogger("ghostclip")

# A warning is due where a smaller share of a logical batch's examples than this is finite.
SHARE = 0.75
NOT_FINITE = (
    "%s of the %d examples of a logical batch had a finite loss and gradient (private: not for release), so %s; look "
    "for NaN and infinity in the data and the parameters, for overflow or log(0) in the loss, and for a learning rate "
    "that is too large. Later ones aren't named"
)
EVAL_MODE = "a private step was taken in eval mode, without dropout: call model.train() after an evaluation"
FROZEN = "%d of the parameters that were trained so far are frozen: they get no update any more"
OTHER_STATE = (
    "optimizer.load_state_dict() put another state into the optimizer in mid-run, whose momentum is not of the last "
    "steps: engine.restore(path) puts back model, optimizer and what was spent together"
)


class Notices:
    """Counts examples with a finite loss and gradient, and compares each step with the one before.

    It changes no sum, and takes a host sync only for physical batches of which an example was left out. ``facts`` are
    how many examples were seen of the logical batch, and how many of them were finite. One process of several ``leads``
    and says it.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, leads: bool) -> None:
        self._model, self._optimizer, self._leads = model, optimizer, leads
        self._said = set[str]()
        self._had_train_mode = False
        self.begin()
        self.forget()

    def begin(self) -> None:
        """A logical batch starts, or what was gathered of it is dropped."""
        self.facts = (0, 0)

    def forget(self) -> None:
        """The next step is compared with none: a checkpoint is put back."""
        self._trained, self._state = 0, None

    def saw(self, result: ClippingResult, left_out: bool) -> None:
        """A physical batch was gathered, of which no example was left out unless ``left_out``."""
        vectors = list(result.norms.values()) if isinstance(result.norms, dict) else [result.norms]
        seen = finite = len(vectors[0])
        if left_out:
            vectors += [] if result.losses is None else [result.losses]
            finite = int(torch.stack([each.isfinite() for each in vectors]).all(0).sum())
        self.facts = (self.facts[0] + seen, self.facts[1] + finite)

    def agree(self, of_ranks: Sequence[tuple[int, int]]) -> None:
        """Adds up the ``facts`` of all ranks."""
        self.facts = (sum(seen for seen, _ in of_ranks), sum(finite for _, finite in of_ranks))

    def stepping(self, parameters: Sequence[nn.Parameter]) -> None:
        """A step is being taken, which moves these parameters."""
        if self._model.training:
            self._had_train_mode = True
        elif EVAL_MODE not in self._said and (self._had_train_mode or _has_dropout(self._model)):
            self._say(EVAL_MODE)
        if len(parameters) < self._trained:
            self._say(FROZEN, self._trained - len(parameters))
        state: Any = getattr(self._optimizer, "state", None)
        # Optimizers around others may make theirs anew whenever they are asked.
        if self._state is not None and state is not self._state and state is getattr(self._optimizer, "state", None):
            self._say(OTHER_STATE)
        self._trained, self._state = len(parameters), state

    def stepped(self) -> None:
        """The step was taken."""
        seen, finite = self.facts
        if finite < SHARE * seen:
            alone = "the others took no part" if finite else "its step was noise alone, and was charged"
            self._say(NOT_FINITE, f"only {finite}" if finite else "none", seen, alone)

    def _say(self, message: str, *facts: Any) -> None:
        if self._leads and message not in self._said:
            self._said.add(message)
            log.warning(message, *facts)


def _has_dropout(model: nn.Module) -> bool:
    return any(isinstance(module, _DropoutNd) and module.p > 0 for module in model.modules())
