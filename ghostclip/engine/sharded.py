"""Models under FSDP2 in the engine: sums of whole parameters become shards, and each rank adds the noise of its own.

Layers use whole Parameters within a logical batch, whose values are there while they run. Sums of a rank's examples are
reduce-scattered when they take as much memory as the largest group of parameters that FSDP2 gathers. This rank's shards
of the totals are what the batch has gathered. The optimizer holds the shards, and steps them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ghostclip.clipper import GhostClipper
from ghostclip.clipper.collector import Part
from ghostclip.clipper.layout import as_shard, part_of, reduced
from ghostclip.clipper.second_pass import Add
from ghostclip.engine.distributed import Ranks
from ghostclip.engine.sums import ClippedSums
from ghostclip.engine.update_check import UpdateCheck
from ghostclip.errors import PrivacyError
from ghostclip.nn.sharding import local_part
from ghostclip.noise import Noise
from ghostclip.noise.release import flat, on_flat

__all__ = ["ShardedRanks", "sharded_ranks", "sums_of", "updates_of"]

T = TypeVar("T")


def sums_of(clipper: GhostClipper, ranks: Ranks) -> ClippedSums:
    """Where the clipped sums of the clipper's model are gathered; ``ranks`` are those that train it."""
    if isinstance(ranks, ShardedRanks):
        ranks.serve = clipper.layout.rounds.serve  # type: ignore[attr-defined]
        return ShardedSums(clipper)
    return ClippedSums(clipper)


def updates_of(clipper: GhostClipper) -> UpdateCheck:
    """What watches the parameters of the clipper's model."""
    return ShardedUpdates(clipper) if clipper.layout.sharded else UpdateCheck(clipper.model)


class ShardedSums(ClippedSums):
    """Adds up sums over all ranks, of which each rank keeps its shards. Sums that were not reduced yet wait.

    Args:
        clipper: of a sharded model.
    """

    def __init__(self, clipper: GhostClipper) -> None:
        super().__init__(clipper)
        layout: Any = clipper.layout
        self._layout, layout.reduce = layout, self._reduce
        self._pairs = clipper.layout.pairs
        self._place = {id(each): place for place, pair in enumerate(self._pairs) for each in pair[1:]}
        # This rank's shards of sums that were reduced, by the parameter's place in the pairs.
        self._shards: dict[int, Tensor] = {}
        # Whether sums of the physical batch in the making were reduced; and whether it failed after that.
        self._begun = self._lost = False

    def gather(self, backward: Callable[[Add], T], more: bool = False) -> T:
        """As `ClippedSums.gather`; where it fails after sums of the physical batch were reduced, the batch is lost."""
        self._begun = False
        try:
            return super().gather(backward, more)
        except BaseException:
            self._lost = self._lost or self._begun
            raise

    def check(self) -> None:
        """As `ClippedSums.check`; raises PrivacyError where sums of a part of a physical batch were reduced."""
        if not self._shards:
            super().check()
        if self._lost:
            raise PrivacyError(
                "a physical batch failed after a part of its sums had been added up over all ranks, so this logical "
                "batch can't be completed; leave it on all ranks, and give smaller physical batches "
                "(max_physical_batch_size=) where memory ran out"
            )

    def _take(self, part: Part, amount: Tensor) -> None:
        """As `ClippedSums._take`; where more sums wait than FSDP2 gathers parameters together, they are reduced."""
        super()._take(part, amount)
        waiting = sum(each.nbytes for some in (self._new.totals, self._totals) for each in some.values())
        if waiting > self._layout.most_bytes:
            self._begun = True
            self._keep_new()
            self._add_up()

    def _add_up(self) -> None:
        """One round in which all ranks' sums that wait are reduced."""
        self._layout.add_up([self._place[owner] for owner in self._totals])

    @torch.no_grad()
    def _reduce(self, place: int, mine: bool) -> None:
        """Adds up what waits of a parameter's sum on all ranks, and keeps this rank's shard of it."""
        _, shard, whole = self._pairs[place]
        total = self._totals.pop(id(whole), None)
        if total is None:
            wide = torch.promote_types(whole.dtype, torch.float32)
            total = torch.zeros(whole.shape, dtype=wide, device=whole.device)
        found = local_part(reduced(total, shard))
        if place in self._shards:
            self._shards[place] += found
        else:
            self._shards[place] = found

    def release(
        self,
        held: Collection[nn.Parameter],
        make_private: Callable[[list[nn.Parameter], list[Tensor]], list[Tensor]],
    ) -> None:
        """As `ClippedSums.release`; ``make_private`` gets and gives this rank's shards. All ranks call it together."""
        self._add_up()

        def made(shards: list[nn.Parameter], sums: list[Tensor]) -> list[Tensor]:
            return [as_shard(each, shard) for each, shard in zip(make_private(shards, sums), shards, strict=True)]

        super().release(held, made)

    def _sum_of(self, parameter: nn.Parameter) -> Tensor:
        found = self._shards.pop(self._place[id(parameter)], None)  # so that it goes once it is released
        local = local_part(parameter)
        wide = torch.promote_types(parameter.dtype, torch.float32)
        return torch.zeros_like(local, dtype=wide) if found is None else found

    def discard(self) -> None:
        """See `ClippedSums.discard`."""
        super().discard()
        self._shards.clear()
        self._lost = False


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

    Attributes:
        serve: takes part in what other ranks need of the model, until none needs anything: before any other exchange.
    """

    def __init__(self, mesh: Any, group: Any = None) -> None:
        super().__init__(group)
        self.serve: Callable[[], None] = lambda: None
        # Those that hold the same shards as this rank; None where nobody else does.
        self._replicas: Any = mesh.get_group(0) if mesh.ndim == 2 else None

    def led(self, work: Callable[[], T]) -> T:
        """See `Ranks.led`."""
        self.serve()
        return super().led(work)

    def gathered(self, value: T) -> list[T]:
        """See `Ranks.gathered`."""
        self.serve()
        return super().gathered(value)

    @torch.no_grad()
    def released(
        self, noise: Noise, sums: list[Tensor], std: float, divisor: float, parameters: list[nn.Parameter]
    ) -> list[Tensor]:
        """What `Ranks.released` gives of shards of sums, each with noise that this rank drew, or a replica of it.

        ``sums`` of parameters are this rank's shards of their totals; those behind them are its own, to be added up.

        Repeatable noise is drawn for whole sums by the leading rank, so that it is the same for any number of ranks.
        """
        count = len(parameters)
        if not noise.private:
            wholes: list[Any] = [as_shard(each, p) for each, p in zip(sums[:count], parameters, strict=True)]
            for place, each in enumerate(wholes):  # once in the total over ranks
                total = each.full_tensor()
                wholes[place] = total if self.leads else torch.zeros_like(total)
            found = super().released(noise, wholes + sums[count:], std, divisor, parameters)
            parts = [local_part(part_of(each, p)) for each, p in zip(found[:count], parameters, strict=True)]
            return parts + found[count:]
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
