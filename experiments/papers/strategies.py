"""Norms by one way only, or by the planner's choice, as contenders."""

from __future__ import annotations

from torch import nn

from ghostclip import GhostClipper
from ghostclip.bench import Contender
from ghostclip.bench.contenders import Batch, Prepare, by_filling_gradients
from ghostclip.bench.losses import Losses, loss_function

__all__ = ["CONTENDERS"]


def _forced(way: str) -> Prepare:
    """A second backward, norms by one way."""

    def fill(model: nn.Module, losses: Losses, max_norm: float) -> Batch:
        clipper = GhostClipper(model, max_norm, second_pass="reweight", norm_strategy=way)
        of_batch = loss_function(losses)
        return lambda *batch: clipper.clip(of_batch, batch)

    return by_filling_gradients(fill)


CONTENDERS = (
    Contender("gram", "norms by Gram matrices", _forced("gram"), usual=False),
    Contender("direct", "norms of the gradients themselves", _forced("direct"), usual=False),
    Contender("auto", "norms by the planner's choice", _forced("auto"), usual=False),
)
