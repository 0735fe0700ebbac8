"""Parameters under FSDP2 that are gathered when layers need them, and the rounds in which ranks answer each other.

FSDP2 relies on all ranks needing the same parameters in the same order. Passes for per-example norms don't: ranks have
different numbers of physical batches, and each tests the kinds of graphs it meets, and repeats what ran out of memory.
So each exchange is a round of all ranks. In it every rank says what it needs, maybe nothing, and all take part in
whatever any of them needs. A rank that has come to the end of its part of a logical batch serves the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = ["FetchedGroups", "Rounds", "gather"]


class Rounds:
    """Exchanges in which all ranks of a mesh take part, whoever needs them.

    Args:
        mesh: of the ranks.
        device: on which they exchange.
        count: of the things that a rank may need, which are numbered.
        answer: called on all ranks with the number of each thing that some rank needs, and whether this one does.
    """

    def __init__(self, mesh: Any, device: torch.device, count: int, answer: Callable[[int, bool], None]) -> None:
        self._processes, self._device, self._count, self._answer = mesh.get_all_groups(), device, count, answer

    @torch.no_grad()
    def ask(self, needs: Iterable[int]) -> bool:
        """One round, in which this rank needs some things; returns whether any rank needed something."""
        needs = set(needs)
        needed = torch.zeros(self._count, dtype=torch.int32, device=self._device)
        needed[sorted(needs)] = 1
        for processes in self._processes:
            dist.all_reduce(needed, dist.ReduceOp.MAX, processes)
        found = needed.nonzero().flatten().tolist()
        for each in found:
            self._answer(each, each in needs)
        return bool(found)

    def serve(self) -> None:
        """Takes part in the others' rounds until no rank needs anything any more."""
        while self.ask(()):
            pass


class FetchedGroups:
    """FSDP2's groups of parameters, which are gathered when FSDP2's hooks ask for it, by all ranks together.

    While they are `opened`, FSDP2's hooks put whole Parameters in the places of shards and take them away as they
    always do; what they ask for comes in a `Rounds`. FSDP2 may be told to keep a group after its forward
    (``reshard_after_forward=False``) or its backward.

    Args:
        modules: that ``fully_shard`` was called on.
        groups: of their parameters; gathered once before.
        ask: asks all ranks for a group, by its place; they call `fetch` then.
    """

    def __init__(self, modules: list[nn.Module], groups: list[Any], ask: Callable[[int], object]) -> None:
        self._modules, self._groups, self._ask = modules, groups, ask
        self._hooks: list[Any] = []
        self._held: set[int] = set()
        self._placed = self.opened = False

    def open(self) -> None:
        """Has FSDP2's hooks ask for values, and leave reducing alone."""
        self.opened = True
        for place, group in enumerate(self._groups):
            instead = {
                "unshard": partial(self._need, place),
                "wait_for_unshard": _nothing,
                "reshard": partial(self._free_after_pass, place),
                "_backward_prefetch": _nothing,
            }
            vars(group).update(instead)
        self._hooks = [module.register_forward_hook(_hook_base) for module in self._modules]

    def close(self) -> None:
        """Has FSDP2's hooks do what they do."""
        if self.opened:
            self.opened = False
            self._held.clear()
            for hook in self._hooks:
                hook.remove()
            for group in self._groups:
                for name in ("unshard", "wait_for_unshard", "reshard", "_backward_prefetch"):
                    del vars(group)[name]

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Inside, modules have whole Parameters, though their values are there for layers in their turn only."""
        if self._placed or not self.opened:
            yield
            return
        self._placed = True
        try:
            for group in self._groups:
                _put(group, "_unsharded_param")
            yield
        finally:
            self._placed = False
            for group in self._groups:
                if not group.is_unsharded:
                    _put(group, "sharded_param")

    def hold(self, parameters: Collection[nn.Parameter]) -> None:
        """Keeps the groups of some whole Parameters until `close`.

        Those used outside of layers, whose values are needed after a backward. If the model has frozen Parameters, the
        values of any of them may be.
        """
        if not parameters or not self.opened:
            return
        used = set(map(id, parameters))
        for place, group in enumerate(self._groups):
            ids = {id(each._unsharded_param) for each in group.fsdp_params}
            if self._has_frozen or not used.isdisjoint(ids):
                self._held.add(place)
                self._need(place)

    @property
    def _has_frozen(self) -> bool:
        return any(not each.sharded_param.requires_grad for group in self._groups for each in group.fsdp_params)

    def _need(self, place: int, async_op: bool = False) -> None:
        if not self._groups[place].is_unsharded:
            self._ask(place)

    def _free_after_pass(self, place: int) -> None:
        """What FSDP2 calls when a group's layers have run, forward or backward."""
        group = self._groups[place]
        if group._training_state.name != "FORWARD" or group._reshard_after_forward:
            self._free(place)

    def fetch(self, place: int, wanted: bool) -> None:
        """Gathers a group, on all ranks at once; keeps it where it is wanted, or was there before."""
        group = self._groups[place]
        wanted = wanted or (self.opened and group.is_unsharded)
        gather(group)
        if not wanted:
            self._free(place)

    def _free(self, place: int) -> None:
        """Frees a group's values, unless it is held, and puts its shards in their places."""
        group = self._groups[place]
        if group.is_unsharded and place not in self._held:
            group._to_sharded()
            if self._placed:
                _put(group, "_unsharded_param")


@torch.no_grad()
def gather(group: Any) -> None:
    """Gathers a group of FSDP2, on all ranks at once, whatever its hooks were replaced by."""
    _set_state(group, "SHARDED")
    with group.use_training_state(type(group._training_state).IDLE):
        type(group).unshard(group)
        type(group).wait_for_unshard(group)


def _hook_base(module: Any, _: Any, output: Any) -> None:
    """Has a backward ask for a module's values where FSDP2's hook is dropped: by an operation in place on a view."""
    state = module._get_fsdp_state()
    for each in tree_leaves(output):
        if isinstance(each, Tensor) and each._base is not None and each._base.grad_fn is not None:
            each._base.grad_fn.register_prehook(lambda _: state._pre_backward(None))


def _set_state(group: Any, name: str) -> None:
    """Has FSDP2 take the group for sharded or not, wherever its modules' Parameters are."""
    state = type(group._sharded_state)[name]
    for each in group.fsdp_params:
        each.sharded_state = state
    group._sharded_state = state


def _put(group: Any, kind: str) -> None:
    """Puts Parameters of a kind into the places of a group's others."""
    for each in group.fsdp_params:
        each._setattr_on_modules(getattr(each, kind))


def _nothing(*_: Any) -> None:
    """In the place of a method that isn't needed."""
