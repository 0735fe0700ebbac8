"""An optimizer's update as part of a graph: which tensors it writes, and the numbers it is given at each step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from ghostclip.compiled.rules import Rule, rule_of

__all__ = ["NOT_YET", "Update", "read_update"]

# Why there is no update before the optimizer's own first step has made its state.
NOT_YET = "the optimizer has no state yet"


@dataclass(frozen=True)
class Update:
    """One step of an optimizer, to be written into a graph.

    Attributes:
        optimizer: whose step it is in place of.
        parameters: those it steps, in the optimizer's order.
        rules: of each parameter.
        states: of each parameter, the tensors of its rule.
        counts: the optimizer's own counters of steps.
    """

    optimizer: Optimizer
    parameters: list[nn.Parameter]
    rules: list[Rule]
    states: list[list[Tensor]]
    counts: list[Tensor]

    @property
    def key(self) -> tuple:
        """Equal as long as a graph holds."""
        return tuple((id(p), *rule.switches) for p, rule in zip(self.parameters, self.rules, strict=True))

    @property
    def size(self) -> int:
        """How many numbers all parameters have."""
        return sum([parameter.numel() for parameter in self.parameters])

    @property
    def written(self) -> list[Tensor]:
        """What the step changes: the parameters, then their states one after another."""
        return [*self.parameters, *(tensor for state in self.states for tensor in state)]

    def numbers(self, divisor: float) -> Tensor:
        """1 / divisor, and each rule's numbers one after another, [n] float64."""
        found = [1.0 / divisor]
        counts = iter(self.counts)
        for rule in self.rules:
            found += rule.numbers(next(counts).item() if rule.counts else 0.0)
        return torch.tensor(found, dtype=torch.float64, device=self.parameters[0].device)

    def formula(
        self, sums: Sequence[Tensor | None], noise: Tensor, numbers: Tensor, written: Sequence[Tensor]
    ) -> list[Tensor]:
        """What `written` becomes.

        Args:
            sums: of each parameter, clipped; None for zeros.
            noise: [size], of the standard deviation it has after the division.
            numbers: from `numbers`.
            written: the tensors as they are before.
        """
        parts = noise.split([parameter.numel() for parameter in self.parameters])
        values = iter(numbers.to(noise.dtype).unbind())
        share = next(values)
        states = iter(written[len(self.parameters) :])
        stepped, kept = [], []
        for parameter, rule, total, part in zip(written, self.rules, sums, parts, strict=False):
            gradient = part.view_as(parameter) if total is None else total * share + part.view_as(parameter)
            state = [next(states) for _ in rule.state]
            given = [next(values) for _ in rule.numbers(0.0)]
            new, new_state = rule.formula(parameter, gradient, state, given)
            stepped.append(new)
            kept += new_state
        return [*stepped, *kept]

    def took_place(self) -> None:
        """Leaves on the optimizer what its own step would have left besides what was written."""
        if self.counts:
            torch._foreach_add_(self.counts, 1.0)
        # By this mark torch's schedulers know that they don't come before the first step.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]


def read_update(optimizer: Optimizer, held: Collection[nn.Parameter], hooks: int) -> Update | str:
    """The optimizer's next step; or why it must be left to the optimizer, which is `NOT_YET` for its first one.

    Args:
        optimizer: as its user has set it now.
        held: its parameters.
        hooks: how many hooks before its step, and how many after it, are of no concern.
    """
    if (reason := _obstacle(optimizer, hooks)) is not None:
        return reason
    found = Update(optimizer, [], [], [], [])
    for group in optimizer.param_groups:
        rule = rule_of(type(optimizer), group)
        if isinstance(rule, str):
            return rule
        for parameter in group["params"]:
            if parameter.requires_grad and (reason := _take(found, parameter, rule)) is not None:
                return reason
    first = found.parameters[0] if found.parameters else None
    if first is None or any(parameter.grad is not None for parameter in held if not parameter.requires_grad):
        return "no parameter is trained, or one that isn't has a gradient"
    if first.dtype not in (torch.float32, torch.float64):
        return f"parameters in {first.dtype} have no compiled update"
    if any(p.dtype != first.dtype or p.device != first.device for p in found.parameters):
        return "the parameters are of several types or on several devices"
    return found


def _obstacle(optimizer: Optimizer, hooks: int) -> str | None:
    """What someone else wants to happen around the step, or in place of it."""
    own: dict[str, Any] = vars(optimizer)
    if "step" in own and not hasattr(own["step"], "_wrapped_by_lr_sched"):
        return "the optimizer's step was replaced by another function"
    elsewhere = torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks
    if (
        elsewhere
        or len(optimizer._optimizer_step_pre_hooks) > hooks
        or len(optimizer._optimizer_step_post_hooks) > hooks
    ):
        return "hooks on the optimizer's step want to be called"
    return None


def _take(found: Update, parameter: nn.Parameter, rule: Rule) -> str | None:
    """Adds a parameter to the update, if its state is as the rule expects it."""
    state = found.optimizer.state.get(parameter, {})
    if rule.counts:
        if (count := state.get("step")) is None:
            return NOT_YET
        found.counts.append(count)
    tensors = []
    for name in rule.state:
        if (tensor := state.get(name)) is None:
            return NOT_YET
        if tensor.dtype != parameter.dtype or tensor.stride() != parameter.stride():
            return f"the optimizer's {name} doesn't lie in memory as its parameter does"
        tensors.append(tensor)
    found.parameters.append(parameter)
    found.rules.append(rule)
    found.states.append(tensors)
    return None
