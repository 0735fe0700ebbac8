"""The states of the process's random number generators: torch's on the CPU and on each GPU in use, NumPy's, Python's.

A block under ``checkpoint(..., preserve_rng_state=False)`` draws anew whenever it is computed. Unless both passes draw
the same numbers, what is summed isn't what was measured.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["drawing_from", "random_states", "set_random_states"]


def random_states() -> tuple[Any, ...]:
    """The states of all generators now; they equal earlier ones unless random numbers were drawn."""
    name, keys, *rest = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    of_torch = [each.numpy().tobytes() for each in (torch.get_rng_state(), *cuda)]
    return of_torch, (name, np.asarray(keys).tobytes(), *rest), random.getstate()


def set_random_states(states: tuple[Any, ...]) -> None:
    """Puts back what `random_states` gave."""
    of_torch, (name, keys, *rest), of_python = states
    cpu, *cuda = [torch.from_numpy(np.frombuffer(each, np.uint8).copy()) for each in of_torch]
    torch.set_rng_state(cpu)
    for device, state in enumerate(cuda):
        torch.cuda.set_rng_state(state, device)
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))
    random.setstate(of_python)


@contextmanager
def drawing_from(states: tuple[Any, ...]) -> Iterator[None]:
    """Inside, generators go on from these states; afterwards they are where they were before."""
    now = random_states()
    set_random_states(states)
    try:
        yield
    finally:
        set_random_states(now)
