"""The criterion that ``make_private`` returns in the mode "ghost": one loss for each example, as in Opacus."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

__all__ = ["ReducedLosses", "reduced"]


class ReducedLosses(nn.Module):
    """The mean or the sum of the losses that a criterion computes with ``reduction="none"``.

    A mean of torch's own divides by what the whole batch has: by the weights of its classes, or by the number of
    targets that ``ignore_index`` keeps. This one divides by the number of losses.

    Args:
        criterion: (outputs, targets) -> losses. One without an attribute ``reduction`` is called as it is.
        reduction: "mean" or "sum".
    """

    def __init__(self, criterion: Any, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction
        self.criterion = copy.copy(criterion)  # whose buffers and submodules are those of the user's
        if hasattr(criterion, "reduction"):
            self.criterion.reduction = "none"

    def forward(self, *args: Any, shape: Sequence[int] | None = None, **kwargs: Any) -> Tensor:
        """One number.

        Args:
            args, kwargs: of the criterion.
            shape: [B, T, ...], that of token outputs before they were flattened to [B * T, ...]. Then the mean of an
                example is over those of its own tokens that ``ignore_index`` keeps.
        """
        losses: Tensor = self.criterion(*args, **kwargs)
        if shape is not None and losses.shape[:1] == (shape[0] * shape[1],):
            losses = losses.view(shape[0], shape[1])
            if self.reduction == "mean":
                targets = kwargs["target"] if "target" in kwargs else args[1]
                kept = targets.view(shape[0], shape[1]) != getattr(self.criterion, "ignore_index", None)
                losses = losses.sum(1) / kept.sum(1).clamp(min=1)
        if not losses.dim():
            return losses
        return losses.mean() if self.reduction == "mean" else losses.sum()


def reduced(criterion: Any, reduction: str) -> ReducedLosses:
    """A criterion's `ReducedLosses`; of ``nn.CrossEntropyLoss`` for None.

    Raises:
        ValueError: the criterion has another ``reduction``.
    """
    criterion = nn.CrossEntropyLoss(reduction=reduction) if criterion is None else criterion
    if (own := getattr(criterion, "reduction", reduction)) != reduction:
        raise ValueError(
            f"criterion.reduction must be {reduction!r}, as loss_reduction of make_private; got {own!r}. Give both the "
            "same"
        )
    return ReducedLosses(criterion, reduction)
