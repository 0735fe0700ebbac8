"""Whether the losses of a batch keep to their own examples: one's data is exchanged, and the others' losses stay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ghostclip.graph.operation_log import OperationLog, first_moved

__all__ = ["Mixed", "exchanged", "exchanges", "mixed_examples"]

LOSS_REMEDY = 'compute each loss from its own example only (reduction="none"), one number for each'
MODULE_REMEDY = (
    "use a layer that treats each example by itself (GroupNorm for BatchNorm, an expert's capacity within an example), "
    "and compare no examples of one batch"
)

LossFunction = Callable[[nn.Module, Any], Tensor]


class Mixed(NamedTuple):
    """Where examples of a batch meet.

    Attributes:
        path: of the module; "" for the model itself, or the loss function.
        problem: what was seen there.
        remedy: what to write instead.
        line: of the code, "file:line: source"; "" where it isn't known.
    """

    path: str
    problem: str
    remedy: str
    line: str = ""


def mixed_examples(model: nn.Module, loss_fn: LossFunction, batch: Any) -> list[Mixed]:
    """The first operation in which examples of ``batch`` meet; [] where they stay apart.

    Runs the model in the mode it is in, without gradients, with the same random numbers each time; buffers and random
    state are left as they were. The first, the middle and the last example are exchanged for their neighbours. Where a
    loss moves, two more forwards find the operation.

    Args:
        model: wrapped or not.
        loss_fn: (model, batch) -> losses [B].
        batch: at least two examples, tensors with the examples in dimension 0, in any nesting.

    Raises:
        ValueError: the batch has fewer than two examples.
    """
    losses = _losses(model, loss_fn, batch)
    if losses.dim() != 1:
        return [Mixed("", f"the losses have shape {list(losses.shape)}, not [B]", LOSS_REMEDY)]
    examples = len(losses)
    if examples < 2:
        raise ValueError(f"batch must have at least two examples, to see whether they mix; got {examples}")
    for changed in exchanges(examples):
        other = exchanged(batch, changed, examples)
        moved = first_moved(losses, _losses(model, loss_fn, other), changed)
        if moved is not None:
            before = OperationLog(model, examples)
            _losses(model, loss_fn, batch, before.watching())
            after = OperationLog(model, examples, before, changed)
            _losses(model, loss_fn, other, after.watching())
            return [_first_place(model, after, changed, moved)]
    return []


def _first_place(model: nn.Module, log: OperationLog, changed: int, moved: int) -> Mixed:
    """What is said of the first operation whose result for another example is another one now."""
    if log.path is None:
        return Mixed("", f"the loss of example {moved} depends on the data of example {changed}", LOSS_REMEDY, log.line)
    kind = type(model.get_submodule(log.path)).__name__
    problem = f"{kind}: what it gives for example {log.example} depends on the data of example {changed}"
    return Mixed(log.path, problem, MODULE_REMEDY, log.line)


def exchanges(examples: int) -> list[int]:
    """The examples whose data are exchanged, one after another: the first, the middle and the last."""
    return sorted({0, examples // 2, examples - 1})


def exchanged(batch: Any, example: int, examples: int) -> Any:
    """The batch with the neighbour's rows in place of the example's own."""

    def other(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != examples:
            return leaf
        leaf = leaf.clone()
        leaf[example] = leaf[(example + 1) % examples]
        return leaf

    return tree_map(other, batch)


def _losses(
    model: nn.Module, loss_fn: LossFunction, batch: Any, watching: AbstractContextManager[Any] | None = None
) -> Tensor:
    """The losses of a forward without a trace, which ``watching`` may watch."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            with watching or nullcontext():
                return loss_fn(model, batch)
        finally:
            for buffer, value in before:
                buffer.copy_(value)
