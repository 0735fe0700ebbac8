"""Losses of some rows of a batch in other company, from the same random numbers and without a trace in the model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ghostclip.clipper.first_pass import FirstPasses
from ghostclip.clipper.random_states import random_states, set_random_states
from ghostclip.clipper.trial import without_trace
from ghostclip.self_check.loading import Loaded, Rows
from ghostclip.self_check.model_state import Left, ModelSnapshot

__all__ = ["LossFunction", "TrialLosses", "TrialOutcome"]

# By the narrowest type: share of the largest loss by which one must move to be another, and the least that counts.
ROUNDING = {torch.float64: (1e-9, 1e-14), torch.float32: (1e-5, 1e-6)}
ROUNDING_OF_HALVES = (5e-2, 1e-4)
# Kernels of accelerators may round products to fewer digits than their type has (TF32).
ROUNDING_OF_DEVICES = (1e-3, 1e-5)

# Relative, and of the clipping norm: a difference of gradient norms that is more than rounding, and that matters.
NORMS_ROUND, LEAST_SHARE = 1e-3, 1e-4

log = logging.getLogger("ghostclip")

LossFunction = Callable[[nn.Module, Any], Tensor]


class TrialOutcome(NamedTuple):
    """The losses of a batch, and what their forward left.

    Attributes:
        losses: as the loss function gives them.
        norms: of their gradients, [B]; None where they weren't asked for, or can't be measured.
        loaded: what is known of the batch, without it.
        left: in the model.
        random_states: of the collate function and of the forward, after they ran.
    """

    losses: Tensor
    norms: Tensor | None
    loaded: Loaded
    left: Left
    random_states: tuple[Any, ...]


class TrialLosses:
    """The losses of rows in different batches, from the same state of the model and of random numbers.

    Graphs are recorded, since the loss function may need one of its own. Modules that draw random numbers themselves,
    not by their children, are in eval mode unless it is said otherwise.

    Args:
        loss_fn: (model, batch) -> losses [B].
        model: in training.
        rows: of which batches are made.
        passes: of the model, which measure gradients; None: losses are compared alone.

    Attributes:
        model, rows, loss_fn: as given.
        every: the index of all rows.
        untouched: the outcome for these with all modules in the modes they had.
        first: the same with those that draw in eval mode.
        collate_draws: whether the collate function draws random numbers.
        draws: whether random numbers are drawn by it, or by what is not in eval mode.
    """

    def __init__(self, loss_fn: LossFunction, model: nn.Module, rows: Rows, passes: FirstPasses | None = None) -> None:
        self.loss_fn, self.model, self.rows, self._passes = loss_fn, model, rows, passes
        self._begins = random_states()
        self._quiet: set[nn.Module] = set()
        self.every = list(range(len(rows)))
        self._rounding, self._rounding_of_norms = ROUNDING[torch.float32], NORMS_ROUND
        with self._noting_who_draws():
            self.untouched = self.run(self.every, quiet=False, norms=True)
        self.first = self.run(self.every, norms=True) if self._quiet else self.untouched
        self.collate_draws = self.first.loaded.drew
        self.draws = self.collate_draws or self.first.random_states[1] != self._begins
        self._rounding = ROUNDING.get(self.first.losses.dtype, self._rounding)

    def run(
        self, index: Sequence[int], *, after: Sequence[int] | None = None, quiet: bool = True, norms: bool = False,
        watch: Any = None,
    ) -> TrialOutcome:  # fmt: skip
        """The outcome for the rows ``index``, from the state that a forward of the rows ``after`` left."""
        loaded = self.rows.load(index)
        before = None if after is None else self.rows.load(after).batch
        with self._again(quiet):
            if before is not None:
                self.loss_fn(self.model, before)
                set_random_states(self._begins)
            state = ModelSnapshot(self.model)
            with watch or nullcontext():
                losses = self.loss_fn(self.model, loaded.batch)
            states, left = (loaded.random_states, random_states()), state.left()
            measured = self._norms(losses) if norms else None
        return TrialOutcome(losses.detach(), measured, loaded._replace(batch=None), left, states)

    def _norms(self, losses: Tensor) -> Tensor | None:
        if self._passes is None or losses.dim() != 1 or not losses.requires_grad:
            return None
        try:
            with self._passes.forgetting():
                return self._passes.measure(losses, retain_graph=False).norms()
        except Exception as error:  # what can't be measured is refused in the batch's own passes
            log.info("gradients of a part of a batch are not compared: %s: %s", type(error).__name__, error)
            return None

    def losses_again(self, index: Sequence[int]) -> Tensor:
        """The losses of the rows ``index``, and nothing else."""
        batch = self.rows.load(index).batch
        with self._again():
            return self.loss_fn(self.model, batch)

    @contextmanager
    def _again(self, quiet: bool = True) -> Iterator[None]:
        with without_trace(self.model):
            set_random_states(self._begins)
            for module in self._quiet if quiet else ():
                module.training = False
            yield

    def norms_differ(self, these: Tensor, those: Tensor) -> bool:
        """Whether gradient norms [n] differ from others by more than rounding may do, and by what clipping may show."""
        assert self._passes is not None
        least = LEAST_SHARE * self._passes.clipping.sensitivity
        return not bool(torch.isclose(these, those, rtol=self._rounding_of_norms, atol=least, equal_nan=True).all())

    def differ(self, these: Tensor, those: Tensor) -> bool:
        """Whether losses [n] differ from others by more than rounding may do, or are of another number."""
        if these.shape != those.shape:
            return True
        largest = float(self.first.losses.nan_to_num(nan=0, posinf=0, neginf=0).abs().max())
        off = max(self._rounding[0] * largest, self._rounding[1])
        return not bool(torch.isclose(these, those, rtol=0, atol=off, equal_nan=True).all())

    def moves(self, index: Sequence[int], kept: Sequence[int] | None = None) -> bool:
        """Whether the losses in the places ``kept``, or all, differ from the first when the rows are ``index``."""
        return self.moved(self.run(index).losses, kept)

    def moved(self, losses: Tensor, kept: Sequence[int] | None = None) -> bool:
        """Whether losses [B] in the places ``kept``, or all, differ from the first."""
        before = self.first.losses
        if losses.shape != before.shape:
            return True
        places = self.every if kept is None else list(kept)
        return self.differ(losses[places], before[places])

    def watched(self, index: Sequence[int]) -> tuple[set[torch.dtype], Any]:
        """Floating-point types of all that is computed for the rows ``index``, and what is drawn: sizes and states.

        Nothing where that can't be watched, as in compiled functions.
        """
        seen = _Seen()
        try:
            return seen.types, (seen.drawn, self.run(index, watch=seen).random_states)
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
        self._rounding_of_norms = max(NORMS_ROUND, 2 * self._rounding[0])

    @contextmanager
    def _noting_who_draws(self) -> Iterator[None]:
        """Inside, modules that draw random numbers themselves are noted: they are in eval mode from then on."""
        running: list[nn.Module] = []
        state = self._begins

        def note() -> None:
            nonlocal state
            if (now := random_states()) != state:
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
            yield


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
