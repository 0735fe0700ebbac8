"""What a forward leaves in a model: values of buffers, and of tensors that modules have as plain attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Left", "attributes_of", "buffers_of", "unlike"]

# Of every module; parameters, buffers and submodules have their own ways of being compared.
OF_MODULES = frozenset(vars(nn.Module())) - {"training"}

Left = dict[str, Tensor]


def buffers_of(model: nn.Module) -> Left:
    """{name: copy} of the buffers as they are bound now, whichever way they were written."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def attributes_of(model: nn.Module) -> Left:
    """{name: copy} of tensors and arrays that modules have as attributes without registering them."""
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


def objects_of(model: nn.Module) -> list[tuple[Any, int]]:
    """All other attributes of modules, each with its length: the same objects in the same number are the same."""
    found = []
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in OF_MODULES and not isinstance(value, Tensor | np.ndarray):
                found.append((value, len(value) if isinstance(value, list | dict | set) else 0))
    return found


def unlike(these: Mapping[str, Tensor], those: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors with other values; one that changes its shape with its batch is a cache."""
    both = [name for name in these if name in those and these[name].shape == those[name].shape]
    return [name for name in both if not _equal(these[name], those[name])]


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.is_sparse or one.is_nested or one.is_quantized or one.device != other.device:
        return one is other
    return one.dtype == other.dtype and bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
