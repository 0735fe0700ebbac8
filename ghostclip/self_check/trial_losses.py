"""Losses of some rows of a batch in other company, from the same random numbers and without a trace in the model."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ghostclip.clipper.first_pass import FirstPasses, check_type
from ghostclip.clipper.forwards import LossFunction, forward_of
from ghostclip.clipper.random_states import random_states, set_random_states
from ghostclip.clipper.trial import HELD, contents_of, tensor_in, trying, without_trace
from ghostclip.errors import VerificationError
from ghostclip.graph.same_numbers import numbers_of
from ghostclip.planner import Planner
from ghostclip.self_check.loading import Loaded, LoadedRows
from ghostclip.sharding.plain import Sharding
from ghostclip.sharding.written import frozen_parameters

__all__ = ["TrialLosses", "TrialOutcome", "attempted", "same", "unlike"]

# By the narrowest type: share of the largest loss by which one must move to be another, and the least that counts.
ROUNDING = {torch.float64: (1e-9, 1e-14), torch.float32: (1e-5, 1e-6)}
ROUNDING_OF_HALVES = (5e-2, 1e-4)
# Kernels of accelerators may round products to fewer digits than their type has (TF32).
ROUNDING_OF_DEVICES = (1e-3, 1e-5)
# Relative, and of the clipping norm: a difference of gradient norms that is more than rounding, and that matters.
NORMS_ROUND, LEAST_SHARE = 1e-3, 1e-4
# Of every module; parameters, buffers and submodules have their own ways of being compared.
OF_MODULES = frozenset(vars(nn.Module())) - {"training"}

log = logging.getLogger("ghostclip")

# {(kind, name): value} of all that a model keeps from one forward to the next. Of a "buffer" and an "attribute" (a
# tensor or array that isn't registered) it is a copy; of a "container" (list, dict, set or deque) or another "object"
# itself, and what is in it; of a "frozen parameter" itself (or its shard) and numbers that tell of writes to it.
State = dict[tuple[str, str], Any]


@contextmanager
def attempted(failed: str) -> Iterator[None]:
    """Goes on behind the inside where it raises, and logs that: a user's code need not bear all that is tried."""
    try:
        yield
    except VerificationError:
        raise
    except Exception as error:
        log.info("%s: %s: %s", failed, type(error).__name__, error)


class TrialOutcome(NamedTuple):
    """Losses, norms [B] of their gradients (None: not measured), the batch without its data, and what it left.

    ``left`` is the model's state after it; ``states`` are the random ones after the collate function and the forward.
    """

    losses: Tensor
    norms: Tensor | None
    loaded: Loaded
    left: State
    states: tuple[tuple[Any, ...], tuple[Any, ...]]


class TrialLosses:
    """The losses of rows in different batches, from the same state of the model and of random numbers.

    Modules that draw random numbers themselves, not by their children, are in eval mode unless it is said otherwise.

    Args:
        rows: of which batches are made.
        passes: of the model, which measure gradients; None: losses are compared alone.

    Attributes:
        every: the index of all rows.
        untouched: the outcome of all rows, with modules in the modes they have in training.
        first: the outcome of all rows, with modules that draw random numbers in eval mode; trials are compared with it.
        changed: (kind, name) of what the model kept of ``untouched``.
        draws: whether random numbers are drawn by the collate function, or by what is not in eval mode.
    """

    def __init__(
        self, loss_fn: LossFunction, model: nn.Module, rows: LoadedRows, passes: FirstPasses | None = None
    ) -> None:
        self._loss_fn, self.model, self.rows, self._passes = loss_fn, model, rows, passes
        self._begins, self._quiet = random_states(), set[nn.Module]()
        self._rounding = ROUNDING[torch.float32]
        self.every = list(range(len(rows)))
        before = _frozen(model) | _state_of(model)
        with self._noting_who_draws():
            self.untouched = self.run(self.every, quiet=False, norms=True)
        left = _frozen(model) | self.untouched.left
        self.changed = [key for key in before | left if not same(before.get(key), left.get(key))]
        self.first = self.run(self.every, norms=True) if self._quiet else self.untouched
        self.draws = self.first.loaded.drew or self.first.states[1] != self._begins
        self._rounding = ROUNDING.get(self.first.losses.dtype, self._rounding)

    def run(
        self, *batches: Sequence[int], quiet: bool = True, norms: bool = False,
        watch: AbstractContextManager[Any] | None = None,
    ) -> TrialOutcome:  # fmt: skip
        """The outcome for the last of some batches, tried one after another, each from the same random numbers."""
        every = [self.rows.load(index) for index in batches]
        with without_trace(self.model):
            for module in self._quiet if quiet else ():
                module.training = False
            for loaded in every:
                set_random_states(self._begins)
                with watch or nullcontext():  # graphs are recorded, since the loss function may need one of its own
                    check_type(losses := self._loss_fn(self.model, loaded.batch))
            states, left = (loaded.states, random_states()), _state_of(self.model)
            measured = self._norms(losses, loaded.batch) if norms else None
        return TrialOutcome(losses.detach(), measured, loaded._replace(batch=None), left, states)

    def _norms(self, losses: Tensor, batch: Any) -> Tensor | None:
        if self._passes is None or losses.dim() != 1 or not losses.requires_grad:
            return None
        with (
            attempted("gradients of a part of a batch are not compared"),  # they are refused in the batch's own passes
            self._passes.forgetting(),
            self._passes.running(forward_of(self.model, self._loss_fn, batch)),
        ):
            return self._passes.norms_pass(losses, retain_graph=False).norms()
        return None

    def norms_differ(self, these: Tensor, those: Tensor) -> bool:
        """Whether gradient norms [n] differ from others by more than rounding may do, and by what clipping may show."""
        assert self._passes is not None
        least = LEAST_SHARE * self._passes.clipping.sensitivity
        return not bool(
            torch.isclose(these, those, rtol=max(NORMS_ROUND, 2 * self._rounding[0]), atol=least, equal_nan=True).all()
        )

    def differ(self, these: Tensor, those: Tensor) -> bool:
        """Whether losses [n] differ from others by more than rounding may do, or are of another number."""
        if these.shape != those.shape:
            return True
        return not bool(torch.isclose(these, those, rtol=0, atol=self._off, equal_nan=True).all())

    @property
    def _off(self) -> float:
        """By how much a loss may differ by rounding."""
        largest = float(self.first.losses.nan_to_num(nan=0, posinf=0, neginf=0).abs().max())
        return max(self._rounding[0] * largest, self._rounding[1])

    def common(self, these: Tensor, those: Tensor) -> int:
        """How many of some finite losses are among others, each of which counts once, in whatever order."""
        left, right, found = sorted(these.tolist()), sorted(those.tolist()), 0
        while left and right:
            one, other = left[-1], right[-1]
            close = abs(one - other) <= self._off
            found += close
            if close or one > other:
                left.pop()
            if close or one <= other:
                right.pop()
        return found

    def seen(self, index: Sequence[int]) -> tuple[set[torch.dtype], Any]:
        """Types of all that is computed for the rows ``index``, and what is drawn: sizes and states after it.

        Nothing where that can't be watched, as in compiled functions.
        """
        watch = _Seen()
        with attempted("what losses are computed of can't be watched"):
            return watch.types, (self.run(index, watch=watch).states, watch.drawn)
        return set(), None

    def allow_rounding(self) -> None:
        """From now on differences count that are more than the narrowest type rounds that losses come through."""
        parameters = list(self.model.parameters())
        types = self.seen(self.every)[0] | {self.first.losses.dtype, *(each.dtype for each in parameters)}
        found = [ROUNDING.get(dtype, ROUNDING_OF_HALVES) for dtype in types if dtype.is_floating_point]
        on_cpu = all(each.is_cpu for each in parameters)
        self._rounding = max(found if on_cpu else [*found, ROUNDING_OF_DEVICES])

    def widened(self) -> TrialLosses | None:
        """The same of a copy of the model in float64; None where not all comes in that type."""
        with trying():
            model = copy.deepcopy(self.model).double()
        passes = None
        if self._passes is not None:
            policy = copy.deepcopy(self._passes.clipping)  # it asks its rule for thresholds anew
            passes = FirstPasses(model, Sharding(model), policy, "auto", Planner(), None)
        rows = replace(self.rows, transform=lambda batch: tree_map(_widened, self.rows.transform(batch)))
        found = TrialLosses(self._loss_fn, model, rows, passes)
        as_much = (found.first.norms is None) == (self.first.norms is None)
        return found if as_much and found.first.losses.dtype == torch.float64 else None

    @contextmanager
    def _noting_who_draws(self) -> Iterator[None]:
        """Inside, modules that draw random numbers themselves are noted: they are in eval mode from then on."""
        running: list[nn.Module] = []
        states = self._begins

        def note(module: nn.Module, inputs: Any, *output: Any) -> None:
            nonlocal states
            if (now := random_states()) != states:
                states = now
                self._quiet.update(running[-1:])
            if output:
                running.pop()
            else:
                running.append(module)

        with ExitStack() as hooks:
            for module in self.model.modules():
                hooks.enter_context(module.register_forward_pre_hook(note))
                hooks.enter_context(module.register_forward_hook(note))
            yield


class _Seen(TorchDispatchMode):
    """Notes the types of all that is computed, and the shapes of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()
        self.drawn: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
        self.types.update(each.dtype for each in tensors)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn += [each.shape for each in tensors]
        return found


def _widened(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 else leaf


def _state_of(model: nn.Module) -> State:
    """What a model has now, in whichever way it was written."""
    found: State = {("buffer", name): buffer.detach().clone() for name, buffer in model.named_buffers()}
    for path, module in model.named_modules():
        for own, value in vars(module).items():
            if own in OF_MODULES:
                continue
            name = f"{path}.{own}" if path else own
            if (tensor := tensor_in(value)) is not None:
                found["attribute", name] = tensor.detach().clone()
            elif type(value) in HELD:
                found["container", name] = value, tuple(map(id, contents_of(value)))
            else:
                found["object", name] = (value,)
    return found


def _frozen(model: nn.Module) -> State:
    """Its frozen parameters. They may be large, so that they aren't copied."""
    return {("frozen parameter", name): value for name, value in frozen_parameters(model).items()}


def unlike(these: State, those: State, kind: str) -> list[str]:
    """Names of tensors of a kind with other values; one that has another shape is a cache."""
    both = [key for key in these if key[0] == kind and key in those and these[key].shape == those[key].shape]
    return [name for _, name in both if not same(these[kind, name], those[kind, name])]


def same(one: Any, other: Any) -> bool:
    """Whether a value is what it was; what can't be compared, as some layouts can't, counts as another."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return one[0] is other[0] and one[1:] == other[1:]
    try:
        if one.layout != other.layout or one.dtype != other.dtype or one.shape != other.shape:
            return False
        pairs = zip(numbers_of(one), numbers_of(other), strict=True)
        return all(bool(torch.isclose(*pair, rtol=0, atol=0, equal_nan=True).all()) for pair in pairs)
    except Exception:
        return False
