"""Sharded models, of which a process holds a part: which of them can be made whole for the passes, and which can't.

FSDP2's ``fully_shard`` of the model itself can (`ghostclip.clipper.layout`); FSDP1 and tensor parallelism are refused.
"""

from __future__ import annotations

from collections.abc import Container
from functools import cache
from typing import Any

from torch import Tensor, nn

from ghostclip.errors import UnsupportedModelError

__all__ = [
    "INSTEAD_OF_SHARDING",
    "is_fully_sharded",
    "local_part",
    "parameter_groups",
    "refuse_sharded",
    "reshard",
    "sharding_of",
]

INSTEAD_OF_SHARDING = (
    "per-example norms need whole layers: use the model unsharded, for several processes in DistributedDataParallel, "
    "or sharded by FSDP2: fully_shard(model) on the model itself, in its own types and on one mesh, before the clipper "
    "or engine is built"
)
# FSDP1's wrapper, and the class that FSDP2's fully_shard adds to a module's own.
SHARDING_CLASSES = {"FullyShardedDataParallel", "FSDPModule"}
# What parameters have that FSDP1 flattened into others, and the flat ones.
FLATTENED = frozenset(("_fsdp_flattened", "_is_flat_param"))


def local_part(tensor: Any) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def sharding_of(model: nn.Module) -> tuple[str, str] | None:
    """(path, problem) of the first parameter or module by which the model can't be made whole; None where it can."""
    if is_fully_sharded(model):
        return _odd_sharding(model)
    for name, parameter in model.named_parameters():
        if problem := _divided(parameter):
            return name, f"it is {problem}"
    for path, module in model.named_modules():
        kind: Any = type(module)
        if classes := _sharding_classes(kind):
            return path, f"it is sharded by {classes}"
    return None


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether FSDP2's ``fully_shard`` was called on the model itself."""
    kind: Any = type(model)
    return "FSDPModule" in _sharding_classes(kind)


def reshard(model: Any) -> None:
    """Puts shards in the places of whole Parameters that a forward of a model under ``fully_shard`` left there."""
    if is_fully_sharded(model):
        for module in model.modules():
            if is_fully_sharded(module):
                module.reshard()


def parameter_groups(model: nn.Module) -> list[Any]:
    """FSDP2's groups of parameters that are gathered together, those of the model itself first."""
    states = dict.fromkeys(m._get_fsdp_state() for m in model.modules() if is_fully_sharded(m))  # type: ignore[operator]
    return [group for state in states for group in state._fsdp_param_groups]


def _odd_sharding(model: nn.Module) -> tuple[str, str] | None:
    """What `sharding_of` finds of a model that ``fully_shard`` was called on."""
    state = model._get_fsdp_state()  # type: ignore[operator]
    if not hasattr(state, "_fsdp_param_groups") or not hasattr(state, "_reset_iter_state"):
        return "", "it is sharded by FSDP2 of a version of torch older than those supported (2.13 is)"
    if state._is_root is False:
        return "", "it is a part of a model that fully_shard was called on"
    for path, module in model.named_modules():
        kind: Any = type(module)
        if "FullyShardedDataParallel" in _sharding_classes(kind):
            return path, "it is sharded by FullyShardedDataParallel inside of a model sharded by fully_shard"
    groups = parameter_groups(model)
    known: set[int] = set()
    for group in groups:
        for each in group.fsdp_params:
            known |= {id(each.sharded_param), id(getattr(each, "_unsharded_param", None))}
    if groups and (problem := _odd_group(groups)):
        return "", problem
    for name, parameter in model.named_parameters():
        if id(parameter) not in known:
            return name, "fully_shard left it out (ignored_params, or it was put there afterwards)"
    return None


def _odd_group(groups: list[Any]) -> str:
    """What keeps groups of parameters from being gathered and summed exactly; "" for nothing."""
    for group in groups:
        policy, mesh = group.mp_policy, group.mesh_info
        if policy.param_dtype is not None or policy.reduce_dtype is not None:
            return "fully_shard was given a MixedPrecisionPolicy with param_dtype or reduce_dtype"
        if type(group.offload_policy).__name__ != "OffloadPolicy":
            return f"fully_shard was given {type(group.offload_policy).__name__}"
        if type(mesh).__name__ not in ("FSDPMeshInfo", "HSDPMeshInfo"):
            return f"fully_shard was given a mesh it doesn't shard over ({type(mesh).__name__})"
        if mesh.mesh != groups[0].mesh_info.mesh:
            return "its modules are sharded over different meshes"
        if group._all_reduce_hook is not None:
            return "it has an all-reduce hook, which may change clipped sums before they have noise"
        if any(each.is_dtensor for each in group.fsdp_params):
            return "fully_shard was applied to DTensors, of which each process holds a part (tensor parallelism)"
        local = [each._sharded_local_tensor for each in group.fsdp_params]
        if any(hasattr(each, "fsdp_pre_all_gather") for each in local):
            return "its parameters are gathered as something else than they are (fsdp_pre_all_gather)"
    return ""


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
