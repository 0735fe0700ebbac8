"""A forward that is tried, for checks alone: it leaves no trace in the model and in random states."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import nn

from ghostclip.clipper.random_states import drawing_from, random_states
from ghostclip.graph.same_numbers import same_numbers

__all__ = ["HELD", "TRYING", "contents_of", "is_trial", "tensor_in", "trying", "without_trace"]

TRYING = ContextVar("trying", default=False)
# Every module has dictionaries of these, to which a forward may add some: buffers, submodules, hooks. Parameters aren't
# looked at: FSDP2 exchanges them.
OF_MODULES = vars(nn.Module())
TABLES = [name for name, value in OF_MODULES.items() if isinstance(value, dict) and name != "_parameters"]
# In which a module may keep something beside them.
HELD = (list, dict, set, deque)


def is_kept(value: Any) -> bool:
    """Whether a module may keep something in it from one forward to the next; a list of its Parameters is none."""
    return type(value) in HELD and not any(isinstance(each, nn.Parameter) for each in contents_of(value))


def contents_of(container: Any) -> list[Any]:
    """What is in a list, dict, set or deque."""
    return [*(container.values() if isinstance(container, dict) else container)]


def is_trial() -> bool:
    """Whether a forward that runs now is a trial, whose losses are used for nothing but checks."""
    return TRYING.get()


def tensor_in(value: Any) -> torch.Tensor | None:
    """A tensor, or one in the memory of an array of numbers that can be written to; None for anything else."""
    if isinstance(value, np.ndarray) and value.flags.writeable:
        with suppress(TypeError, ValueError):
            return torch.from_numpy(value)
    return value if isinstance(value, torch.Tensor) else None


@contextmanager
def trying() -> Iterator[None]:
    """Inside, `is_trial` is true."""
    token = TRYING.set(True)
    try:
        yield
    finally:
        TRYING.reset(token)


@contextmanager
def without_trace(model: nn.Module) -> Iterator[None]:
    """Inside, forwards of a model are trials, and graphs are recorded.

    Afterwards random states, modes, buffers, attributes, what is in lists, dicts and sets of modules, and hooks are as
    they were.
    """
    owned = [vars(module) for module in model.modules()]
    tables = [*owned, *(own[name] for own in owned for name in TABLES if isinstance(own.get(name), dict))]
    entries = [dict(table) for table in tables]
    attributes = [tensor_in(value) for own in owned for value in own.values()]
    tensors = [*model.buffers(), *(each for each in attributes if each is not None and not each.requires_grad)]
    values = [tensor.clone() for tensor in tensors]
    containers = [each for own in owned for name, each in own.items() if name not in OF_MODULES and is_kept(each)]
    contents = [each.copy() for each in containers]
    with trying(), drawing_from(random_states()), torch.enable_grad():
        try:
            yield
        finally:
            for table, before in zip(tables, entries, strict=True):
                _put_back_entries(table, before)
            for tensor, value in zip(tensors, values, strict=True):
                _put_back_values(tensor, value)
            for container, content in zip(containers, contents, strict=True):
                _put_back_contents(container, content)


def _put_back_entries(table: dict[str, Any], before: dict[str, Any]) -> None:
    if len(table) != len(before) or any(table.get(name, table) is not value for name, value in before.items()):
        table.clear()
        table.update(before)


def _put_back_contents(container: Any, content: Any) -> None:
    if isinstance(container, dict):
        _put_back_entries(container, content)
    elif len(container) != len(content) or not all(map(operator.is_, container, content)):
        container.clear()
        if isinstance(container, set):
            container.update(content)
        else:
            container.extend(content)


@torch.no_grad()
def _put_back_values(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if tensor.shape != value.shape:  # exchanged by ``tensor.data = ...``
        tensor.data = value
    elif not same_numbers(tensor, value):
        tensor.copy_(value)
