"""Models under FSDP2 in the engine: sums of whole parameters become shards, and each rank adds the noise of its own.

Layers use whole Parameters within a logical batch, in whose p.grads the sums of a rank's examples are gathered. At the
step they are reduce-scattered, once; the optimizer holds the shards, and steps them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ghostclip.clipper import GhostClipper
from ghostclip.clipper.layout import as_shard, local_part, part_of, reduced
from ghostclip.engine.distributed import Ranks
from ghostclip.engine.sums import ClippedSums
from ghostclip.engine.update_check import UpdateCheck
from ghostclip.errors import PrivacyError
from ghostclip.noise import Noise
from ghostclip.noise.release import flat, on_flat

__all__ = ["ShardedRanks", "sharded_ranks", "sums_of", "updates_of"]


def sums_of(clipper: GhostClipper) -> ClippedSums:
    """Where the clipped sums of the clipper's model are gathered."""
    exact = clipper.passes.reduce_apart()
    return ShardedSums(clipper, exact) if clipper.layout.sharded else ClippedSums(clipper.model, exact)


def updates_of(clipper: GhostClipper) -> UpdateCheck:
    """What watches the parameters of the clipper's model."""
    return ShardedUpdates(clipper) if clipper.layout.sharded else UpdateCheck(clipper.model)


class ShardedSums(ClippedSums):
    """Gathers sums in the p.grads of whole Parameters, and leaves what is released in those of shards.

    Args:
        clipper: of a sharded model.
        exact: as for `ClippedSums`.
    """

    def __init__(self, clipper: GhostClipper, exact: dict[int, Tensor]) -> None:
        super().__init__(clipper.model, exact)
        pairs = clipper.layout.pairs
        self._named = [(name, whole) for name, _, whole in pairs]
        self._stepped = [(name, shard) for name, shard, _ in pairs]
        self._whole = {shard: whole for _, shard, whole in pairs}

    def release(
        self,
        held: Collection[nn.Parameter],
        make_private: Callable[[list[nn.Parameter], list[Tensor]], list[Tensor]],
    ) -> None:
        """As `ClippedSums.release`; ``make_private`` makes this rank's shards of whole sums."""

        def made(shards: list[nn.Parameter], sums: list[Tensor]) -> list[Tensor]:
            return [as_shard(each, shard) for each, shard in zip(make_private(shards, sums), shards, strict=True)]

        super().release(held, made)

    def _sum_of(self, parameter: nn.Parameter) -> Tensor:
        whole = self._whole[parameter]
        found = super()._sum_of(whole)
        whole.grad = None  # so that it goes once it is reduced
        return found


class ShardedUpdates(UpdateCheck):
    """Watches the shards, whichever Parameters are in their places.

    Args:
        clipper: of a sharded model.
    """

    def __init__(self, clipper: GhostClipper) -> None:
        self._shards: dict[int, nn.Parameter] = {id(whole): shard for _, shard, whole in clipper.layout.pairs}
        self._layout: Any = clipper.layout
        super().__init__(clipper.model)

    def _ids_now(self) -> list[int]:
        values = [value for owner in self._owners for value in owner.values()]
        return [id(self._shards.get(id(value), value)) for value in values]

    @torch.no_grad()
    def _versions_now(self) -> list[int]:
        # An optimizer's operations count on the DTensor, what is written to its local part on that.
        return [parameter._version + local_part(parameter)._version for parameter in self._parameters]

    @torch.no_grad()
    def _addresses_now(self) -> list[int]:
        return [local_part(parameter).data_ptr() for parameter in self._parameters]

    def _written(self) -> str | None:
        return super()._written() or self._layout.written()

    def _named_now(self) -> dict[str, nn.Parameter]:
        return {name: self._shards.get(id(each), each) for name, each in self._model.named_parameters()}


class ShardedRanks(Ranks):
    """The processes that a model is sharded over.

    Args:
        mesh: of FSDP2; replicas of the shards along its first dimension where it has two.
        group: its processes.
    """

    def __init__(self, mesh: Any, group: Any = None) -> None:
        super().__init__(group)
        # Those that hold the same shards as this rank; None where nobody else does.
        self._replicas: Any = mesh.get_group(0) if mesh.ndim == 2 else None

    @torch.no_grad()
    def released(
        self, noise: Noise, sums: list[Tensor], std: float, divisor: float, parameters: list[nn.Parameter]
    ) -> list[Tensor]:
        """This rank's shards of what `Ranks.released` gives, each with noise that this rank drew, or a replica of it.

        Repeatable noise is drawn for whole sums by the leading rank, so that it is the same for any number of ranks.
        """
        count = len(parameters)
        if not noise.private:
            found = super().released(noise, sums, std, divisor, parameters)
            parts = [local_part(part_of(each, p)) for each, p in zip(found[:count], parameters, strict=True)]
            return parts + found[count:]
        for place, parameter in enumerate(parameters):
            sums[place] = local_part(reduced(sums[place], parameter))  # the whole one may go
        totals = sums[:count]
        draws = self._replicas is None or dist.get_rank(self._replicas) == 0
        # Agreed, so that a rank that fails here isn't left behind by the others.
        shards, _ = self.agreed(lambda: noise.release(totals, std, divisor) if draws else totals, dict)
        shards = shards if self._replicas is None else self._from_first_replica(shards)
        return shards + (super().released(noise, sums[count:], std, divisor, []) if sums[count:] else [])

    def _from_first_replica(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors of the first of the replicas, on all."""

        def given(some: list[Tensor]) -> Tensor:
            dist.broadcast(numbers := flat(some), dist.get_global_rank(self._replicas, 0), self._replicas)
            return numbers

        return on_flat(tensors, given)

    @torch.no_grad()
    def start_alike(self, model: nn.Module) -> None:
        """Shards are where they are; replicas of them become those of the first, and buffers the leading rank's."""
        for buffer in model.buffers():
            buffer.copy_(self.spread([buffer.detach().clone()])[0])
        if self._replicas is not None:
            for parameter in model.parameters():
                mine = local_part(parameter)
                mine.copy_(self._from_first_replica([mine.clone()])[0])

    def whole(self, value: Any) -> Any:
        """Whole tensors, on the leading rank; of sharded ones nothing on the others."""
        if not hasattr(value, "full_tensor"):
            return value
        found = value.full_tensor()
        return found.cpu() if self.leads else found.new_empty(0)

    def part(self, value: Any, like: Tensor) -> Any:
        """The shard of a whole tensor as large as the parameter ``like``; anything else as it is."""
        if not isinstance(value, Tensor) or value.shape != like.shape or not hasattr(like, "device_mesh"):
            return value
        return part_of(value.to(like.device), like)


def sharded_ranks(model: nn.Module, process_group: Any) -> ShardedRanks:
    """The processes of the mesh that ``model`` is sharded over.

    Raises:
        PrivacyError: ``process_group`` has others.
    """
    shard: Any = next(model.parameters())
    mesh = shard.device_mesh
    group = mesh.get_group() if process_group is None and mesh.ndim == 1 else process_group
    if sorted(dist.get_process_group_ranks(group)) != sorted(mesh.mesh.flatten().tolist()):
        raise PrivacyError(
            "the process group isn't that of the mesh which the model is sharded over; give process_group= the ranks "
            "of that mesh"
        )
    return ShardedRanks(mesh, group)
