"""Losses of a batch and of variants of it, from the same random numbers and without a trace in the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ghostclip.clipper.replay import Replay
from ghostclip.self_check.batch_rows import BatchRows

__all__ = ["TrialLosses"]

# By the narrowest type: share of the largest loss by which one must move to be another, and the least that counts.
ROUNDING = {torch.float64: (1e-9, 1e-14), torch.float32: (1e-5, 1e-6)}
ROUNDING_OF_HALVES = (5e-2, 1e-4)
# Kernels of accelerators may round products to fewer digits than their type has (TF32).
ROUNDING_OF_DEVICES = (1e-3, 1e-5)

log = logging.getLogger("ghostclip")

LossFunction = Callable[[nn.Module, Any], Tensor]


class _Outcome(NamedTuple):
    """The losses of a batch, the buffers that its forward wrote to, by their names, and the random states after it."""

    losses: Tensor
    written: dict[str, Tensor]
    random_state: tuple[Any, ...]


class TrialLosses:
    """The losses of a batch and, from the same state of the model and of random numbers, those of other rows of it.

    Graphs are recorded, since the loss function may need one of its own.

    Args:
        loss_fn: (model, batch) -> losses [B].
        model: in training.
        batch: whose rows are taken.

    Attributes:
        loss_fn, model, batch: as given.
        every: the index of all its rows.
        first: the outcome for these.
        draws: whether random numbers are drawn for it.
    """

    def __init__(self, loss_fn: LossFunction, model: nn.Module, batch: BatchRows) -> None:
        self.loss_fn, self.model, self.batch = loss_fn, model, batch
        self._replay = Replay(model)
        self._begins = self._replay.state()
        self._quiet: set[nn.Module] = set()
        self.every = torch.arange(batch.rows)
        self._rounding = ROUNDING[torch.float32]
        self._start()
        self._rounding = ROUNDING.get(self.first.losses.dtype, self._rounding)

    def _start(self) -> None:
        self.first = self.run(self.every)
        self.draws = self.first.random_state != self._begins

    def replayed(self, work: Callable[[], Any]) -> Any:
        """What ``work`` returns in the state in which all batches are tried."""
        with self._replay.again(gradients=True):
            for module in self._quiet:
                module.training = False
            return work()

    def run(self, index: Tensor, choice: int = 0, watch: Any = None) -> _Outcome:
        """The outcome for the rows ``index`` (see `BatchRows.taken`)."""

        def outcome() -> _Outcome:
            versions = {id(buffer): buffer._version for buffer in self.model.buffers()}
            with watch or nullcontext():
                losses = self.loss_fn(self.model, self.batch.taken(index, choice)).detach()
            buffers = self.model.named_buffers()
            written = {name: each.clone() for name, each in buffers if versions.get(id(each)) != each._version}
            return _Outcome(losses, written, self._replay.state())

        return self.replayed(outcome)

    def moves(self, index: Tensor, kept: Tensor | None = None, choice: int = 0) -> bool:
        """Whether losses, those in the rows ``kept``, differ for the rows ``index`` by more than rounding may do."""
        losses, before = self.run(index, choice).losses, self.first.losses
        if losses.shape != before.shape:
            return True
        largest = float(before.nan_to_num(nan=0, posinf=0, neginf=0).abs().max())
        off = max(self._rounding[0] * largest, self.floor)
        same = torch.isclose(losses, before, rtol=0, atol=off, equal_nan=True)
        return not bool((same if kept is None else same[kept.to(same.device)]).all())

    @property
    def floor(self) -> float:
        """The least difference that is more than rounding."""
        return self._rounding[1]

    def watched(self, index: Tensor) -> tuple[set[torch.dtype], Any]:
        """Floating-point types of all that is computed for the rows ``index``, and what is drawn: sizes and states.

        Nothing where that can't be watched, as in compiled functions.
        """
        seen = _Seen()
        try:
            return seen.types, (seen.drawn, self.run(index, watch=seen).random_state)
        except Exception as error:
            log.info("what losses are computed of can't be watched: %s: %s", type(error).__name__, error)
            return set(), None

    def allow_rounding(self) -> None:
        """From now on differences count that are more than the narrowest type rounds that losses come through."""
        parameters = list(self.model.parameters())
        types = self.watched(self.every)[0] | {self.first.losses.dtype, *(each.dtype for each in parameters)}
        found = [ROUNDING.get(dtype, ROUNDING_OF_HALVES) for dtype in types]
        on_cpu = all(each.is_cpu for each in parameters)
        self._rounding = max(found if on_cpu else [*found, ROUNDING_OF_DEVICES])

    def quieten(self) -> None:
        """From now on modules that draw random numbers themselves, not by their children, are in eval mode."""
        if not self.draws:
            return
        running: list[nn.Module] = []
        state = self._begins

        def note() -> None:
            nonlocal state
            if (now := self._replay.state()) != state:
                state = now
                self._quiet.update(running[-1:])

        def enter(module: nn.Module, *_: Any) -> None:
            note()
            running.append(module)

        def leave(module: nn.Module, *_: Any) -> None:
            note()
            running.pop()

        with ExitStack() as hooks:
            for module in self.model.modules():
                hooks.enter_context(module.register_forward_pre_hook(enter))
                hooks.enter_context(module.register_forward_hook(leave))
            self.run(self.every)
        self._start()


class _Seen(TorchDispatchMode):
    """Notes the floating-point types of all that is computed, and the shapes of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()
        self.drawn: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
        self.types.update(each.dtype for each in tensors if each.is_floating_point())
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn += [each.shape for each in tensors]
        return found
