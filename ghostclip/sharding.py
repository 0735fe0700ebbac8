"""Sharded models, of which a process holds a part: FSDP1, FSDP2, tensor parallelism. They are refused."""

from __future__ import annotations

from collections.abc import Container
from functools import cache
from typing import Any

from torch import Tensor, nn

from ghostclip.errors import UnsupportedModelError

__all__ = ["INSTEAD_OF_SHARDING", "refuse_sharded", "sharding_of"]

INSTEAD_OF_SHARDING = (
    "per-example norms need whole layers: use the model unsharded, for several processes in DistributedDataParallel"
)
# FSDP1's wrapper, and the class that FSDP2's fully_shard adds to a module's own.
SHARDING_CLASSES = {"FullyShardedDataParallel", "FSDPModule"}
# What parameters have that FSDP1 flattened into others, and the flat ones.
FLATTENED = frozenset(("_fsdp_flattened", "_is_flat_param"))


def sharding_of(model: nn.Module) -> tuple[str, str] | None:
    """(path, problem) of the first parameter of which a process holds a part, or else module that shards; or None."""
    for name, parameter in model.named_parameters():
        if problem := _divided(parameter):
            return name, f"it is {problem}"
    for path, module in model.named_modules():
        kind: Any = type(module)
        if classes := _sharding_classes(kind):
            return path, f"it is sharded by {classes}"
    return None


def refuse_sharded(model: nn.Module, known: Container[int]) -> None:
    """Raises UnsupportedModelError for a model that was sharded since it was wrapped; takes 1.3 us for each module.

    ``known`` are ids of the parameters as they were when it was wrapped: while layers run, sharding puts others into
    their places that look like any parameter.
    """
    for module in model.modules():
        kind: Any = type(module)
        if _sharding_classes(kind):
            break
        own = module._parameters.values()
        if any(p is not None and (id(p) not in known or _divided(p)) for p in own):
            break
    else:
        return
    if (found := sharding_of(model)) is not None:
        path, problem = found
        raise UnsupportedModelError(f"{path or 'the model'}: {problem}; {INSTEAD_OF_SHARDING}")
    other = next(name for name, parameter in model.named_parameters() if id(parameter) not in known)
    raise UnsupportedModelError(
        f"{other} is another Parameter than when the model was wrapped, as after sharding; {INSTEAD_OF_SHARDING}. "
        "If it isn't sharded, build the clipper or engine anew"
    )


@cache
def _sharding_classes(kind: Any) -> str:
    return " and ".join(sorted(SHARDING_CLASSES.intersection([base.__name__ for base in kind.__mro__])))


def _divided(parameter: Tensor) -> str:
    """What a parameter is a part of; "" for a whole one."""
    if type(parameter) is not nn.Parameter and hasattr(parameter, "device_mesh"):
        return "a DTensor, of which each process holds a part"
    if not FLATTENED.isdisjoint(parameter.__dict__):
        return "part of a flat parameter of FullyShardedDataParallel"
    return ""
