"""State as plain data: nested lists, tuples and dicts as JSON, their tensors beside it under names."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.errors import PrivacyError

__all__ = ["packed", "unpacked"]

# Kinds of dict that are told apart.
DICTS: dict[str, type[dict]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
TUPLES = (tuple, torch.Size)


def packed(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """``value`` as JSON; a tensor becomes its name in ``tensors``, where it is put, on the CPU.

    Floats, tensors of every type and the kinds of ``DICTS`` come back from `unpacked` exactly as they were.

    Args:
        value: None, numbers, strings, tensors, and lists, tuples and dicts of such.
        tensors: filled.
        where: what the value is called in messages; what follows the first dot names its tensors.

    Raises:
        PrivacyError: something else is in it, which would need code to be run to be made again.
    """
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, Tensor):
        name = where.partition(".")[2] or where
        tensors[name] = _on_cpu(value, tensors, where)
        return {"tensor": name}
    if type(value) is list:
        return [packed(item, tensors, f"{where}.{place}") for place, item in enumerate(value)]
    if type(value) in TUPLES:
        return {"tuple": [packed(item, tensors, f"{where}.{place}") for place, item in enumerate(value)]}
    for name, kind in DICTS.items():
        if type(value) is kind:
            if wrong := [key for key in value if type(key) not in (str, int)]:
                raise PrivacyError(
                    f"{where} has the key {wrong[0]!r}; a checkpoint takes dicts with keys that are strings or int"
                )
            items = [[key, packed(item, tensors, f"{where}.{key}")] for key, item in value.items()]
            return {name: dict(items) if all(isinstance(key, str) for key in value) else items}
    raise PrivacyError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint can't hold: it takes "
        "numbers, strings, None, tensors, and lists, tuples and dicts of them, since reading anything else back would "
        "run code. Turn it into one of those in state_dict()"
    )


def unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `packed` was given. Raises ValueError or KeyError when nothing can have become this."""
    if isinstance(value, list):
        return [unpacked(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "float":
        return float(content)
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(unpacked(item, tensors) for item in content)
    items = content.items() if isinstance(content, dict) else content
    return DICTS[kind]({key: unpacked(item, tensors) for key, item in items})


def _on_cpu(tensor: Tensor, others: Mapping[str, Tensor], where: str) -> Tensor:
    """A contiguous copy, or the tensor itself where nothing of the others shares its memory."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        raise PrivacyError(
            f"{where} is a {type(tensor).__name__} of layout {tensor.layout}; a checkpoint holds ordinary dense "
            "tensors only: gather or convert it first"
        )
    if tensor.dtype.is_complex or tensor.is_quantized:
        raise PrivacyError(f"{where} is of type {tensor.dtype}, which a checkpoint can't hold; store its parts instead")
    found = tensor.detach().cpu().contiguous()
    memory = found.untyped_storage().data_ptr()
    shared = any(other.untyped_storage().data_ptr() == memory for other in others.values())
    return found.clone() if shared or found.untyped_storage().nbytes() != found.nbytes else found
