"""A forward that is tried again without a trace in the model and in random states."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

__all__ = ["Replay", "is_trial", "leaves_of", "rows_between", "take_rows"]

_TRYING = ContextVar("trying", default=False)
# What modules keep hooks of a forward in.
HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
         "_forward_pre_hooks_with_kwargs")  # fmt: skip

# What holds buffers and submodules, to which a forward may add some.
OWNED = ("_buffers", "_modules")

Place = tuple[nn.Module, dict[str, Any], list[dict[Any, Any]]]


def is_trial() -> bool:
    """Whether a forward that runs now is a trial, whose losses are used for nothing but checks."""
    return _TRYING.get()


@contextmanager
def trying() -> Iterator[None]:
    """Inside, `is_trial` is true."""
    token = _TRYING.set(True)
    try:
        yield
    finally:
        _TRYING.reset(token)


class Replay:
    """Remembers random states and a model's buffers, so that a forward can be tried again without a trace.

    Args:
        model: in the state from which its forward will be repeated.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._devices = sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)
        self._states, self._before = self._now(), self.state()

    def _now(self) -> tuple[Any, ...]:
        cuda = [torch.cuda.get_rng_state(device) for device in self._devices]
        return torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()

    def _set(self, states: tuple[Any, ...]) -> None:
        cpu, cuda, numpy_state, python_state = states
        torch.set_rng_state(cpu)
        for device, state in zip(self._devices, cuda, strict=True):
            torch.cuda.set_rng_state(state, device)
        np.random.set_state(numpy_state)
        random.setstate(python_state)

    def state(self) -> tuple[Any, ...]:
        """The random states as they are now, to be compared."""
        cpu, cuda, (_, keys, *numpy_rest), python_state = self._now()
        return (*[each.numpy().tobytes() for each in (cpu, *cuda)], keys.tobytes(), *numpy_rest, python_state)

    def rewind(self) -> None:
        """Sets the random states that were there at first, within `again`."""
        self._set(self._states)

    def drew(self) -> bool:
        """Whether random numbers were drawn since."""
        return self.state() != self._before

    @contextmanager
    def again(self, gradients: bool = False, training: bool = True) -> Iterator[None]:
        """With the random numbers that were to come then; afterwards buffers, attributes, hooks, modes are back.

        Args:
            gradients: whether a graph is recorded.
            training: False for eval mode.
        """
        now = self._now()
        buffers = [(buffer, buffer.clone()) for buffer in [*self.model.buffers(), *_plain_tensors(self.model)]]
        places = [_place_of(module) for module in self.model.modules()]
        with ExitStack() as stack:
            stack.enter_context(trying())
            stack.callback(self._set, now)
            stack.callback(_put_back, buffers, places)
            stack.enter_context(torch.set_grad_enabled(gradients))
            self.rewind()
            if not training:
                self.model.eval()
            yield


def _plain_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Tensors that modules have as attributes of their own, and in no graph."""
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.requires_grad:
                yield value


def _place_of(module: nn.Module) -> Place:
    own: Any = vars(module)
    return module, dict(own), [dict(own[name]) for name in (*OWNED, *HOOKS)]


@torch.no_grad()
def _put_back(buffers: list[tuple[Tensor, Tensor]], places: list[Place]) -> None:
    for module, attributes, tables in places:
        own = vars(module)
        for name in own.keys() - attributes.keys():
            del own[name]
        own.update(attributes)
        # A forward that adds hooks once, and marks that it did, would add them again: the mark is an attribute.
        for name, before in zip((*OWNED, *HOOKS), tables, strict=True):
            if [*map(id, own[name].values())] != [*map(id, before.values())]:
                own[name].clear()
                own[name].update(before)
    for buffer, value in buffers:
        if buffer.shape != value.shape:  # exchanged by ``buffer.data = ...``
            buffer.data = value
        elif not torch.equal(buffer, value):
            buffer.copy_(value)


def leaves_of(batch: Any, nested: bool = False) -> tuple[list[Tensor], Any, int] | None:
    """(tensors, structure, number of examples) of a batch; None unless all leaves are tensors with B in dimension 0.

    Args:
        batch: of any structure.
        nested: whether they may be nested tensors, whose rows `take_rows` takes.
    """
    leaves, structure = tree_flatten(batch)
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        return None
    if not nested and any(leaf.is_nested for leaf in leaves):
        return None
    examples = {leaf.size(0) for leaf in leaves}
    return (leaves, structure, examples.pop()) if len(examples) == 1 else None


def take_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Some rows of a tensor [B, ...], in this order: ``tensor[rows]``, which nested tensors don't have.

    Args:
        tensor: strided or jagged, where it is nested.
        rows: numbers of rows, [n] with n >= 1.

    Raises:
        TypeError: the tensor is jagged and has lengths of its own, not those between its offsets.
    """
    if not tensor.is_nested:
        return tensor[rows.to(tensor.device)]
    jagged: Any = tensor if tensor.layout == torch.jagged else None
    if jagged is not None and jagged.lengths() is not None:
        raise TypeError("it holds a jagged tensor with lengths of its own, and not those between its offsets")
    parts = tensor.unbind()
    chosen = [parts[row] for row in rows.tolist()]
    if jagged is None:
        return torch.nested.as_nested_tensor(chosen)
    dim = jagged._ragged_idx - 1
    sizes = torch.tensor([0, *(part.shape[dim] for part in chosen)], device=tensor.device)
    return torch.nested.nested_tensor_from_jagged(torch.cat(chosen, dim), sizes.cumsum(0), jagged_dim=dim + 1)


def rows_between(tensor: Tensor, start: int, stop: int) -> Tensor:
    """``tensor[start:stop]``, which nested tensors don't have; raises as `take_rows`."""
    return take_rows(tensor, torch.arange(start, stop)) if tensor.is_nested else tensor[start:stop]
