"""The first operation of a forward in which the examples of a batch meet, and the line of code that it comes from.

The forward runs on the batch, and again with the data of one example exchanged for its neighbour's. The first operation
that gives another example another row is the place. With ``h - h.mean(0)`` and 2 in the place of the first of three:

    h                1  2  6    ->   2     2     6
    h.mean(0)        3          ->   3.3                 no dimension has the examples
    h - h.mean(0)   -2 -1  3    ->  -1.3  -1.3   2.7     the rows of the others changed: here
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ghostclip.graph.marks import numbers
from ghostclip.graph.source_lines import current_line
from ghostclip.wrap import Finding

__all__ = ["LOSS_REMEDY", "mixing_place"]

LOSS_REMEDY = (
    'compute each loss from its own example only (reduction="none"), and mix no examples in the collate function'
)
MODULE_REMEDY = (
    "use a layer that treats each example by itself (GroupNorm for BatchNorm, an expert's capacity within an example), "
    "and compare no examples of one batch"
)
# Of the largest value beside it: other rows of a product are not touched at all, so this is far above what rounds.
TOLERANCE = 1e-5

# Gives the losses [B] of these rows of a batch, always from the same state and random numbers.
LossesOf = Callable[[Sequence[int]], Tensor]


def mixing_place(model: nn.Module, losses_of: LossesOf, examples: int) -> Finding | None:
    """The first operation in which examples meet; None where they stay apart.

    The first, the middle and the last of ``examples`` (at least two) are exchanged, one after another.
    """
    own = list(range(examples))
    losses = losses_of(own)
    for changed in sorted({0, examples // 2, examples - 1}):
        other = [*own[:changed], (changed + 1) % examples, *own[changed + 1 :]]
        moved = _first_moved(losses, losses_of(other), changed)
        if moved is not None:
            before, after = (_operations(model, losses_of, rows) for rows in (own, other))
            return _finding(model, _first_place(before, after, changed), changed, moved)
    return None


class _Operation(NamedTuple):
    """An operation that a forward did.

    Attributes:
        function: of torch.
        rows: [B, 2] for each dimension of its result that is as long as the batch, two numbers of each row.
        path: of the innermost module that was running; None outside of the model.
        line: of the code; "" where it isn't known.
    """

    function: Any
    rows: list[Tensor]
    path: str | None
    line: str


def _finding(model: nn.Module, place: tuple[int, _Operation] | None, changed: int, moved: int) -> Finding:
    example, path, line = (moved, None, "") if place is None else (place[0], place[1].path, place[1].line)
    if path is None:
        return Finding("", f"the loss of example {moved} depends on the data of example {changed}", LOSS_REMEDY, line)
    kind = type(model.get_submodule(path)).__name__
    problem = f"{kind}: what it gives for example {example} depends on the data of example {changed}"
    return Finding(path, problem, MODULE_REMEDY, line)


def _first_place(
    before: Sequence[_Operation], after: Sequence[_Operation], changed: int
) -> tuple[int, _Operation] | None:
    """(another example, the first operation that mixed it); None where others are done before that.

    An operation has mixed examples if rows of others moved along each dimension of its result that may have them.
    """
    for one, other in zip(before, after, strict=False):
        if one.function is not other.function or len(one.rows) != len(other.rows):
            return None
        moved = [_first_moved(old, new, changed) for old, new in zip(one.rows, other.rows, strict=True)]
        if moved and moved[0] is not None and None not in moved:
            return moved[0], other
    return None


def _first_moved(before: Tensor, after: Tensor, changed: int) -> int | None:
    """The first row, other than the changed one, that is not what it was; None where all are."""
    if not before.is_floating_point():
        return None
    before, after = before.detach().reshape(len(before), -1), after.detach().reshape(len(after), -1)
    scale = TOLERANCE * float(before.nan_to_num(posinf=0, neginf=0).abs().max()) if before.numel() else 0.0
    same = torch.isclose(before, after, rtol=0, atol=scale, equal_nan=True).all(1)
    same[changed] = True
    return None if bool(same.all()) else int((~same).nonzero()[0])


def _operations(model: nn.Module, losses_of: LossesOf, rows: Sequence[int]) -> list[_Operation]:
    """The operations of a forward."""
    recorder, paths = _Recorder(len(rows)), {module: path for path, module in model.named_modules()}
    running = recorder.running

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        running.pop()

    handles = [
        register_module_forward_pre_hook(lambda module, inputs: running.append(paths.get(module))),
        register_module_forward_hook(leave, always_call=True),
    ]
    try:
        with recorder:
            losses_of(rows)
    finally:
        for handle in handles:
            handle.remove()
    return recorder.operations


class _Recorder(TorchDispatchMode):
    """Notes the operations that are done inside.

    Args:
        examples: B.
    """

    def __init__(self, examples: int) -> None:
        super().__init__()
        self._examples = examples
        self.running: list[str | None] = []
        self.operations: list[_Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        # Memory that nothing was written to holds anything.
        for leaf in () if "empty" in func.__name__ else tree_leaves(found):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                dims = [dim for dim, size in enumerate(leaf.shape) if size == self._examples]
                rows = [torch.stack(numbers(leaf, dim), 1) for dim in dims]
                path = self.running[-1] if self.running else None
                self.operations.append(_Operation(func, rows, path, current_line()))
        return found
