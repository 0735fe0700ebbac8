"""Updates of torch's optimizers as formulas on tensors: what a compiled step does in place of ``optimizer.step()``.

A rule reads one of the optimizer's parameter groups. What shapes the formulas (is there momentum, is weight decay
decoupled) is built into a graph; the numbers that schedules change (learning rate, betas) are its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

__all__ = ["Rule", "rule_of"]

Group = Mapping[str, Any]
# (parameter, gradient, state, numbers) -> (new parameter, new state); all in the parameter's precision.
Formula = Callable[[Tensor, Tensor, Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, list[Tensor]]]


@dataclass(frozen=True)
class Rule:
    """How the parameters of one group are updated.

    Attributes:
        switches: what the formula has built in; equal for rules with the same one.
        formula: the update of one parameter.
        state: names of the tensors of a parameter's shape that the optimizer keeps for it.
        numbers: what the formula is given, besides, for a parameter that took ``count`` steps before.
        counts: whether the optimizer counts each parameter's steps under the name "step".
        linear: whether the update is linear in the gradient, so that rounding can't be amplified by it.
    """

    switches: tuple[Any, ...]
    formula: Formula
    state: tuple[str, ...]
    numbers: Callable[[float], Sequence[float]]
    counts: bool
    linear: bool


def rule_of(kind: type, group: Group) -> Rule | str:
    """The rule of a group of torch's SGD, Adam or AdamW (``kind``); what stands in the way where there is none."""
    make = _RULES.get(kind)
    if make is None:
        return f"{kind.__name__} has no compiled update ({', '.join(known.__name__ for known in _RULES)} have)"
    for name in ("capturable", "differentiable"):
        if group.get(name):
            return f"{kind.__name__}(..., {name}=True) has no compiled update"
    if any(isinstance(value, Tensor) for value in (group["lr"], *group.get("betas", ()))):
        return f"{kind.__name__} with a learning rate or betas in a tensor has no compiled update"
    return make(group)


def _sgd(group: Group) -> Rule:
    momentum, decay, nesterov, maximize = (group[name] for name in ("momentum", "weight_decay", "nesterov", "maximize"))
    switches = (SGD, bool(momentum), bool(decay), bool(nesterov), bool(maximize))

    def formula(
        parameter: Tensor, gradient: Tensor, state: Sequence[Tensor], numbers: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        rate, decay_, momentum_, fresh = numbers
        gradient = -gradient if switches[4] else gradient
        gradient = gradient + decay_ * parameter if switches[2] else gradient
        if not switches[1]:
            return parameter - rate * gradient, []
        velocity = momentum_ * state[0] + fresh * gradient
        direction = gradient + momentum_ * velocity if switches[3] else velocity
        return parameter - rate * direction, [velocity]

    numbers = (group["lr"], decay, momentum, 1 - group["dampening"])
    names = ("momentum_buffer",) if momentum else ()
    return Rule(switches, formula, names, lambda count: numbers, counts=False, linear=True)


def _adam(group: Group) -> Rule:
    """Adam (Kingma & Ba 2015), with decoupled weight decay (Loshchilov & Hutter 2019) and AMSGrad where asked for."""
    decay, amsgrad, maximize = (group[name] for name in ("weight_decay", "amsgrad", "maximize"))
    decoupled = group.get("decoupled_weight_decay", False)
    switches = (Adam, bool(decay), bool(decoupled), bool(amsgrad), bool(maximize))

    def formula(
        parameter: Tensor, gradient: Tensor, state: Sequence[Tensor], numbers: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        size, root, eps, fresh, kept_square, fresh_square, decay_, kept = numbers
        gradient = -gradient if switches[4] else gradient
        if switches[1] and switches[2]:
            parameter = parameter * kept
        elif switches[1]:
            gradient = gradient + decay_ * parameter
        mean = state[0] + fresh * (gradient - state[0])
        square = kept_square * state[1] + fresh_square * gradient * gradient
        largest = [torch.maximum(state[2], square)] if switches[3] else []
        denominator = (largest[0] if largest else square).sqrt() / root + eps
        return parameter - size * (mean / denominator), [mean, square, *largest]

    rate, (beta1, beta2), eps = group["lr"], group["betas"], group["eps"]
    rest = (eps, 1 - beta1, beta2, 1 - beta2, decay, 1 - rate * decay)

    def numbers(count: float) -> Sequence[float]:
        return (rate / (1 - beta1 ** (count + 1)), (1 - beta2 ** (count + 1)) ** 0.5, *rest)

    names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ()))
    return Rule(switches, formula, names, numbers, counts=True, linear=False)


_RULES: dict[type, Callable[[Group], Rule]] = {SGD: _sgd, Adam: _adam, AdamW: _adam}
