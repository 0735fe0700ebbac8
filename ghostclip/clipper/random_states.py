"""The states of the process's random number generators, for a second pass that computes again what the first did.

A block under ``checkpoint(..., preserve_rng_state=False)`` draws anew whenever it is computed. Unless both passes draw
the same numbers, what is summed isn't what was measured.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["RandomStates"]


class RandomStates:
    """Those of torch on the CPU and on one device, of NumPy and of Python, as they are now.

    Args:
        device: of the losses.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._cpu, self._numpy, self._python = torch.get_rng_state(), np.random.get_state(), random.getstate()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, generators go on from these states; afterwards they are where they were before."""
        now = RandomStates(self._device)
        self._set()
        try:
            yield
        finally:
            now._set()

    def _set(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        np.random.set_state(self._numpy)
        random.setstate(self._python)
