"""FSDP2's groups of parameters, which are gathered and freed together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = ["Group", "hook_base"]


class Group:
    """One of FSDP2's groups. All ranks gather it once, so that whole Parameters exist.

    From `open` to `close` FSDP2's hooks put whole Parameters in the places of shards and take them away as they always
    do, but they ask for values. FSDP2 may be told to keep them after a forward (``reshard_after_forward=False``) or a
    backward.

    Attributes:
        wholes: {id of a shard: its whole Parameter}.
        substituted: whether whole Parameters are in the places of shards, with values or without.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._ask: Callable[[], object] | None = None  # while the group is open
        self._resident = self.substituted = self._reduces = False
        self.gather()
        self.free()
        params = group.fsdp_params
        self.wholes: dict[int, nn.Parameter] = {id(each.sharded_param): each._unsharded_param for each in params}

    def open(self, ask: Callable[[], object]) -> None:
        """Has FSDP2's hooks call ``ask`` for values, and reduce no gradients."""
        self._ask = ask
        self._reduces, self._group.reduce_grads = self._group.reduce_grads, False
        vars(self._group).update(
            unshard=self._need, wait_for_unshard=_nothing, reshard=self._free_after_pass, _backward_prefetch=_nothing
        )

    def close(self) -> None:
        """Has FSDP2's hooks do what they do."""
        self._ask, self._resident = None, False
        self._group.reduce_grads = self._reduces
        for name in ("unshard", "wait_for_unshard", "reshard", "_backward_prefetch"):
            delattr(self._group, name)

    def _need(self, async_op: bool = False) -> None:
        if self._ask is not None and not self._group.is_unsharded:
            self._ask()

    def keep_resident(self) -> None:
        """Has the values stay until `close`."""
        self._resident = True
        self._need()

    def _free_after_pass(self) -> None:
        """What FSDP2 calls when the group's layers have run, forward or backward."""
        if self._group._training_state.name != "FORWARD" or self._group._reshard_after_forward:
            self.free()

    @torch.no_grad()
    def gather(self) -> None:
        """Gathers the values, on all ranks at once, whether they are there or not."""
        group = self._group
        group._sharded_state = type(group._sharded_state).SHARDED
        for each in group.fsdp_params:
            each.sharded_state = group._sharded_state
        with group.use_training_state(type(group._training_state).IDLE):
            type(group).unshard(group)  # not what `open` put in their place
            type(group).wait_for_unshard(group)

    def fetch(self, wanted: bool) -> None:
        """`gather`; keeps the values where they are wanted, or were there before."""
        wanted = wanted or (self._ask is not None and self._group.is_unsharded)
        self.gather()
        if not wanted:
            self.free()

    def free(self) -> None:
        """Frees the values, unless they are resident, and puts the shards in their places."""
        if self._group.is_unsharded and not self._resident:
            self._group._to_sharded()
            self.substitute(self.substituted)

    def substitute(self, substituted: bool) -> None:
        """Puts whole Parameters in the places of shards, with values or without; or shards back, without values."""
        self.substituted = substituted
        if not self._group.is_unsharded:
            for each in self._group.fsdp_params:
                each._setattr_on_modules(each._unsharded_param if substituted else each.sharded_param)


def hook_base(module: Any, _: Any, output: Any) -> None:
    """A forward hook: where an operation in place on a view dropped FSDP2's hook of backward, its base gets one."""
    state = module._get_fsdp_state()
    for each in tree_leaves(output):
        if isinstance(each, Tensor) and each._base is not None and each._base.grad_fn is not None:
            each._base.grad_fn.register_prehook(lambda _: state._pre_backward(None))


def _nothing(*_: Any) -> None:
    """In the place of a method that isn't needed."""
