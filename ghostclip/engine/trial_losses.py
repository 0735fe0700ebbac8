"""Losses of batches that are tried out: without a graph, from the same random numbers, and without a trace."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ghostclip.clipper.replay import Replay

__all__ = ["TrialLosses"]

T = TypeVar("T")
# By the narrowest type: share of the largest loss by which one must move to be another, and the least that counts.
ROUNDING = {torch.float64: (1e-9, 1e-14), torch.float32: (1e-5, 1e-6)}
ROUNDING_OF_HALVES = (5e-2, 1e-4)
# Kernels of accelerators may round products to fewer digits than their type has (TF32).
ROUNDING_OF_DEVICES = (1e-3, 1e-5)

log = logging.getLogger("ghostclip")

LossFunction = Callable[[nn.Module, Any], Tensor]


class TrialLosses:
    """The losses of a batch and, from the same state of the model and of random numbers, those of others.

    Args:
        loss_fn: (model, batch) -> losses [B].
        replay: of the model.
        whole: the batch.
        quiet: modules to be in eval mode.
        gradients: whether a graph is recorded.

    Attributes:
        losses: of ``whole``.
        draws: whether random numbers are drawn for it.
        leaves_buffers: whether no buffer is written to or exchanged.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        replay: Replay,
        whole: Any,
        quiet: Sequence[nn.Module] = (),
        gradients: bool = False,
    ) -> None:
        self._loss_fn, self._replay, self._quiet, self.whole = loss_fn, replay, quiet, whole
        self._gradients = gradients
        unchanged = _buffers_unchanged(replay.model)

        def first() -> tuple[Tensor, bool, bool]:
            return loss_fn(replay.model, whole).detach(), replay.drew(), unchanged()

        self.losses, self.draws, self.leaves_buffers = self.replayed(first)
        self._rounding = ROUNDING.get(self.losses.dtype, ROUNDING[torch.float32])

    def replayed(self, work: Callable[[], T]) -> T:
        """What ``work`` returns in the state in which all batches are tried."""
        with self._replay.again(gradients=self._gradients):
            for module in self._quiet:
                module.training = False
            return work()

    def of(self, batch: Any) -> Tensor:
        """The losses of another batch."""
        return self.replayed(lambda: self._loss_fn(self._replay.model, batch).detach())

    def drawn(self, batch: Any) -> tuple[Any, ...]:
        """Which random numbers are drawn for another batch: the sizes, in their order, and the states they leave."""

        def draw() -> tuple[Any, ...]:
            return self._seen(batch).drawn, self._replay.state()

        return self.replayed(draw)

    def _seen(self, batch: Any) -> _Seen:
        """What is computed for a batch; nothing where that can't be watched, as in compiled functions."""
        seen = _Seen()
        try:
            with seen:
                self._loss_fn(self._replay.model, batch)
        except Exception as error:
            log.info("what losses are computed of can't be watched: %s: %s", type(error).__name__, error)
            return _Seen()
        return seen

    def buffers_after(self, batch: Any) -> dict[str, Tensor]:
        """Copies of the model's buffers as another batch leaves them."""

        def buffers() -> dict[str, Tensor]:
            self._loss_fn(self._replay.model, batch)
            return {name: buffer.clone() for name, buffer in self._replay.model.named_buffers()}

        return self.replayed(buffers)

    def moved(self, losses: Tensor, rows: Tensor | None = None) -> bool:
        """Whether ``losses`` of another batch differ, in those rows, by more than rounding may do."""
        if losses.shape != self.losses.shape:
            return True
        before = self.losses
        if rows is not None:
            losses, before = losses[rows.to(losses.device)], before[rows.to(before.device)]
        off = max(self._rounding[0] * self._largest(), self.floor)
        return not bool(torch.isclose(losses, before, rtol=0, atol=off, equal_nan=True).all())

    @property
    def floor(self) -> float:
        """The least difference that is more than rounding."""
        return self._rounding[1]

    def _largest(self) -> float:
        return float(self.losses.nan_to_num(nan=0, posinf=0, neginf=0).abs().max())

    def allow_rounding(self) -> None:
        """From now on differences count that are more than the narrowest type rounds that losses come through."""
        devices = {parameter.device.type for parameter in self._replay.model.parameters()}
        types = self.replayed(lambda: self._seen(self.whole)).types | {self.losses.dtype}
        types |= {parameter.dtype for parameter in self._replay.model.parameters()}
        found = [ROUNDING.get(dtype, ROUNDING_OF_HALVES) for dtype in types]
        self._rounding = max([*found, *([ROUNDING_OF_DEVICES] if devices - {"cpu"} else [])])

    @cached_property
    def quieter(self) -> TrialLosses:
        """The same with modules in eval mode that draw random numbers themselves."""
        if not self.draws:
            return self
        drawing: dict[nn.Module, None] = {}
        self.replayed(lambda: self._note_drawing(drawing))
        return TrialLosses(self._loss_fn, self._replay, self.whole, [*drawing], self._gradients)

    def _note_drawing(self, drawing: dict[nn.Module, None]) -> None:
        """Fills ``drawing`` with the modules in whose forward, but not their children's, numbers are drawn."""
        running: list[nn.Module] = []
        state = self._replay.state()

        def note() -> None:
            nonlocal state
            if (now := self._replay.state()) != state:
                state = now
                drawing.update(dict.fromkeys(running[-1:]))

        def enter(module: nn.Module, *_: Any) -> None:
            note()
            running.append(module)

        def leave(module: nn.Module, *_: Any) -> None:
            note()
            running.pop()

        model = self._replay.model
        handles = [
            hook
            for m in model.modules()
            for hook in (m.register_forward_pre_hook(enter), m.register_forward_hook(leave))
        ]
        try:
            self._loss_fn(model, self.whole)
        finally:
            for handle in handles:
                handle.remove()


class _Seen(TorchDispatchMode):
    """Notes the floating-point types of all that is computed, and the shapes of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()
        self.drawn: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
        self.types |= {each.dtype for each in tensors if each.is_floating_point()}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn += [each.shape for each in tensors]
        return found


def _buffers_unchanged(model: nn.Module) -> Callable[[], bool]:
    """A function that says whether no buffer was written to or exchanged since."""
    before = [(buffer, buffer._version) for buffer in model.buffers()]

    def unchanged() -> bool:
        now = list(model.buffers())
        same = (one is other and one._version == version for one, (other, version) in zip(now, before, strict=False))
        return len(now) == len(before) and all(same)

    return unchanged
