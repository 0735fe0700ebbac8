"""Optimizers around others, as libraries have them: every second step goes halfway back to slow weights."""

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["LOOKAHEADS", "around", "pull_back"]

# How it is set up: by torch's constructor; as timm's, which skips it and has dicts for hooks; as torch_optimizer's,
# which skips it; and as pytorch_optimizer's, which has torch patch its step, and no ``param_groups`` of its own.
LOOKAHEADS = ("proper", "with hooks", "without hooks", "patched")


@torch.no_grad()
def pull_back(count: int, fast: list[Tensor], slow: list[Tensor]) -> None:
    """After every second step slow weights go halfway to the fast ones, which start anew from there."""
    if count % 2 == 0:
        for one, other in zip(fast, slow, strict=True):
            one.copy_(other.lerp_(one, 0.5))


class Lookahead(Optimizer):
    def __init__(self, inner: Optimizer, kind: str) -> None:
        self.inner, self.count = inner, 0
        if kind == "proper":
            super().__init__(inner.param_groups, {})
        elif kind != "without hooks":
            self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        if kind == "patched":
            self._patch_step_function()
        else:
            self.param_groups = inner.param_groups
        if kind != "proper":
            self.defaults, self.state = inner.defaults, defaultdict(dict)
        self.fast = [parameter for group in inner.param_groups for parameter in group["params"]]
        self.slow = [parameter.detach().clone() for parameter in self.fast]

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


def around(name: str, inner: Optimizer) -> Any:
    """A Lookahead around the optimizer, of a class whose step torch hasn't patched before."""

    def step(self: Any, closure: Any = None) -> Any:
        value = self.inner.step(closure)
        self.count += 1
        pull_back(self.count, self.fast, self.slow)
        return value

    own: dict[str, Any] = {"step": step}
    if name == "patched":
        own["param_groups"] = property(lambda self: self.inner.param_groups)
    return type("Lookahead", (Lookahead,), own)(inner, name)
