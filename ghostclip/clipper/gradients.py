"""Clipped sums in the p.grads, where `GhostClipper` leaves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from ghostclip.clipper.gradient_guard import with_hook
from ghostclip.clipper.second_pass import Add, TwoPasses
from ghostclip.errors import RowsMovedError
from ghostclip.sharding.plain import is_distributed

__all__ = ["add_to_gradients"]

T = TypeVar("T")


def add_to_gradients(passes: TwoPasses, clip: Callable[[Add], T], *, sharded: bool = False) -> T:
    """Runs ``clip`` and adds the sums that it hands over to the p.grads, in the parameters' own types.

    Where hooks on parameters or other processes wait for gradients, autograd delivers the finished sums: a hook runs
    once, on the sum over all uses and examples, and so does DistributedDataParallel's reducer. Sums of sharded models
    are reduced afterwards.

    Args:
        passes: over the graphs of the model.
        clip: takes a function of (part, amount); its result is returned.
        sharded: whether layers use whole Parameters in the place of shards.
    """
    sums = passes.new_sums()
    try:
        result = clip(sums.add)  # sums of its own, so that a call that fails leaves p.grads as they are
    except RowsMovedError as error:
        if not error.graph_stays:
            raise
        sums = passes.new_sums()
        result = clip(sums.add)
    if not sums.totals:
        return result
    parameters = [passes.parameters[owner] for owner in sums.totals]
    totals = [total.to(parameter.dtype) for parameter, total in zip(parameters, sums.totals.values(), strict=True)]
    if with_hook(passes.index.trained()) is not None or (is_distributed() and not sharded):
        torch.autograd.backward(parameters, totals)
        return result
    for parameter, total in zip(parameters, totals, strict=True):
        if parameter.grad is None:
            parameter.grad = total
        else:
            parameter.grad += total
    return result
