"""The losses of the benchmark's workloads: one number an example, or their mean."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

__all__ = ["Losses", "class_losses", "token_losses"]


class Losses(Protocol):
    """A loss of a batch of outputs."""

    def __call__(self, outputs: Tensor, targets: Tensor, reduction: str = "none") -> Tensor:
        """Losses [B] for ``reduction="none"``, their mean over the examples for "mean"."""


def class_losses(outputs: Tensor, targets: Tensor, reduction: str = "none") -> Tensor:
    """Cross-entropy of logits [B, C] and class numbers [B]: [B], or the mean."""
    return F.cross_entropy(outputs, targets, reduction=reduction)


def token_losses(outputs: Tensor, targets: Tensor, reduction: str = "none") -> Tensor:
    """Cross-entropy of logits [B, T, V] and token ids [B, T], averaged over each example's tokens: [B], or the mean."""
    found = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction=reduction)
    return found if reduction == "mean" else found.view(targets.shape).mean(1)
