"""What a step saw, put together from its physical batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ghostclip.clipper import ClippingResult

__all__ = ["StepRecord"]


@dataclass(frozen=True)
class StepRecord:
    """What `PrivacyEngine.step` saw of one logical batch. All of it is private data: for debugging, not for release.

    Attributes:
        losses: [B], in the order of the physical batches.
        norms: [B], gradient norms before clipping ({group: [B]} under group-wise clipping).
        weights: [B], the factor each gradient was multiplied with (likewise).
    """

    losses: Tensor
    norms: Any
    weights: Any

    @classmethod
    def of(cls, results: Sequence[ClippingResult]) -> StepRecord:
        """The record of a logical batch from its physical ones, in their order."""
        return cls(
            _joined([result.losses for result in results]),
            _joined([result.norms for result in results]),
            _joined([result.weights for result in results]),
        )


def _joined(parts: list[Any]) -> Any:
    """The physical batches' values one after another: [B], or {group: [B]}."""
    if parts and isinstance(parts[0], dict):
        return {group: torch.cat([part[group] for part in parts]) for group in parts[0]}
    return torch.cat(parts) if parts else torch.zeros(0)
