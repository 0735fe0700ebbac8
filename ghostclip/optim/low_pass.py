"""A linear low-pass filter over the private gradients of successive steps (Zhang et al. 2024, DOPPLER)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ghostclip.engine.optimizers import with_closure

__all__ = ["LowPassFilter"]


class LowPassFilter:
    """Replaces each private gradient by a filtered one, before the optimizer uses it.

    Noise is alike in all frequencies of the sequence of gradients, while gradients change slowly. With g_t the private
    gradient of step t, the optimizer gets m_t / c_t with ``m_t = sum_r b_r g_(t-r) - sum_s a_s m_(t-s)``. c_t is the
    same filter's output for the constant 1, by which the start is corrected (Zhang et al. 2024, algorithm 1).

    Filters of one optimizer run in the order of their making, after the noise of its `ghostclip.PrivacyEngine`.
    ``remove()`` ends it.

    Args:
        optimizer: of a PrivacyEngine.
        b: coefficients b_0, b_1, ... of gradients.
        a: coefficients a_1, a_2, ... of earlier outputs. The default, with ``b``, is an exponential average.

    Raises:
        ValueError: the filter passes nothing of a constant, or grows without bound.
    """

    def __init__(self, optimizer: Optimizer, b: Sequence[float] = (0.1,), a: Sequence[float] = (-0.9,)) -> None:
        self.b, self.a = [float(value) for value in b], [float(value) for value in a]
        if not self.b or abs(sum(self.b)) < 1e-12:
            raise ValueError(f"b must have coefficients that don't add up to zero; got {list(b)!r}")
        if self.a and max(abs(root) for root in _roots(self.a)) >= 1:
            raise ValueError(f"a makes a filter whose output grows without bound; got {list(a)!r}")
        self._inputs: dict[nn.Parameter, deque[Tensor]] = {}
        self._outputs: dict[nn.Parameter, deque[Tensor]] = {}
        self._ones: deque[float] = deque(maxlen=len(self.a))
        self._steps = 0
        self._optimizer = optimizer
        self._handle = optimizer.register_step_pre_hook(self._before_step)

    def remove(self) -> None:
        """Takes the filter off the optimizer."""
        self._handle.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The optimizer's pre-hook: gradients are filtered now, or right after the closure."""
        if (replaced := with_closure(args, kwargs, self._filter)) is not None:
            return replaced
        self._filter()
        return None

    @torch.no_grad()
    def _filter(self) -> None:
        """Replaces the gradients that are there."""
        self._steps += 1
        passed = sum(self.b[: self._steps]) - sum(c * one for c, one in zip(self.a, self._ones, strict=False))
        self._ones.appendleft(passed)
        for parameter in self._parameters():
            if parameter.grad is not None:
                parameter.grad = self._output(parameter, parameter.grad) / passed

    def _output(self, parameter: nn.Parameter, grad: Tensor) -> Tensor:
        inputs = self._inputs.setdefault(parameter, deque(maxlen=len(self.b)))
        outputs = self._outputs.setdefault(parameter, deque(maxlen=len(self.a)))
        inputs.appendleft(grad)
        found = torch.zeros_like(grad)
        for coefficient, value in zip(self.b, inputs, strict=False):
            found.add_(value, alpha=coefficient)
        for coefficient, value in zip(self.a, outputs, strict=False):
            found.sub_(value, alpha=coefficient)
        outputs.appendleft(found)
        return found

    def state_dict(self) -> dict[str, Any]:
        """What it remembers of earlier steps, by the places of parameters in the optimizer."""
        places = {parameter: str(place) for place, parameter in enumerate(self._parameters())}
        kept = [{places[p]: list(values) for p, values in each.items()} for each in (self._inputs, self._outputs)]
        return {"steps": self._steps, "ones": list(self._ones), "inputs": kept[0], "outputs": kept[1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a `state_dict` back, of a filter with as many coefficients over as many parameters."""
        parameters = self._parameters()
        self._steps, self._ones = int(state["steps"]), deque(state["ones"], maxlen=len(self.a))
        for name, kept, most in (("inputs", self._inputs, len(self.b)), ("outputs", self._outputs, len(self.a))):
            kept.clear()
            kept.update({parameters[int(place)]: deque(values, maxlen=most) for place, values in state[name].items()})

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]


def _roots(a: Sequence[float]) -> list[complex]:
    """The poles of the filter: roots of z^n + a_1 z^(n-1) + ... + a_n."""
    return list(np.roots([1.0, *a]))
