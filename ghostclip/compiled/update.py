"""An optimizer's update as part of a graph: which tensors it writes, and the numbers it is given at each step."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from ghostclip.compiled.rules import Rule, rule_of
from ghostclip.norms.term import may_sync

__all__ = ["NOT_YET", "Update", "UpdateReader"]

# Why there is no update before the optimizer's own first step has made its state.
NOT_YET = "the optimizer has no state yet"


class Update:
    """One step of an optimizer, to be written into a graph.

    Args:
        optimizer: whose step it is in place of.
        parameters: those it steps, in the optimizer's order.
        rules: of each parameter.

    Attributes:
        parameters, rules: as given.
        written: what the step changes: the parameters, then the tensors of their rules one after another.
        size: how many numbers all parameters have.
        key: equal as long as a graph holds.
        obstacle: why it can't be written into a graph; None where it can.
    """

    def __init__(self, optimizer: Optimizer, parameters: list[nn.Parameter], rules: list[Rule]) -> None:
        self._optimizer, self.parameters, self.rules = optimizer, parameters, rules
        pairs = list(zip(parameters, rules, strict=True))
        self._kept = [(p, name) for p, rule in pairs for name in (*rule.state, *(("step",) if rule.counts else ()))]
        self._found = self._state()
        self.obstacle = self._obstacle()
        known = [(name, each) for (_, name), each in zip(self._kept, self._found, strict=True) if each is not None]
        self.written: list[Tensor] = [*parameters, *(each for name, each in known if name != "step")]
        self._counts: list[Tensor] = [each for name, each in known if name == "step"]
        self.size = sum([parameter.numel() for parameter in parameters])
        self.key = tuple((id(p), p.shape, p.stride(), p.dtype, *rule.switches) for p, rule in pairs)
        self._taken: list[float] = []
        # Their versions, and what they are in these, where a look would have a GPU's host wait.
        self._known: tuple[list[int], list[float]] | None = None
        self._table = torch.empty(0)

    def _state(self) -> list[Tensor | None]:
        """What the optimizer keeps now."""
        return [(self._optimizer.state.get(parameter) or {}).get(name) for parameter, name in self._kept]

    def _obstacle(self) -> str | None:
        if not self.parameters:
            return "no parameter is trained"
        first = self.parameters[0]
        if first.dtype not in (torch.float32, torch.float64):
            return f"parameters in {first.dtype} have no compiled update"
        if any(p.dtype != first.dtype or p.device != first.device for p in self.parameters):
            return "the parameters are of several types or on several devices"
        for (parameter, name), kept in zip(self._kept, self._found, strict=True):
            if kept is None:
                return NOT_YET
            if name != "step" and (kept.dtype != parameter.dtype or not _lie_alike(kept, parameter)):
                return f"the optimizer's {name} doesn't lie in memory as its parameter does"
        return None

    def holds(self) -> bool:
        """Whether the optimizer still keeps the tensors it kept when this was made."""
        return _same(self._state(), self._found)

    def numbers(self, divisor: float) -> Tensor:
        """1 / divisor, and each parameter's numbers one after another, float64; valid until asked for again."""
        self._taken = self._counted()
        counts, known = iter(self._taken), {}
        found = [1.0 / divisor]
        for rule in self.rules:
            key = (id(rule), next(counts) if rule.counts else 0.0)
            if key not in known:
                known[key] = rule.numbers(key[1])
            found += known[key]
        if self._table.shape[0] != len(found):
            self._table = torch.empty(len(found), dtype=torch.float64, device=self.parameters[0].device)
        if self._table.is_cpu:
            self._table.numpy()[:] = found
        else:
            self._table.copy_(torch.tensor(found, dtype=torch.float64, device="cpu"))
        return self._table

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

    @torch.no_grad()
    def took_place(self) -> None:
        """Leaves on the optimizer what its own step would have left besides what was written."""
        if self._counts:
            torch._foreach_add_(self._counts, 1)
            if not may_sync(self._counts[0].device):
                self._known = self._versions(), [count + 1.0 for count in self._taken]
        # By this mark torch's schedulers know that they don't come before the first step.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def _counted(self) -> list[float]:
        """The steps taken so far, of each parameter; no look at them where they are as `took_place` left them.

        What is written through ``.data`` can't be told from that on a GPU.
        """
        if self._known is not None and self._known[0] == self._versions():
            return self._known[1]
        return _read(self._counts)

    def _versions(self) -> list[int]:
        return [count._version for count in self._counts]


class UpdateReader:
    """Reads an optimizer's next step, which as a rule is like the last one.

    Args:
        optimizer: whose user may change anything about it between two steps.
        hooks: how many hooks before its step, and how many after it, are of no concern.
    """

    def __init__(self, optimizer: Optimizer, hooks: int) -> None:
        self._optimizer, self._hooks = optimizer, hooks
        self._settings: list[list[Any]] = []
        self._last: Update | None = None

    def read(self) -> Update | str:
        """The update as the optimizer is set now; or why it must be left to it, which is `NOT_YET` for its first."""
        optimizer, last = self._optimizer, self._last
        if (reason := _elsewhere(optimizer, self._hooks)) is not None:
            return reason
        groups = optimizer.param_groups
        settings = [_settings(group) for group in groups]
        parameters = [p for group in groups for p in group["params"] if p.requires_grad]
        if any(p.grad is not None for group in groups for p in group["params"] if not p.requires_grad):
            return "a parameter that isn't trained has a gradient, by which the optimizer steps it all the same"
        if last is not None and _same(parameters, last.parameters) and settings == self._settings and last.holds():
            return last
        rules: list[Rule] = []
        for group in groups:
            rule = rule_of(type(optimizer), group)
            if isinstance(rule, str):
                return rule
            rules += [rule for p in group["params"] if p.requires_grad]
        found = Update(optimizer, parameters, rules)
        if found.obstacle is not None:
            return found.obstacle
        self._settings, self._last = settings, found
        return found


def _settings(group: dict[str, Any]) -> list[Any]:
    """What a group's rule is made of, by type and value, and how many parameters it is for."""
    settings = [(name, type(value), value) for name, value in group.items() if name != "params"]
    return [sum([p.requires_grad for p in group["params"]]), *settings]


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape and strides; axes of one number may have any, as torch's gradients do."""
    if one.shape != other.shape:
        return False
    axes = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(size == 1 or mine == theirs for size, mine, theirs in axes)


def _read(counts: Sequence[Tensor]) -> list[float]:
    """The numbers in tensors of one number each; one look at a device, where a fused optimizer keeps them."""
    if counts and not may_sync(counts[0].device) and len({count.device for count in counts}) == 1:
        return torch.stack(list(counts)).tolist()
    return [count.item() for count in counts]


def _same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    return len(these) == len(those) and all(map(operator.is_, these, those))


def _elsewhere(optimizer: Optimizer, hooks: int) -> str | None:
    """What someone else wants to happen around the step, or in place of it."""
    own: dict[str, Any] = vars(optimizer)
    if "step" in own and not hasattr(own["step"], "_wrapped_by_lr_sched"):
        return "the optimizer's step was replaced by another function"
    elsewhere = torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks
    here = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    if elsewhere or any(len(registered) > hooks for registered in here):
        return "hooks on the optimizer's step want to be called"
    return None
