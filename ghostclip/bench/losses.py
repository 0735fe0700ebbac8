"""The losses of the benchmark's workloads: one number an example, or their mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["LossFunction", "Losses", "class_losses", "loss_function", "token_losses"]

LossFunction = Callable[[nn.Module, Sequence[Tensor]], Tensor]


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


def loss_function(losses: Losses) -> LossFunction:
    """The same as a function (model, (inputs, targets)) -> losses [B], which clippers and engines take."""
    return lambda model, batch: losses(model(batch[0]), batch[1])
