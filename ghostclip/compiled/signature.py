"""What a compiled graph holds for: shapes of the batch, modes of the modules, and which loss function."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

__all__ = ["Asked", "ModelState", "capacity_for", "function_key", "function_kind", "leaves_of", "pad"]

# Physical batches of Poisson sampling vary in size; graphs are made for sizes of a grid with this ratio.
GROWTH = 1.25


@dataclass(frozen=True)
class Asked:
    """One batch and what is to be done with it.

    Attributes:
        key: of the graph that can do it.
        leaves: the batch's tensors, padded.
        structure: how they are nested.
        examples: how many of the rows are examples.
        kept: what the key was made of, so that no id in it is used again.
    """

    key: tuple
    leaves: list[Tensor]
    structure: Any
    examples: int
    kept: list[Any]


def leaves_of(batch: Any) -> tuple[list[Tensor], Any, int] | None:
    """(tensors, structure, number of examples) of a batch; None unless all leaves are tensors with B in dimension 0."""
    if type(batch) in (tuple, list) and all(isinstance(part, Tensor) for part in batch):
        leaves, structure = list(batch), _flat_structure(isinstance(batch, tuple), len(batch))
    else:
        leaves, structure = tree_flatten(batch)
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        return None
    examples = {leaf.shape[0] for leaf in leaves}
    return (leaves, structure, examples.pop()) if len(examples) == 1 else None


@functools.cache
def _flat_structure(is_tuple: bool, count: int) -> Any:
    """What `tree_flatten` says of so many tensors in a tuple or a list; as a rule that is what a batch is."""
    return tree_flatten((tuple if is_tuple else list)(range(count)))[1]


def capacity_for(examples: int, expected: int | None, largest: int | None = None) -> int:
    """How many rows a batch of ``examples`` is padded to: few different numbers, so that few graphs are needed.

    Args:
        examples: of this batch.
        expected: about how many come as a rule; None when all batches have one size.
        largest: the most that ever come.
    """
    if expected is None:
        return examples
    # Of the binomial number of examples in a Poisson sample, one in a thousand lies above three standard deviations.
    size = math.ceil(expected + 3.0 * math.sqrt(expected))
    while size < examples:
        size = math.ceil(GROWTH * size)
    return size if largest is None else min(size, max(largest, examples))


def pad(leaf: Tensor, size: int) -> Tensor:
    """``leaf`` [n, ...] with its first row repeated to [size, ...]; rows of zeros might not be valid inputs."""
    missing = size - leaf.shape[0]
    return leaf if missing == 0 else torch.cat([leaf, leaf[:1].expand(missing, *leaf.shape[1:])])


class ModelState:
    """Everything about a model that a graph has built in: its parts, their modes, and which parameters are trained.

    Asked for at every step, so the tree of modules is walked once only; a part that is exchanged shows in its parent.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.refresh()

    def refresh(self) -> None:
        """Reads the parts again."""
        self._modules = list(self._model.modules())
        self.held: list[Tensor] = [*self._model.parameters(), *self._model.buffers()]

    def key(self) -> tuple:
        """Equal as long as a graph holds."""
        found: list[Any] = [torch.is_autocast_enabled("cpu")]
        for module in self._modules:
            found.append(module.training)
            found += map(id, module._modules.values())
            found += map(id, module._buffers.values())
            for parameter in module._parameters.values():
                if parameter is not None:
                    found += (id(parameter), parameter.requires_grad, parameter.dtype, parameter.stride())
        return tuple(found)


def function_key(function: Callable[..., Any]) -> tuple[tuple, list[Any]]:
    """A key equal for functions that do the same, and what must be kept alive while it is in use.

    A lambda written in a loop is a new object each time round; its code and what it closes over tell it.
    """
    if isinstance(function, FunctionType):
        closed = [cell.cell_contents for cell in function.__closure__ or ()]
        defaults = list(function.__defaults__ or ())
        kept = [function.__code__, *closed, *defaults]
        return tuple(part if isinstance(part, (int, float, str, bool)) else id(part) for part in kept), kept
    return (id(function),), [function]


def function_kind(function: Any, depth: int = 3) -> tuple:
    """What a loss function has in common with itself as it is made anew for each batch: its code, and settings in it.

    What was found out of one holds for all of its kind. Of data, nothing is remembered but its type.
    """
    if isinstance(function, functools.partial):
        given = [*function.args, *function.keywords.items()]
        return (*function_kind(function.func, depth), *(_setting(each, depth) for each in given))
    code = getattr(function, "__code__", None)
    if code is None:
        settings = getattr(function, "__dict__", {}).values()
        name = getattr(function, "__qualname__", None)  # of what is written in C
        return (type(function), name, *(_setting(value, depth) for value in settings))
    values = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return (code, *(_setting(value, depth) for value in values))


def _setting(value: Any, depth: int) -> Any:
    """A plain value or a class itself, what another callable has in it in turn, and the type of anything else."""
    if isinstance(value, tuple):
        return tuple([_setting(each, depth) for each in value])
    if value is None or isinstance(value, (bool, int, float, str, type)):
        return value
    return function_kind(value, depth - 1) if depth and callable(value) else type(value)
