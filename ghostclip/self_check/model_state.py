"""What a model keeps from one forward to the next: in buffers, attributes of its modules and frozen parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.clipper.trial import tensor_in

__all__ = ["State", "changed", "frozen_marks", "state_of", "unlike"]

# Elements of a frozen parameter whose sum is compared: of a larger one, a change that torch counts is seen.
LARGE = 1 << 24
# Of every module; parameters, buffers and submodules have their own ways of being compared.
OF_MODULES = frozenset(vars(nn.Module())) - {"training"}

# {(kind, name): value}. Of a "buffer" and an "attribute" (a tensor or array that isn't registered) it is a copy, of
# another "object" the object itself and its length.
State = dict[tuple[str, str], Any]


def state_of(model: nn.Module) -> State:
    """What a model has now, in whichever way it was written."""
    found: State = {("buffer", name): buffer.detach().clone() for name, buffer in model.named_buffers()}
    for path, module in model.named_modules():
        for own, value in vars(module).items():
            if own in OF_MODULES:
                continue
            name = f"{path}.{own}" if path else own
            if (tensor := tensor_in(value)) is not None:
                found["attribute", name] = tensor.detach().clone()
            else:
                found["object", name] = value, len(value) if isinstance(value, list | dict | set) else 0
    return found


def frozen_marks(model: nn.Module) -> dict[str, tuple[int, int, float]]:
    """{name: (version, address, sum)} of frozen parameters; they may be large, so that they aren't copied."""
    frozen = {name: each.detach() for name, each in model.named_parameters() if not each.requires_grad}
    return {
        name: (each._version, each.data_ptr(), float(each.double().sum()) if each.numel() <= LARGE else 0.0)
        for name, each in frozen.items()
    }


def changed(before: State, after: State) -> State:
    """What of ``after`` wasn't there before, or has another value or shape; what was removed has None."""
    both = {name: after.get(name) for name in before | after}
    return {name: value for name, value in both.items() if not _same(before.get(name), value)}


def unlike(these: State, those: State, kind: str) -> list[str]:
    """Names of tensors of a kind with other values; one that has another shape is a cache."""
    both = [key for key in these if key[0] == kind and key in those and these[key].shape == those[key].shape]
    return [name for _, name in both if not _same(these[kind, name], those[kind, name])]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return one[0] is other[0] and one[1] == other[1]
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)) or one.layout != torch.strided or one.is_quantized:
        return False
    if other.layout != torch.strided or one.is_nested or other.is_nested or one.shape != other.shape:
        return False
    alike = one.dtype == other.dtype and one.device == other.device
    return alike and bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
