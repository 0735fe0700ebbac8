"""Optimizers around others, as libraries have them: every second step goes halfway back to slow weights."""

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["LOOKAHEADS", "around", "pull_back"]

EVERY = 2


@torch.no_grad()
def pull_back(count: int, fast: list[Tensor], slow: list[Tensor]) -> None:
    """After every second step slow weights go halfway to the fast ones, which start anew from there."""
    if count % EVERY == 0:
        for one, other in zip(fast, slow, strict=True):
            one.copy_(other.lerp_(one, 0.5))


class Lookahead(Optimizer):
    """One that torch's constructor has set up."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.count = inner, 0
        self.set_up()
        self.fast = [parameter for group in inner.param_groups for parameter in group["params"]]
        self.slow = [parameter.detach().clone() for parameter in self.fast]

    def set_up(self) -> None:
        Optimizer.__init__(self, self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups


class WithHooks(Lookahead):
    """As timm's: it skips torch's constructor, and has dicts for hooks."""

    def set_up(self) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self.param_groups, self.defaults, self.state = self.inner.param_groups, self.inner.defaults, defaultdict(dict)

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)


class WithoutHooks(Lookahead):
    """As torch_optimizer's: it skips torch's constructor."""

    def set_up(self) -> None:
        self.param_groups, self.defaults, self.state = self.inner.param_groups, {"k": EVERY}, defaultdict(dict)

    def zero_grad(self, set_to_none: bool = False) -> None:
        self.inner.zero_grad(set_to_none)


class Patched(Lookahead):
    """As pytorch_optimizer's: it has torch patch its step, and no ``param_groups`` of its own."""

    def set_up(self) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self._patch_step_function()
        self.defaults, self.state = self.inner.defaults, defaultdict(dict)

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups


LOOKAHEADS = {"proper": Lookahead, "with hooks": WithHooks, "without hooks": WithoutHooks, "patched": Patched}


def around(name: str, inner: Optimizer) -> Any:
    """A Lookahead around the optimizer, of a class whose step torch hasn't patched before."""

    def step(self: Any, closure: Any = None) -> Any:
        value = self.inner.step(closure)
        self.count += 1
        pull_back(self.count, self.fast, self.slow)
        return value

    return type("Lookahead", (LOOKAHEADS[name],), {"step": step})(inner)
