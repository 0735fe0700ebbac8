"""When values may be looked at: a host that waits until a GPU has done all it was given leaves it idle."""

from __future__ import annotations

import torch

from ghostclip.native.custom_ops import is_traced

__all__ = ["may_sync"]


def may_sync(device: torch.device) -> bool:
    """Whether the host may wait for values on ``device`` wherever they come up, rather than once for a batch."""
    return device.type == "cpu" and not is_traced()
