"""A model under FSDP2's ``fully_shard``, of which each process holds its shards.

FSDP2 relies on all ranks needing the same parameters in the same order. Passes for per-example norms break this order:
ranks differ in the number of physical batches, in the graphs that they measure, and in what they repeat after memory
ran out.
So each exchange in a logical batch is a round of all ranks. In it every rank says what it needs, maybe nothing, and
all take part in whatever any of them needs. A rank at the end of its part serves the others. For a clipper alone, in
`FullySharded.unsharded_values`, all values are gathered at once, and nothing in there waits for another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from ghostclip.errors import GradientLeakError, PrivacyError, UnsupportedModelError
from ghostclip.sharding.detection import is_fully_sharded, parameter_groups, reshard
from ghostclip.sharding.groups import Group, hook_base
from ghostclip.sharding.hooks import HOOKS_OF_FSDP2, note_hooks
from ghostclip.sharding.plain import Add, Sharding, Totals, local_part

__all__ = ["FullySharded"]


class FullySharded(Sharding):
    """What differs from `Sharding`, whose methods these are; ``guard`` is a `GradientGuard` for the p.grads of shards.

    Attributes:
        most_bytes: of the parameters that FSDP2 gathers together.
    """

    sharded = True

    def __init__(self, model: nn.Module, guard: Any) -> None:
        super().__init__(model)
        root: Any = model
        self._state = root._get_fsdp_state()
        self._state._lazy_init()
        self._guard, self._opened = guard, False
        self._hooks: list[Any] = []
        self._sharded: list[Any] = [module for module in model.modules() if is_fully_sharded(module)]
        # Modules that were sharded together have one.
        self._states = dict.fromkeys(module._get_fsdp_state() for module in self._sharded)
        reshard(model)
        self._groups = [Group(group) for group in parameter_groups(model)]
        self.most_bytes = max(sum(whole.nbytes for whole in group.wholes.values()) for group in self._groups)
        whole_of = {shard: whole for group in self._groups for shard, whole in group.wholes.items()}
        self._pairs = [(name, shard, whole_of[id(shard)]) for name, shard in model.named_parameters()]
        self.stepped = {id(whole): shard for _, shard, whole in self._pairs}
        self.totals: ShardedTotals = ShardedTotals(self)
        any_shard: Any = self._pairs[0][1]
        self._mesh, self._device = any_shard.device_mesh, any_shard.device
        # Those that hold the same shards as this rank; None where nobody else does.
        self._replicas: Any = self._mesh.get_group(0) if self._mesh.ndim == 2 else None

    @property
    def pairs(self) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
        return self._pairs

    def check(self, known: Container[int]) -> None:
        super().check({id(each) for _, *pair in self._pairs for each in pair})

    # Values of whole Parameters.

    def unshard(self) -> None:
        if not self._opened:
            self._opened = True
            for place, group in enumerate(self._groups, len(self._pairs)):
                group.open(partial(self.ask, [place]))
            HOOKS_OF_FSDP2.clear()
            for state in self._states:
                state._register_pre_backward_hook = partial(note_hooks, state)
            self._hooks = [module.register_forward_hook(hook_base) for module in self._sharded]

    def reshard(self) -> None:
        if self._opened:
            self._opened = False
            for hook in self._hooks:
                hook.remove()
            for state in self._states:
                del state._register_pre_backward_hook
            for group in self._groups:
                group.close()
            self._state._reset_iter_state()  # as after a pass that was given up half-way

    def reshard_between_batches(self, caller: str) -> None:
        if self._opened:
            raise PrivacyError(
                f"{caller} was called inside of a logical batch, in which a sharded model is whole; call it after "
                "optimizer.step() or batch.discard()"
            )
        reshard(self._model)

    @contextmanager
    def unsharded_parameters(self) -> Iterator[None]:
        closed = not self._opened
        self.unshard()
        outermost = [group for group in self._groups if not group.substituted]
        try:
            for group in outermost:
                group.substitute(True)
            yield
        finally:
            for group in outermost:
                group.substitute(False)
            if closed:
                self.reshard()

    def keep_resident(self, parameters: Collection[nn.Parameter]) -> None:
        """Parameters used outside of layers are needed after a backward. Frozen ones may be, so then all are kept."""
        used = set(map(id, parameters)) if self._opened else set()
        frozen = any(not shard.requires_grad for _, shard, _ in self._pairs)
        for group in self._groups:
            if used and (frozen or not used.isdisjoint(map(id, group.wholes.values()))):
                group.keep_resident()

    @contextmanager
    def unsharded_values(self) -> Iterator[None]:
        if self._opened:
            yield
            return
        self.unshard()
        try:
            for group in self._groups:
                group.gather()
                group.keep_resident()
            yield
        finally:
            self.reshard()

    # Rounds. Of P parameters and G groups, a rank asks by number. 0 to P - 1: add up a parameter's sums.
    # P to P + G - 1: gather a group's values. P + G: the rank failed.

    @torch.no_grad()
    def _needed(self, needs: Iterable[int]) -> list[int]:
        """One round, in which this rank needs some things; returns what any rank needs."""
        needed = torch.zeros(len(self._pairs) + len(self._groups) + 1, dtype=torch.int32, device=self._device)
        needed[list(needs)] = 1
        for processes in self._mesh.get_all_groups():
            dist.all_reduce(needed, dist.ReduceOp.MAX, processes)
        return needed.nonzero().flatten().tolist()

    def ask(self, needs: Collection[int]) -> bool:
        """One round, in which all ranks do what any needs; returns whether that was anything."""
        found, first = self._needed(needs), len(self._pairs)
        for number in found:
            if number < first:
                self.totals.reduce(number)
            else:
                self._groups[number - first].fetch(number in needs)
        return bool(found)

    def serve(self) -> None:
        while self.ask(()):
            pass

    # Sums.

    @torch.no_grad()
    def reduced(self, place: int, total: Tensor | None) -> Any:
        """The shard, a DTensor, of the sum over all ranks of ``total``; ``place`` is the parameter's in `pairs`."""
        _, shard, whole = self._pairs[place]
        if total is None:
            wide = torch.promote_types(whole.dtype, torch.float32)
            total = torch.zeros(whole.shape, dtype=wide, device=whole.device)
        mesh: Any = self._mesh
        parts = DTensor.from_local(total.contiguous(), mesh, [Partial()] * mesh.ndim, run_check=False)
        return parts.redistribute(placements=shard.placements)  # type: ignore[attr-defined]

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Sums are reduced to the p.grads of shards in the end; none of these changes where a rank fails."""
        if self._opened:
            yield
            return
        failure: Exception | None = None
        try:
            with self.unsharded_values():
                try:
                    self._check_grads()
                    yield
                except Exception as error:
                    failure = error
        finally:
            totals = [whole.grad for _, _, whole in self._pairs]
            for _, _, whole in self._pairs:
                whole.grad = None
        self._put_in_shards(totals, failure)

    def _check_grads(self) -> None:
        self._guard.check([(name, shard) for name, shard, _ in self._pairs])
        for name, shard, whole in self._pairs:
            if whole.grad is not None:
                raise GradientLeakError(
                    f"the gradient of {name!r}, unsharded, was filled by something other than per-example clipping (a "
                    "plain .backward() without gradient synchronisation), and is dropped now; use the clipper's only"
                )
            if whole.dtype not in (torch.float32, torch.float64):
                raise UnsupportedModelError(
                    f"{name} is {whole.dtype}, in which sums of several processes would be rounded; keep the "
                    "parameters of a sharded model in float32, or use PrivacyEngine"
                )
            if shard._backward_hooks or shard._post_accumulate_grad_hooks:
                raise UnsupportedModelError(
                    f"{name} is sharded and has a hook, which no gradient is delivered to; remove it"
                )

    @torch.no_grad()
    def _put_in_shards(self, totals: list[Tensor | None], failure: Exception | None) -> None:
        """Adds all ranks' sums to the shards' p.grads; raises on all ranks where one failed."""
        failed = len(self._pairs) + len(self._groups)
        mine = [place for place, total in enumerate(totals) if total is not None]
        found = self._needed(mine if failure is None else [failed])
        if failure is not None:
            raise failure
        if failed in found:
            raise PrivacyError("no sum was formed, because another rank failed; its own message says why")
        for place in found:
            shard, amount = self._pairs[place][1], self.reduced(place, totals[place])
            totals[place] = None
            if shard.grad is None:
                shard.grad = amount
            else:
                shard.grad += amount
        self._guard.remember([(name, shard) for name, shard, _ in self._pairs])

    @torch.no_grad()
    def versions(self, parameters: Sequence[nn.Parameter]) -> list[int]:
        # An optimizer's operations count on a DTensor, writes to its local part or its whole Parameter on these.
        pairs = zip(parameters, self.pairs, strict=True)
        return [shard._version + local_part(shard)._version + whole._version for shard, (_, _, whole) in pairs]

    @torch.no_grad()
    def addresses(self, parameters: Sequence[nn.Parameter]) -> list[int]:
        return [local_part(shard).data_ptr() for shard in parameters]

    @torch.no_grad()
    def released(
        self, ranks: Any, noise: Any, sums: list[Tensor], std: float, divisor: float, parameters: list[nn.Parameter]
    ) -> list[Tensor]:
        """Sums of parameters are shards of totals. This rank draws their noise, or another one with the same shards.

        Repeatable noise is drawn for whole sums by the leading rank, so that it is the same for any number of ranks.
        """
        totals, others = sums[: len(parameters)], sums[len(parameters) :]
        if not noise.private:
            wholes = [each.full_tensor() for each in self._as_shards(totals, parameters)]
            once = wholes if ranks.leads else [torch.zeros_like(each) for each in wholes]
            found = ranks.release_total(noise, once + others, std, divisor)
            parts = [self.part(each, p) for each, p in zip(found, parameters, strict=False)]
            return parts + found[len(parameters) :]
        draws = self._replicas is None or dist.get_rank(self._replicas) == 0
        # Agreed, so that a rank that fails here isn't left behind by the others.
        shards = ranks.agreed(lambda: noise.release(totals, std, divisor) if draws else totals)
        shards = self._as_shards(self._from_first_replica(shards), parameters)
        return shards + (ranks.release_total(noise, others, std, divisor) if others else [])

    def _as_shards(self, tensors: list[Tensor], parameters: list[Any]) -> list[Any]:
        """DTensors, sharded as parameters are, of what this process holds of them."""
        make = partial(DTensor.from_local, device_mesh=self._mesh, run_check=False)
        pairs = zip(tensors, parameters, strict=True)
        return [make(each, placements=p.placements, shape=p.shape, stride=p.stride()) for each, p in pairs]

    def _from_first_replica(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors of the first of the replicas, on all; overwrites the given."""
        found = [each.contiguous() for each in tensors]
        for each in found if self._replicas is not None else ():
            if each.numel():  # as many on all replicas
                dist.broadcast(each, dist.get_global_rank(self._replicas, 0), self._replicas)
        return found

    @torch.no_grad()
    def start_alike(self, copy: Callable[[Iterable[Tensor]], None]) -> None:
        """Shards are where they are; replicas of them become those of the first."""
        mine = [local_part(parameter) for parameter in self._model.parameters()]
        for each, first in zip(mine, self._from_first_replica([each.clone() for each in mine]), strict=True):
            each.copy_(first)

    @torch.no_grad()
    def part(self, value: Any, like: Any) -> Any:
        """The shard of a whole tensor as large as the parameter ``like``; anything else as it is."""
        if not isinstance(value, Tensor) or value.shape != like.shape or not isinstance(like, DTensor):
            return value
        return distribute_tensor(value.to(like.device), self._mesh, like.placements, src_data_rank=None)

    def shard_of(self, part: Tensor, like: Any) -> Any:
        return self._as_shards([part], [like])[0]


class ShardedTotals(Totals):
    """Also {id of a shard: this rank's shard of what was reduced}.

    Sums of whole Parameters wait until they take more memory than the parameters that FSDP2 gathers together.
    """

    def __init__(self, sharding: FullySharded) -> None:
        super().__init__()
        self._sharding = sharding
        self._place = {id(whole): place for place, (_, _, whole) in enumerate(sharding.pairs)}
        # Whether sums of the current physical batch were reduced; and whether one failed after that.
        self._begun = self._lost = False

    def _widened(self, total: Tensor) -> Tensor:
        """As it is: other ranks may have fewer physical batches, and sums that are reduced are of one type."""
        return total

    @contextmanager
    def physical_batch(self, add: Add, new: dict[int, Tensor]) -> Iterator[Add]:
        """Where it fails after some of its sums were reduced, the logical batch is lost."""
        self._begun = False

        def added(part: tuple[int, tuple[int, int] | None], amount: Tensor) -> None:
            add(part, amount)
            self._reduce_large(new)

        try:
            yield added
        except BaseException:
            self._lost = self._lost or self._begun
            raise

    def check(self) -> None:
        if self._lost:
            raise PrivacyError(
                "a physical batch failed after a part of its sums had been added up over all ranks, so this logical "
                "batch can't be completed; leave it on all ranks, and give smaller physical batches "
                "(max_physical_batch_size=) where memory ran out"
            )

    def _reduce_large(self, new: dict[int, Tensor]) -> None:
        waiting = [*new.values(), *(total for owner, total in self.items() if owner in self._place)]
        if sum(total.nbytes for total in waiting) > self._sharding.most_bytes:
            self._begun = True
            self.add(new)
            self._reduce_all()

    def _reduce_all(self) -> None:
        self._sharding.ask([self._place[owner] for owner in self if owner in self._place])

    def complete(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        self._reduce_all()
        return super().complete(parameters)

    def reduce(self, place: int) -> None:
        """Adds what waits of a parameter's sum on all ranks to this rank's shard."""
        _, shard, whole = self._sharding.pairs[place]
        self.add({id(shard): local_part(self._sharding.reduced(place, self.pop(id(whole), None)))})

    def clear(self) -> None:
        super().clear()
        self._lost = False
