"""Whether frozen parameters are written to, by numbers that don't depend on where FSDP2 has their values at the moment.

Example: before a forward a model under FSDP2 has shards, and behind it maybe whole Parameters. Either way a frozen
parameter is told by its shard, and by whether the whole values, where they are there, are those of the shards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.sharding.detection import parameter_groups
from ghostclip.sharding.plain import local_part

__all__ = ["frozen_parameters"]

# Elements of a parameter whose values are compared: of a larger one, a change that torch counts is seen.
LARGE = 1 << 24


@torch.no_grad()
def frozen_parameters(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """{name: (the Parameter or its shard, numbers that change when it is written to)}. Nothing is gathered for it.

    Of a sharded one, what a forward writes to whole values is found until FSDP2 frees them, and where torch counts it.
    """
    pairs, found = _pairs(model), {}
    for name, each in model.named_parameters():
        if not each.requires_grad:
            stored, whole = pairs.get(id(each), (each, None))
            local = local_part(stored)
            versions = [tensor._version for tensor in (stored, local, whole) if tensor is not None]
            alike = whole is None or _is_whole_of(whole, stored)
            found[name] = stored, sum(versions), local.data_ptr(), _sum(local), alike
    return found


def _pairs(model: nn.Module) -> dict[int, tuple[nn.Parameter, nn.Parameter | None]]:
    """{id of a shard, or of its whole Parameter: both}; None for one that was never gathered."""
    params = [each for group in parameter_groups(model) for each in group.fsdp_params]
    pairs = [(each.sharded_param, getattr(each, "_unsharded_param", None)) for each in params]
    return {id(each): pair for pair in pairs for each in pair if each is not None}


def _is_whole_of(whole: Tensor, shard: Any) -> bool:
    """Whether this process's part of the whole values is its shard; also where they can't be compared."""
    if whole.numel() > LARGE or whole.dtype != shard.dtype or not whole.untyped_storage().nbytes():
        return True
    from torch.distributed.tensor import distribute_tensor

    part = distribute_tensor(whole.detach().to(shard.device), shard.device_mesh, shard.placements, src_data_rank=None)
    return torch.equal(local_part(part), local_part(shard))


def _sum(values: Tensor) -> float:
    return float(values.double().nansum()) if values.numel() <= LARGE else 0.0
