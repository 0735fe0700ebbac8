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

# How far rounding takes the same losses, or their gradients, apart: in narrow types, and in others.
CLOSE = {torch.bfloat16: 5e-2, torch.float16: 5e-2}
CLOSE_IN_OTHERS = 1e-4


def loss_of_rows(model: nn.Module, labels: Any, loss: Tensor, logits: Any, rows: Any) -> Tensor | None:
    """The loss computed from the logits; None where it isn't the mean of one loss for each of their rows.

    All losses are alike before a model has learned anything, so that gradients are compared, too.

    Args:
        model: that computed ``loss`` from ``labels``.
        labels: [B] or [B, classes].
        loss: [], of the model.
        logits: [B, classes], what ``loss`` was computed from.
        rows: the same numbers, what the result is computed from.
    """
    if "transformers" not in sys.modules or not all(isinstance(each, Tensor) for each in (labels, logits, rows)):
        return None
    from ghostclip.integrations.huggingface_losses import class_losses, class_losses_of, losses_of_task

    try:
        if losses_of_task(model) is not class_losses:
            return None
        found = class_losses_of(model, rows.to(torch.promote_types(rows.dtype, torch.float32)), labels).mean()
        (own,), (mean,) = (
            torch.autograd.grad(total, at, retain_graph=True) for total, at in ((loss, logits), (found, rows))
        )
    except (UnsupportedModelError, RuntimeError, ValueError):
        return None
    close = max(CLOSE.get(each.dtype, CLOSE_IN_OTHERS) for each in (loss, logits))
    same = torch.isclose(found.detach(), loss.detach().to(found.dtype), rtol=close, atol=close, equal_nan=True)
    # What cancels leaves the rounding of numbers of size one, each over their count.
    size = mean.nan_to_num().norm() + mean.numel() ** -0.5
    same &= (own - mean).nan_to_num().norm() <= close * size
    return found if bool(same) else None
