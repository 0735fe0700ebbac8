"""The first operation of a forward in which the examples of a batch meet, and the line of code that it comes from.

The forward runs on the batch, and again with the data of one example exchanged for its neighbour's. The first operation
that gives another example another row is the place. With ``h - h.mean(0)`` and 2 in the place of the first of three:

    h                1  2  6    ->   2     2     6
    h.mean(0)        3          ->   3.3                 no dimension has the examples
    h - h.mean(0)   -2 -1  3    ->  -1.3  -1.3   2.7     the rows of the others changed: here
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ghostclip.graph.marks import numbers
from ghostclip.graph.source_lines import current_line
from ghostclip.wrap import Finding

__all__ = ["mixing_place"]

LOSS_REMEDY = (
    'compute each loss from its own example only (reduction="none"), and mix no examples in the collate function'
)
BROADCAST = "the loss function makes [B, B] of two shapes, such as outputs [B, 1] and labels [B]"
BROADCAST_REMEDY = "give both one shape, by outputs[:, 0] for instance, and compare no examples of one batch"
MODULE_REMEDY = (
    "use a layer that treats each example by itself (GroupNorm for BatchNorm, an expert's capacity within an example), "
    "and compare no examples of one batch"
)
BATCH_FIRST_REMEDY = (
    "examples are in dimension 0 of the data, so build it with batch_first=True, or transpose its input to [T, B, ...]"
)
# Of the largest value beside it: other rows of a product are not touched at all, so this is far above what rounds.
TOLERANCE = 1e-5


def mixing_place(model: nn.Module, losses_of: Callable[[Sequence[int]], Tensor], examples: int) -> Finding | None:
    """The first operation in which examples meet; None where they stay apart.

    The first, the middle and the last of ``examples`` (at least two) are exchanged, one after another. ``losses_of``
    gives the losses [B] of some rows of the batch, always from the same state and random numbers.
    """
    for changed in sorted({0, examples // 2, examples - 1}):
        rows, before, after = list(range(examples)), _Recorder(model, examples), _Recorder(model, examples)
        with before:
            losses = losses_of(rows)
        rows[changed] = (changed + 1) % examples
        with after:
            found = losses_of(rows)
        if (moved := _first_moved(losses, found, changed)) is None:
            continue
        example, place = _first_place(before.operations, after.operations, changed) or (moved, None)
        line = "" if place is None else place.line
        if place is None or place.path is None:
            if any(each.broadcasts and each.path is None for each in after.operations):
                return Finding("", BROADCAST, BROADCAST_REMEDY, line)
            problem = f"the loss of example {moved} depends on the data of example {changed}"
            return Finding("", problem, LOSS_REMEDY, line)
        kind = type(model.get_submodule(place.path)).__name__
        problem = f"{kind}: what it gives for example {example} depends on the data of example {changed}"
        return Finding(place.path, problem, _remedy(model, place.path), line)
    return None


def _remedy(model: nn.Module, path: str) -> str:
    """What to do about a module that mixes examples; it, or one that it is a part of, may take them in dimension 1."""
    names = path.split(".")
    around = [model.get_submodule(".".join(names[:depth])) for depth in range(len(names) + 1)]
    late = any(getattr(module, "batch_first", None) is False for module in around)
    return BATCH_FIRST_REMEDY if late else MODULE_REMEDY


class _Operation(NamedTuple):
    """An operation of a forward, by ``path`` (of the innermost module that ran; None outside of the model) and line.

    ``rows`` [B, 2]: for each dimension of its result that is as long as the batch, two numbers of each row.
    ``broadcasts``: whether it computes entry by entry, and no tensor it was given has all these dimensions.
    """

    function: Any
    rows: list[Tensor]
    path: str | None
    line: str
    broadcasts: bool


class _Recorder(TorchDispatchMode):
    """Notes the operations of the forward that runs inside."""

    def __init__(self, model: nn.Module, examples: int) -> None:
        super().__init__()
        self._paths, self._examples = {module: path for path, module in model.named_modules()}, examples
        self.operations: list[_Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        # Memory that nothing was written to holds anything.
        for leaf in () if "empty" in func.__name__ else tree_leaves(found):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                dims = [dim for dim, size in enumerate(leaf.shape) if size == self._examples]
                rows = [numbers(leaf, dim).T for dim in dims]
                broadcasts = len(dims) == leaf.dim() == 2 and self._broadcasts(func, args)
                self.operations.append(_Operation(func, rows, self._path(), current_line(), broadcasts))
        return found

    def _broadcasts(self, func: Any, args: Any) -> bool:
        given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        by_entry = torch.Tag.pointwise in func.tags or func is torch.ops.aten.expand.default
        return by_entry and all(leaf.shape.count(self._examples) < 2 for leaf in given)

    def _path(self) -> str | None:
        """Of the innermost module that is being called."""
        for frame, _ in traceback.walk_stack(sys._getframe(1)):
            if frame.f_code.co_name == "_call_impl" and (module := frame.f_locals.get("self")) in self._paths:
                return self._paths[module]
        return None


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
    before, after = before.detach().reshape(len(before), -1), after.detach().reshape(len(after), -1)
    scale = TOLERANCE * float(before.nan_to_num(posinf=0, neginf=0).abs().max()) if before.numel() else 0.0
    same = torch.isclose(before, after, rtol=0, atol=scale, equal_nan=True).all(1)
    same[changed] = True
    return None if bool(same.all()) else int((~same).nonzero()[0])
