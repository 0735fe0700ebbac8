"""A forward that is tried again without a trace: random numbers, buffers, attributes and modes are put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Replay"]


class Replay:
    """Remembers random states and a model's buffers, so that a forward can be tried again without a trace.

    Args:
        model: in the state from which its forward will be repeated.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._devices = sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)
        self._states, self._before = self._now(), self.state()

    def _now(self) -> tuple[Any, ...]:
        cuda = [torch.cuda.get_rng_state(device) for device in self._devices]
        return torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()

    def _set(self, states: tuple[Any, ...]) -> None:
        cpu, cuda, numpy_state, python_state = states
        torch.set_rng_state(cpu)
        for device, state in zip(self._devices, cuda, strict=True):
            torch.cuda.set_rng_state(state, device)
        np.random.set_state(numpy_state)
        random.setstate(python_state)

    def state(self) -> tuple[Any, ...]:
        """The random states as they are now, to be compared."""
        cpu, cuda, (_, keys, *numpy_rest), python_state = self._now()
        return (*[each.numpy().tobytes() for each in (cpu, *cuda)], keys.tobytes(), *numpy_rest, python_state)

    def drew(self) -> bool:
        """Whether random numbers were drawn since."""
        return self.state() != self._before

    @contextmanager
    def again(self, gradients: bool = False, training: bool = True) -> Iterator[None]:
        """With the random numbers that were to come then; afterwards all is as before: buffers, attributes and modes.

        Args:
            gradients: whether a graph is recorded.
            training: False for eval mode.
        """
        now = self._now()
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        places = [(module, dict(vars(module)), dict(module._buffers)) for module in self.model.modules()]
        with ExitStack() as stack:
            stack.callback(self._set, now)
            stack.callback(_put_back, buffers, places)
            stack.enter_context(torch.set_grad_enabled(gradients))
            self._set(self._states)
            if not training:
                self.model.eval()
            yield


@torch.no_grad()
def _put_back(
    buffers: list[tuple[Tensor, Tensor]],
    places: list[tuple[nn.Module, dict[str, Any], dict[str, Tensor | None]]],
) -> None:
    for module, attributes, known in places:
        own = vars(module)
        for name in own.keys() - attributes.keys():
            del own[name]
        own.update(attributes)
        module._buffers.update(known)
    for buffer, value in buffers:
        if not torch.equal(buffer, value):
            buffer.copy_(value)
