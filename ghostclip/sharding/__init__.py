"""Where a model's parameters are: whole in each process, or sharded by FSDP2. Only here is torch's private FSDP2 read.

Two processes, for example: of a weight with 6 rows each keeps a shard of 3, a DTensor, which the optimizer steps. While
its layer runs, FSDP2 gathers the 6 rows into a whole Parameter in the shard's place. Each process forms the clipped sum
of its own examples, 6 rows. They are reduced to 3 rows of the total each, which get noise where they are.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ghostclip.sharding.detection import check_sharding, is_fully_sharded
from ghostclip.sharding.plain import Sharding

__all__ = ["sharding_of"]


def sharding_of(model: nn.Module, guard: Any) -> Sharding:
    """What a clipper and its engine call about the parameters of ``model``; all ranks call it for a sharded one.

    ``guard`` is a `GradientGuard` for the p.grads of shards. Raises UnsupportedModelError for what can't be gathered.
    """
    if not is_fully_sharded(model):
        return Sharding(model)
    check_sharding(model)
    from ghostclip.sharding.fsdp2 import FullySharded  # DTensor, which takes seconds to import

    return FullySharded(model, guard)
