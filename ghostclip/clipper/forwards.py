"""Runs the forward behind some losses again: by the step's loss function, or as the model's own calls."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from ghostclip.clipper.cutting import cut, tensors_of
from ghostclip.clipper.trial import TRYING, without_trace
from ghostclip.errors import UnsupportedModelError
from ghostclip.graph.nodes import inputs_first
from ghostclip.graph.overwritten import NOT_FIRST, OverwrittenForward, overwriting
from ghostclip.sharding.hooks import hooked_since

__all__ = ["CallHook", "ModelCalls", "check_loss_function", "forward_of", "without_ranks"]

LossFunction = Callable[[nn.Module, Any], Tensor]


def check_loss_function(loss_fn: Any, batch: Any = None, computed: str = "") -> None:
    """Raises TypeError for what can't be called with (model, examples), as losses or a criterion can't.

    ``batch`` is what came with it; ``computed`` says what takes losses that are computed already.
    """
    kind = type(loss_fn).__name__
    if not callable(loss_fn) and callable(batch):
        raise TypeError(
            f"loss_fn must be a function of (model, examples), and a batch follows; got {kind} first: are they swapped?"
        )
    if not callable(loss_fn) or isinstance(loss_fn, _Loss):
        raise TypeError(
            f"loss_fn must be a function of (model, examples) that returns one loss for each example; got {kind}. For "
            f'a criterion with reduction="none": lambda model, batch: criterion(model(batch[0]), batch[1]){computed}'
        )
    if type(loss_fn) is FunctionType and loss_fn.__code__.co_argcount == 2 and not loss_fn.__code__.co_kwonlyargcount:
        return  # at once, since each step asks: a signature takes 4% of a small network's
    with contextlib.suppress(ValueError):  # a function in C may have no signature
        signature = inspect.signature(loss_fn)
        try:
            signature.bind(None, None)
        except TypeError as error:
            raise TypeError(f"loss_fn is called as loss_fn(model, examples), which it can't be: {error}") from None


def without_ranks(model: nn.Module) -> nn.Module:
    """The model inside of DistributedDataParallel, whose forward waits for other ranks."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model


def forward_of(model: nn.Module, loss_fn: LossFunction, batch: Any, rows: int | None = None) -> OverwrittenForward:
    """Runs ``loss_fn(model, batch)`` again.

    Args:
        model: as ``loss_fn`` takes it.
        loss_fn, batch: of the step.
        rows: of the batch's tensors; None: one for each loss.
    """

    def forward(half: int, examples: int) -> Sequence[Tensor]:
        count = examples if rows is None else rows
        other = _overwritten(batch, overwriting(half, count), floats=True)
        with without_trace(model):
            return [loss_fn(without_ranks(model), other)]

    return forward


class _Call(NamedTuple):
    """A call of a model: its arguments without their graphs, and the number of the next node then."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int


class CallHook:
    """The hook of a model by which its calls are noted, which keeps nothing alive; `unwrap` takes it off.

    A copy of the model, or one that was stored, has one that notes nothing.
    """

    ghost_hook = True

    def __init__(self, calls: ModelCalls | None) -> None:
        self._calls = None if calls is None else weakref.ref(calls)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._calls is not None and (calls := self._calls()) is not None:
            calls.note(args, kwargs)

    def __reduce__(self) -> tuple[type, tuple[None]]:
        return CallHook, (None,)


class ModelCalls:
    """Notes the last calls of a model, to run those behind some losses again where no loss function is known.

    Args:
        model: whose calls are noted, by a `CallHook`.

    Attributes:
        noting: whether calls are noted; not where the loss function is known.
    """

    noting = True
    # The inputs of so many are kept. Who calls its model more often for one batch has to give a loss function.
    MOST = 8

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._calls: deque[_Call] = deque(maxlen=self.MOST)
        # When a forward may have begun, the last ones: the number of the next node, and how many hooks there were.
        self._begins: deque[tuple[int, int]] = deque([(0, RemovableHandle.next_id)], maxlen=self.MOST)
        self._take_off = weakref.finalize(
            self, model.register_forward_pre_hook(CallHook(self), with_kwargs=True).remove
        )
        self._take_off.atexit = False

    def detach(self) -> None:
        """Takes the hook off the model, and forgets what was noted."""
        self._take_off()
        self._calls.clear()

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes a call of the model with these arguments."""
        if not torch.is_grad_enabled() or TRYING.get() or torch.compiler.is_compiling():
            return
        self.begin()
        if not self.noting:
            self._calls.clear()
            return
        # Most often there is nothing to do.
        if not all(isinstance(each, Tensor) and not each.requires_grad for each in (*args, *kwargs.values())):
            args, kwargs = tree_map(_alone, (args, kwargs))
        self._calls.append(_Call(args, kwargs, torch._C._autograd._get_sequence_nr()))

    def begin(self) -> None:
        """Notes that a forward may begin now: as the model is called, and after a pass where parts of it may be."""
        if self._begins[-1][1] != RemovableHandle.next_id:
            self._begins.append((torch._C._autograd._get_sequence_nr(), RemovableHandle.next_id))

    def hooked(self, first: int) -> bool:
        """Whether a hook was registered, on a tensor perhaps, in the forward whose first node has that number."""
        begins = [hooks for number, hooks in self._begins if number <= first]
        return hooked_since(begins[-1] if begins else self._begins[0][1])

    def behind(self, losses: Tensor) -> OverwrittenForward | None:
        """Runs those calls again that made some of the graph of ``losses``; None where none did."""
        numbers = [node._sequence_nr() for node in inputs_first(losses.grad_fn)]
        ends = [*[call.number for call in self._calls][1:], torch._C._autograd._get_sequence_nr()]
        calls = [
            call
            for call, end in zip(self._calls, ends, strict=False)
            if any(call.number <= number < end for number in numbers)
        ]
        return functools.partial(self._run, calls) if calls else None

    def _run(self, calls: Sequence[_Call], half: int, examples: int) -> Sequence[Tensor]:
        model = self._model()
        assert model is not None
        found, rows = list[Tensor](), overwriting(half, examples)
        with without_trace(model):
            for call in calls:
                args = [_overwritten(each, rows, floats=False) for each in call.args]
                kwargs = {name: _overwritten(each, rows, floats=False) for name, each in call.kwargs.items()}
                if half:
                    args, kwargs = tree_map(functools.partial(_changed, examples), (args, kwargs))
                found += [tensor for _, tensor in tensors_of(model(*args, **kwargs), examples)]
        return [tensor for tensor in found if tensor.requires_grad]


def _overwritten(batch: Any, index: Sequence[int], floats: bool) -> Any:
    """The batch of the rows ``index``; raises UnsupportedModelError where a tensor has no rows to be overwritten.

    ``floats``: whether those of floating point count, too.
    """
    other, rows = cut(batch, len(index), index), len(index)
    for (_, before), (_, after) in zip(tensors_of(batch, rows), tensors_of(other, rows), strict=False):
        if before is after and before.dim() and (floats or not before.is_floating_point()):
            raise UnsupportedModelError(NOT_FIRST)
    return other


def _alone(leaf: Any) -> Any:
    """A tensor without its graph."""
    return leaf.detach().requires_grad_() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def _changed(examples: int, leaf: Any) -> Any:
    """Another value of a number or tensor that has no examples: it may have been computed from them."""
    if isinstance(leaf, float):
        return leaf * 2 + 1
    if not isinstance(leaf, Tensor) or leaf.is_nested:
        return leaf
    if leaf.dim() and (len(leaf) == examples or not leaf.is_floating_point()):
        return leaf
    return leaf.detach() * 2 + 1
