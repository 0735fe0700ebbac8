"""What a forward leaves in a model: in buffers, frozen parameters, and attributes of its modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Left", "ModelSnapshot", "unlike"]

# Elements of a frozen parameter whose sum is compared: of a larger one, a change that torch counts is seen.
LARGE = 1 << 24
# Of every module; parameters, buffers and submodules have their own ways of being compared.
OF_MODULES = frozenset(vars(nn.Module())) - {"training"}

Named = dict[str, Tensor]


class Left(NamedTuple):
    """What is in a model after a forward.

    Attributes:
        buffers, attributes: copies by names; attributes are tensors and arrays that modules have without registering.
        wrote: whether a buffer has another value or shape than before.
        frozen: names of frozen parameters that were written to.
        changed: names of attributes with another value or shape; "" for one that is no tensor.
    """

    buffers: Named
    attributes: Named
    wrote: bool
    frozen: list[str]
    changed: list[str]


class ModelSnapshot:
    """A model before a forward.

    Args:
        model: as it is now.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._buffers, self._attributes = _buffers_of(model), _attributes_of(model)
        self._objects, self._frozen = _objects_of(model), _frozen_of(model)

    def left(self) -> Left:
        """What the forward left."""
        buffers, attributes = _buffers_of(self._model), _attributes_of(self._model)
        changed = [name for name in attributes if not _same(self._attributes.get(name), attributes[name])]
        if not changed and not _are_same(self._objects, _objects_of(self._model)):
            changed = [""]
        frozen = _frozen_of(self._model)
        return Left(
            buffers,
            attributes,
            any(not _same(self._buffers.get(name), buffer) for name, buffer in buffers.items()),
            [name for name, found in frozen.items() if self._frozen.get(name, found) != found],
            changed,
        )


def _buffers_of(model: nn.Module) -> Named:
    """Copies of the buffers as they are bound now, whichever way they were written."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def _attributes_of(model: nn.Module) -> Named:
    """Copies of tensors and arrays that modules have as attributes without registering them."""
    found = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in OF_MODULES:
                continue
            if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
                value = torch.from_numpy(value)
            if isinstance(value, Tensor):
                found[f"{path}.{name}" if path else name] = value.detach().clone()
    return found


def _objects_of(model: nn.Module) -> list[tuple[Any, int]]:
    """All other attributes of modules, each with its length."""
    found = []
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in OF_MODULES and not isinstance(value, Tensor | np.ndarray):
                found.append((value, len(value) if isinstance(value, list | dict | set) else 0))
    return found


def _are_same(these: list[tuple[Any, int]], those: list[tuple[Any, int]]) -> bool:
    """Whether both are the same objects of the same lengths."""
    pairs = zip(these, those, strict=False)
    return len(these) == len(those) and all(one is other and size == now for (one, size), (other, now) in pairs)


def _frozen_of(model: nn.Module) -> dict[str, tuple[int, int, float]]:
    """{name: (version, address, sum)} of frozen parameters; they may be large, so that they aren't copied."""
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            total = float(parameter.detach().double().sum()) if parameter.numel() <= LARGE else 0.0
            found[name] = (parameter._version, parameter.data_ptr(), total)
    return found


def unlike(these: Mapping[str, Tensor], those: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors with other values; one that has another shape is a cache."""
    both = [name for name in these if name in those and these[name].shape == those[name].shape]
    return [name for name in both if not _same(these[name], those[name])]


def _same(one: Tensor | None, other: Tensor) -> bool:
    if one is None or one.is_nested or other.is_nested or one.shape != other.shape:
        return False
    if one.is_sparse or one.is_quantized or one.device != other.device:
        return one is other
    return one.dtype == other.dtype and bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
