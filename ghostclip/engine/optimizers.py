"""Which optimizers an engine accepts, and how its noise comes between a closure and the update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import LBFGS, Optimizer, SparseAdam

from ghostclip.clipper.gradient_guard import refuse_hooks
from ghostclip.engine.update_check import held_parameters
from ghostclip.errors import PrivacyError
from ghostclip.nn.grad_mode import keeping_grad_mode
from ghostclip.sharding.detection import reshard
from ghostclip.wrap import refuse_obstacles

__all__ = ["hook_first", "prepare_optimizer", "unwrapped", "with_closure"]

# Packages that put an optimizer into a wrapper, whose step calls the optimizer's own.
WRAPPING = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")


def unwrapped(optimizer: Any) -> Any:
    """The optimizer that takes the step: what Accelerate's or Lightning's wrapper holds, or ``optimizer`` itself.

    The wrappers' hooks are not run, and their copies of the optimizer's attributes are not read by torch.
    """
    while any(kind.__module__.partition(".")[0] in WRAPPING for kind in type(optimizer).__mro__):
        if not isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
            break
        optimizer = inner
    return optimizer


def prepare_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Raises what `wrap` does, PrivacyError, TypeError or ValueError when the model can't be trained privately by it.

    From then on torch calls the hooks of the optimizer's step.
    """
    refuse_obstacles(model)  # before any noise is looked for
    if not isinstance(optimizer, Optimizer):
        several = isinstance(optimizer, list | tuple | dict)
        remedy = ": build one optimizer, with a parameter group for each" if several else ""
        raise TypeError(f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}{remedy}")
    # Optimizers around others (timm's Lookahead) skip Optimizer.__init__, and torch then calls no hooks at their steps.
    # This is how it has them called after unpickling; of other optimizers it changes nothing.
    Optimizer.__setstate__(optimizer, {})
    if isinstance(optimizer, LBFGS):
        raise PrivacyError(
            "LBFGS evaluates the loss several times in a step, each of which would need noise and a charge of its own; "
            "use SGD, Adam or another optimizer that takes one gradient a step"
        )
    if isinstance(optimizer, SparseAdam):
        raise PrivacyError("SparseAdam takes sparse gradients only, and noise makes each of them dense; use Adam")
    if meta := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise ValueError(f"{meta[0]} is on the meta device, and has no values; call model.to_empty(device=...) first")
    reshard(model)
    held = held_parameters(set(model.parameters()), optimizer)
    if not any(parameter.requires_grad for parameter in held):
        raise ValueError("the optimizer holds no trainable parameter of the model, so there is nothing to train")
    refuse_hooks((name, each) for name, each in model.named_parameters() if each.requires_grad)


def hook_first(optimizer: Optimizer, hook: Callable[..., Any]) -> Callable[[], None]:
    """Registers a hook before steps that runs before those that are there; returns what takes it off."""
    handle = optimizer.register_step_pre_hook(hook)
    hooks: Any = optimizer._optimizer_step_pre_hooks  # an OrderedDict, annotated as a dict
    hooks.move_to_end(handle.id, last=False)
    return handle.remove


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], after: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a step, of which the first is the optimizer, with ``after`` put behind its closure.

    None when it has no closure.
    """
    closure = kwargs.get("closure") if "closure" in kwargs else next(iter(args[1:]), None)
    if closure is None:
        return None

    @keeping_grad_mode
    def closure_then_noise() -> Any:
        value = closure()
        after()
        return value

    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure_then_noise}
    return (args[0], closure_then_noise, *args[2:]), kwargs
