"""Which processes train a model together, and what of torch's own data parallelism is taken out of the engine's way.

The engine adds up the ranks' clipped sums itself, once a step and before the noise, however many physical batches each
rank has. DistributedDataParallel, which would average gradients after each backward, is kept from it and is a plain
wrapper then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ghostclip.engine.ranks import Alone, Ranks
from ghostclip.errors import PrivacyError, UnsupportedModelError
from ghostclip.sharding import INSTEAD_OF_SHARDING, sharding_of

__all__ = ["keep_unsynchronised", "ranks_of", "start_alike"]


def ranks_of(model: nn.Module, process_group: Any = None) -> Alone:
    """The processes that train ``model``: those of its DistributedDataParallel, of the group given, or all there are.

    Raises:
        UnsupportedModelError: the model is sharded: a process holds only a part of it.
        PrivacyError: its DistributedDataParallel exchanges the parameters for others.
    """
    if (found := sharding_of(model)) is not None:
        path, problem = found
        raise UnsupportedModelError(f"{path or 'the model'}: {problem}; {INSTEAD_OF_SHARDING}")
    _refuse_mixed_precision(model)
    groups = [wrapper.process_group for wrapper in _wrappers(model)]
    if process_group is not None and any(group is not process_group for group in groups):
        raise PrivacyError(
            "process_group isn't the one that the model's DistributedDataParallel was built with; leave it out, or "
            "build both with the same"
        )
    if not (dist.is_available() and dist.is_initialized()):
        return Alone()
    group = process_group if process_group is not None else next(iter(groups), None)
    if dist.get_rank(group) < 0:
        raise PrivacyError("this process is not in process_group; build the engine in its members only")
    return Ranks(group) if dist.get_world_size(group) > 1 else Alone(checked=True)


def _wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def _refuse_mixed_precision(model: nn.Module) -> None:
    """Raises PrivacyError for models whose layers get copies of the parameters."""
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel) and module.mixed_precision is not None:
            raise PrivacyError(
                f"{name or 'the model'} is wrapped in DistributedDataParallel with mixed_precision, which exchanges "
                "the parameters for others in each forward; use torch.autocast in the loss function instead"
            )


def keep_unsynchronised(model: nn.Module) -> Callable[[], None]:
    """Has no DistributedDataParallel reduce the gradients of ``model``; returns what undoes it.

    A forward through one that does, built around the model later or told to, raises PrivacyError.
    """
    wrappers = _wrappers(model)
    before = [wrapper.require_backward_grad_sync for wrapper in wrappers]
    for wrapper in wrappers:
        wrapper.require_backward_grad_sync = False

    joined = dist.is_available() and dist.is_initialized()
    watched = [model, *(wrapper.module for wrapper in wrappers)] if joined else []
    hooks = [module.register_forward_pre_hook(_refuse_averaging) for module in watched]

    def undo() -> None:
        for wrapper, setting in zip(wrappers, before, strict=True):
            wrapper.require_backward_grad_sync = setting
        for hook in hooks:
            hook.remove()

    return undo


def _refuse_averaging(module: nn.Module, _: Any) -> None:
    """Raises PrivacyError in a forward whose backward would average gradients. A model with it can still be pickled."""
    active = DistributedDataParallel._active_ddp_module
    if active is not None and active.require_backward_grad_sync and torch.is_grad_enabled():
        raise PrivacyError(
            "the model was called inside of a DistributedDataParallel that averages its gradients, which the engine "
            "adds up itself; give the engine that wrapper as model=, or call the model without it"
        )


@torch.no_grad()
def start_alike(model: nn.Module, ranks: Alone) -> None:
    """Parameters and buffers of all ranks become the leading one's, as DistributedDataParallel has it."""
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.copy_(ranks.spread([tensor.detach().clone()])[0])
