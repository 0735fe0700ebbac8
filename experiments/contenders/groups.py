"""GhostClipper's default beside policies composed of groups, from one group to one for each parameter."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from ghostclip.bench.contenders import Batch, Contender, by_filling_gradients
from ghostclip.bench.losses import Losses, loss_function
from ghostclip.clipper import GhostClipper
from ghostclip.clipping import ByLayer, ByParameter, Composed, EqualSizes, Whole

__all__ = ["CONTENDERS", "DEFAULT"]

DEFAULT = "flat"
PARTITIONS: dict[str, Any] = {
    "one group": Whole,
    "four groups": partial(EqualSizes, 4),
    "by layer": ByLayer,
    "by parameter": ByParameter,
}


def _clipped(partition: Any, model: nn.Module, losses: Losses, max_norm: float) -> Batch:
    policy: Any = max_norm if partition is None else Composed(partition(), max_norm)
    clipper, of_batch = GhostClipper(model, policy), loss_function(losses)
    return lambda inputs, targets: clipper.clip(of_batch, (inputs, targets))


CONTENDERS = tuple(
    Contender(name, "GhostClipper", by_filling_gradients(partial(_clipped, partition)))
    for name, partition in {DEFAULT: None, **PARTITIONS}.items()
)
