"""The loss that a model of transformers computes from labels, as the mean of one loss for each row of its logits.

``outputs.loss`` of a classifier is that mean: computed from the logits, ``loss.backward()`` comes to their rows.
The loss of a language model is a mean over the tokens of all examples, which has no part for each example.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.errors import UnsupportedModelError

__all__ = ["loss_of_rows"]

# Relative difference of two means of the same losses, in the narrowest types.
CLOSE = 1e-2


def loss_of_rows(model: nn.Module, labels: Any, loss: Tensor, logits: Any) -> Tensor | None:
    """The loss computed from the logits; None where it isn't the mean of one loss for each of their rows.

    Args:
        model: that computed ``loss`` from ``labels``.
        labels: [B] or [B, classes].
        loss: [], of the model.
        logits: [B, classes], what the result is computed from.
    """
    if "transformers" not in sys.modules or not isinstance(labels, Tensor) or not isinstance(logits, Tensor):
        return None
    from ghostclip.integrations.huggingface_losses import class_losses, class_losses_of, losses_for

    try:
        if losses_for(model) is not class_losses:
            return None
        found = class_losses_of(model, logits.to(torch.promote_types(logits.dtype, torch.float32)), labels).mean()
    except (UnsupportedModelError, RuntimeError, ValueError):
        return None
    same = torch.isclose(found.detach(), loss.detach().to(found.dtype), rtol=CLOSE, equal_nan=True)
    return found if bool(same) else None
