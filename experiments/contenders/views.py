"""Steps on K views of each example, non-private and private; the views are made by shifts, within the step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ghostclip.bench.contenders import Batch, Contender, Prepared, adam, by_filling_gradients
from ghostclip.bench.losses import Losses
from ghostclip.clipper import GhostClipper

__all__ = ["CONTENDERS", "VIEWS"]

VIEWS = (1, 4, 16)


def mean_losses(losses: Losses, views: int, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """The mean loss of each example's views, [B]."""
    inputs, targets = batch
    rows = torch.stack([inputs.roll(view, -1) for view in range(views)], 1).flatten(0, 1)
    return losses(model(rows), targets.repeat_interleave(views, 0)).view(-1, views).mean(1)


def _nonprivate(views: int, model: nn.Module, losses: Losses, max_norm: float) -> Prepared:
    optimizer = adam(model)

    def step(inputs: Tensor, targets: Tensor) -> None:
        mean_losses(losses, views, model, (inputs, targets)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Prepared(step, None)


def _clipped(views: int, model: nn.Module, losses: Losses, max_norm: float) -> Batch:
    clipper = GhostClipper(model, max_norm)
    return lambda *batch: clipper.clip(partial(mean_losses, losses, views), batch)


CONTENDERS = tuple(
    contender
    for views in VIEWS
    for contender in (
        Contender(f"nonprivate, {views} views", "an ordinary step", partial(_nonprivate, views)),
        Contender(f"private, {views} views", "GhostClipper", by_filling_gradients(partial(_clipped, views))),
    )
)
