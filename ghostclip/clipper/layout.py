"""A model as clippers and engines see it: whole on each process, or sharded by FSDP2 and made whole for the passes.

A sharded model keeps a shard of each parameter, a DTensor, and puts whole Parameters in their places while layers run.
Within a logical batch these are gathered when layers need them (fetching.py). For a clipper alone, inside of
`ShardedModel.whole`, all are gathered at once, by all ranks together, and no forward or backward in there waits for
another rank. Its clipped sums then stand in the p.grads of the whole Parameters, as in a model that is not sharded, and
are reduced to the shards' once, without averaging.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ghostclip.clipper.fetching import FetchedGroups, Rounds, gather
from ghostclip.clipper.gradient_guard import GradientGuard, have_hooks, is_distributed
from ghostclip.errors import GradientLeakError, PrivacyError, UnsupportedModelError
from ghostclip.nn.sharding import (
    INSTEAD_OF_SHARDING,
    is_fully_sharded,
    local_part,
    parameter_groups,
    refuse_sharded,
    reshard,
    sharding_of,
)

__all__ = ["ShardedModel", "WholeModel", "as_shard", "layout_of", "local_part", "part_of", "reduced"]


def layout_of(model: nn.Module) -> WholeModel:
    """How a model's parameters lie; all ranks call it for a sharded model.

    Raises:
        UnsupportedModelError: it is sharded in a way that can't be made whole.
    """
    return ShardedModel(model) if is_fully_sharded(model) else WholeModel(model)


class WholeModel:
    """A model of which each process holds all.

    Attributes:
        sharded: whether a process holds a part only.
        pairs: (name, the parameter that the optimizer steps, the one that layers use); both are the same here.
    """

    sharded = False

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @property
    def pairs(self) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
        """See the class."""
        return [(name, parameter, parameter) for name, parameter in self._model.named_parameters()]

    def check(self, known: dict[int, str]) -> None:
        """Raises UnsupportedModelError where the model was sharded since it was wrapped.

        ``known`` are ids of the parameters that layers used when it was wrapped, with their names.
        """
        if is_distributed():
            refuse_sharded(self._model, known)

    def whole(self) -> AbstractContextManager[None]:
        """Inside, layers have whole Parameters."""
        return nullcontext()

    def summed(self) -> AbstractContextManager[None]:
        """As `whole`; what is added to p.grads inside are sums that stay there."""
        return nullcontext()

    def placed(self) -> AbstractContextManager[None]:
        """Inside, modules have whole Parameters, whose values may be there for a layer in its turn only."""
        return nullcontext()

    def hold(self, parameters: Collection[nn.Parameter]) -> None:
        """Has the values of some Parameters that layers use stay until the logical batch ends."""

    def unshard(self) -> None:
        """A logical batch begins: until `reshard` layers have whole Parameters in their turn."""

    def reshard(self) -> None:
        """Undoes `unshard`, which other ranks needn't do at the same time."""

    def settle(self, caller: str) -> None:
        """Makes the model's parameters those that the optimizer steps, where a forward left others in their places.

        Raises PrivacyError, which names the caller, between `unshard` and `reshard`.
        """


class ShardedModel(WholeModel):
    """A model under FSDP2's ``fully_shard``, of which each process holds its shards.

    Raises:
        UnsupportedModelError: it is sharded in a way that can't be made whole.

    Attributes:
        mesh: of processes; replicas of the shards along its first dimension where it has two.
        rounds: in which its ranks exchange values and sums within a logical batch.
        most_bytes: of the parameters that FSDP2 gathers together.
        reduce: called on all ranks in a round, with the place in `pairs` of a parameter whose sum some rank has, and
            whether this one does.
    """

    sharded = True
    reduce: Callable[[int, bool], None]

    def __init__(self, model: nn.Module) -> None:
        if (found := sharding_of(model)) is not None:
            raise UnsupportedModelError(f"{found[0] or 'the model'}: {found[1]}; {INSTEAD_OF_SHARDING}")
        super().__init__(model)
        root: Any = model
        self._state = root._get_fsdp_state()
        self._state._lazy_init()
        self._modules: list[Any] = [module for module in model.modules() if is_fully_sharded(module)]
        self._groups = parameter_groups(model)
        # What `_begin` changed of each group; None while the model is sharded as its owner has it.
        self._before: list[tuple[Any, dict[str, Any]]] | None = None
        self._pairs: list[tuple[str, nn.Parameter, nn.Parameter]] = []
        self._versions: list[int] = []
        self._guard = GradientGuard()
        self.settle("")
        shards = list(model.named_parameters())
        for group in self._groups:  # one after the other, so that whole Parameters exist
            gather(group)
            group._to_sharded()
        self._fetched = FetchedGroups(self._modules, self._groups, lambda place: self.rounds.ask([place]))
        with self.placed():
            wholes = list(model.parameters())
        self._pairs = [(name, shard, whole) for (name, shard), whole in zip(shards, wholes, strict=True)]
        self.most_bytes = max(sum(each._unsharded_param.nbytes for each in group.fsdp_params) for group in self._groups)
        self.mesh: Any = self._groups[0].mesh_info.mesh
        self.rounds = Rounds(self.mesh, self._groups[0].device, len(self._groups) + len(shards), self._answer)

    @property
    def pairs(self) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
        """(name, shard, whole Parameter) of each parameter. A whole one has its values while the model is whole."""
        return self._pairs

    def check(self, known: dict[int, str]) -> None:
        """Raises UnsupportedModelError where the model has other parameters than when it was wrapped, or is sharded."""
        now = list(self._model.parameters())
        known_now = zip(now, self._pairs, strict=False)
        if len(now) != len(self._pairs) or not all(a is whole or a is shard for a, (_, shard, whole) in known_now):
            raise UnsupportedModelError(
                "the sharded model has other parameters than when it was wrapped; build the clipper or engine anew"
            )

    def hold(self, parameters: Collection[nn.Parameter]) -> None:
        """See `WholeModel.hold`."""
        self._fetched.hold(parameters)

    def unshard(self) -> None:
        """See `WholeModel.unshard`; waits for no other rank."""
        if self._before is None:
            self._begin({"reduce_grads": False})
            self._fetched.open()

    def _begin(self, quiet: dict[str, Any]) -> None:
        """Changes settings of all groups until `reshard`."""
        self._before = [(group, {name: getattr(group, name) for name in quiet}) for group in self._groups]
        for group in self._groups:
            vars(group).update(quiet)
        self._versions = [whole._version for _, _, whole in self._pairs]

    def _answer(self, place: int, mine: bool) -> None:
        """Takes part in what some rank needs: a group's values, or a parameter's sum."""
        if place < len(self._groups):
            self._fetched.fetch(place, mine)
        else:
            self.reduce(place - len(self._groups), mine)

    def add_up(self, places: Iterable[int]) -> None:
        """One round in which this rank's sums of some parameters, by their places in `pairs`, are to be reduced."""
        self.rounds.ask([len(self._groups) + place for place in places])

    def written(self) -> str | None:
        """The name of a trained whole Parameter that was written to since the model was made whole; None for none."""
        if self._before is None:
            return None
        for (name, _, whole), version in zip(self._pairs, self._versions, strict=True):
            if whole.requires_grad and whole._version != version:
                return name
        return None

    def reshard(self) -> None:
        """Frees the whole parameters; the p.grads of the whole Parameters stay."""
        if self._before is None:
            return
        before, self._before = self._before, None
        self._fetched.close()
        self._state._reset_iter_state()  # as after a pass that was given up half-way
        for group, settings in before:
            vars(group).update(settings)

    def settle(self, caller: str) -> None:
        """See `WholeModel.settle`."""
        if self._before is not None:
            raise PrivacyError(
                f"{caller} was called inside of a logical batch, in which a sharded model is whole; call it after "
                "optimizer.step() or batch.discard()"
            )
        reshard(self._model)

    @contextmanager
    def placed(self) -> Iterator[None]:
        """See `WholeModel.placed`; waits for no other rank."""
        closed = self._before is None
        self.unshard()
        try:
            with self._fetched.placed():
                yield
        finally:
            if closed:
                self.reshard()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, layers have whole Parameters; all ranks enter it together. Within a logical batch it does nothing."""
        if self._before is not None:
            yield
            return
        self._begin({"reduce_grads": False, "reshard_after_backward": False, "post_forward_mesh_info": None})
        try:
            for module in self._modules:
                module.unshard()
            yield
        finally:
            self.reshard()

    @contextmanager
    def summed(self) -> Iterator[None]:
        """As `whole`; sums that are put into the whole p.grads inside are added up over all ranks, in the shards'.

        Raises:
            GradientLeakError: a p.grad holds something that no clipper put there.
            UnsupportedModelError: a parameter is narrower than float32, whose sums p.grad has no room for; or has a
                hook, that would see no gradient of its own.
            PrivacyError: another rank failed; no p.grad changed.
        """
        if self._before is not None:
            yield
            return
        failure: Exception | None = None
        try:
            with self.whole():
                try:
                    self._check_grads()
                    yield
                except Exception as error:
                    failure = error
        finally:
            totals = [whole.grad for _, _, whole in self._pairs]
            for _, _, whole in self._pairs:
                whole.grad = None
        filled = self._filled_anywhere(failure, totals)
        for (_, shard, whole), found in zip(self._pairs, filled, strict=True):
            total = totals.pop(0)
            if found:
                _add_to_shard(shard, reduced(torch.zeros_like(whole) if total is None else total, shard))
        self._guard.remember([(name, shard) for name, shard, _ in self._pairs])

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
            if have_hooks([shard]):
                raise UnsupportedModelError(
                    f"{name} is sharded and has a hook, which no gradient is delivered to; remove it"
                )

    def _filled_anywhere(self, failure: Exception | None, totals: list[Tensor | None]) -> list[bool]:
        """Of which parameters some rank has a sum; raises on all ranks where one failed."""
        said = torch.tensor([failure is not None, *(total is not None for total in totals)], dtype=torch.int32)
        said = said.to(self._groups[0].device)
        for group in self.mesh.get_all_groups():
            dist.all_reduce(said, dist.ReduceOp.MAX, group)
        if failure is not None:
            raise failure
        failed, *filled = said.tolist()
        if failed:
            raise PrivacyError("no sum was formed, because another rank failed; its own message says why")
        return [bool(each) for each in filled]


@torch.no_grad()
def reduced(total: Tensor, shard: Any) -> Tensor:
    """This process's shard of the sum of all ranks' ``total``, as a DTensor.

    Args:
        total: of the whole parameter's shape.
        shard: the parameter, a DTensor.
    """
    from torch.distributed.tensor import DTensor, Partial

    mesh: Any = shard.device_mesh
    parts = DTensor.from_local(total.contiguous(), mesh, [Partial()] * mesh.ndim, run_check=False)
    return parts.redistribute(placements=shard.placements)


@torch.no_grad()
def part_of(whole: Tensor, shard: Any) -> Tensor:
    """This process's shard of a tensor that is the same on all ranks, as a DTensor; no rank waits for another."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, shard.device_mesh, shard.placements, src_data_rank=None)


@torch.no_grad()
def as_shard(local: Tensor, shard: Any) -> Tensor:
    """A DTensor, sharded as ``shard`` is, of what this process holds of it."""
    from torch.distributed.tensor import DTensor

    size, stride = shard.shape, shard.stride()
    return DTensor.from_local(local, shard.device_mesh, shard.placements, run_check=False, shape=size, stride=stride)


@torch.no_grad()
def _add_to_shard(shard: nn.Parameter, amount: Tensor) -> None:
    if shard.grad is None:
        shard.grad = amount
    else:
        shard.grad += amount
