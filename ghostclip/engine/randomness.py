"""The random states of libraries: of dropout and data augmentation, never of sampling or noise."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["random_states", "set_random_states"]


def random_states() -> dict[str, Any]:
    """Those of torch (each GPU in use included), numpy and Python, as plain data and tensors."""
    name, keys, place, has_normal, normal = np.random.get_state()
    version, words, next_normal = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), place, has_normal, normal],
        "python": [version, torch.tensor(words, device="cpu"), next_normal],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Takes back what `random_states` gave; GPUs that aren't there are left out."""
    torch.set_rng_state(states["torch"])
    for device, state in enumerate(states["cuda"]):
        if device < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    version, words, next_normal = states["python"]
    random.setstate((version, tuple(words.tolist()), next_normal))
