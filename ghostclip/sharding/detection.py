"""Which sharded models can be gathered for the passes, and which are refused.

FSDP2's ``fully_shard`` of the model itself can be gathered; FSDP1 and tensor parallelism are refused.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ghostclip.errors import PrivacyError, UnsupportedModelError

__all__ = [
    "INSTEAD_OF_SHARDING",
    "check_sharding",
    "is_fully_sharded",
    "mesh_group",
    "parameter_groups",
    "refuse_sharded",
    "reshard",
    "sharding_problem",
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


def check_sharding(model: nn.Module) -> None:
    """Raises UnsupportedModelError for a model that is sharded in a way that can't be gathered."""
    if (found := sharding_problem(model)) is not None:
        raise UnsupportedModelError(f"{found[0] or 'the model'}: {found[1]}; {INSTEAD_OF_SHARDING}")


def sharding_problem(model: nn.Module) -> tuple[str, str] | None:
    """(path, problem) of the first parameter or module by which the model can't be gathered; None where it can."""
    if is_fully_sharded(model):
        return _odd_sharding(model)
    for name, parameter in model.named_parameters():
        if problem := _divided(parameter):
            return name, f"it is {problem}"
    for path, module in model.named_modules():
        if classes := _sharding_classes(module):
            return path, f"it is sharded by {classes}"
    return None


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether FSDP2's ``fully_shard`` was called on the model itself."""
    return "FSDPModule" in _sharding_classes(model)


def reshard(model: Any) -> None:
    """Puts shards in the places of whole Parameters that a forward of a model under ``fully_shard`` left there."""
    if is_fully_sharded(model):
        for module in model.modules():
            if is_fully_sharded(module):
                module.reshard()


def mesh_group(model: nn.Module, process_group: Any) -> Any:
    """The group of the mesh that ``model`` is sharded over; PrivacyError if ``process_group`` has other processes."""
    shard: Any = next(model.parameters())
    mesh = shard.device_mesh
    group = mesh.get_group() if process_group is None and mesh.ndim == 1 else process_group
    if sorted(dist.get_process_group_ranks(group)) != sorted(mesh.mesh.flatten().tolist()):
        raise PrivacyError(
            "the process group isn't that of the mesh which the model is sharded over; give process_group= the ranks "
            "of that mesh"
        )
    return group


def parameter_groups(model: nn.Module) -> list[Any]:
    """FSDP2's groups of parameters that are gathered together, those of the model itself first."""
    states = dict.fromkeys(m._get_fsdp_state() for m in model.modules() if is_fully_sharded(m))  # type: ignore[operator]
    return [group for state in states for group in state._fsdp_param_groups]


def _odd_sharding(model: nn.Module) -> tuple[str, str] | None:
    """What `sharding_problem` finds of a model that ``fully_shard`` was called on."""
    state = model._get_fsdp_state()  # type: ignore[operator]
    if not hasattr(state, "_fsdp_param_groups") or not hasattr(state, "_reset_iter_state"):
        return "", "it is sharded by FSDP2 of a version of torch older than those supported (2.13 is)"
    if state._is_root is False:
        return "", "it is a part of a model that fully_shard was called on"
    for path, module in model.named_modules():
        if "FullyShardedDataParallel" in _sharding_classes(module):
            return path, "it is sharded by FullyShardedDataParallel inside of a model sharded by fully_shard"
    groups = parameter_groups(model)
    params = [each for group in groups for each in group.fsdp_params]
    known = {id(p) for each in params for p in (each.sharded_param, getattr(each, "_unsharded_param", None))}
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
    """Raises UnsupportedModelError for a model that was sharded since it was wrapped.

    ``known`` are ids of the parameters as they were then: while layers run, sharding puts others into their places that
    look like any parameter.
    """
    check_sharding(model)
    for name, parameter in model.named_parameters():
        if id(parameter) not in known:
            raise UnsupportedModelError(
                f"{name} is another Parameter than when the model was wrapped, as after sharding; "
                f"{INSTEAD_OF_SHARDING}. If it isn't sharded, build the clipper or engine anew"
            )


def _sharding_classes(module: nn.Module) -> str:
    return " and ".join(sorted(SHARDING_CLASSES.intersection([base.__name__ for base in type(module).__mro__])))


def _divided(parameter: Tensor) -> str:
    """What a parameter is a part of; "" for a whole one."""
    if type(parameter) is not nn.Parameter and hasattr(parameter, "device_mesh"):
        return "a DTensor, of which each process holds a part"
    if not FLATTENED.isdisjoint(parameter.__dict__):
        return "part of a flat parameter of FullyShardedDataParallel"
    return ""
