"""Whether an update moves what is to be trained: adapters trained to nothing look like training."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ghostclip.self_check.agreement import listed
from ghostclip.sharding.detection import local_part
from ghostclip.sharding.plain import Sharding

__all__ = ["Moving", "moving"]

# Gradients below this share of the largest may be lost in rounding without anything being wrong.
SLIGHT = 1e-3

log = logging.getLogger("ghostclip")


class Number(NamedTuple):
    """The number of a parameter, in place ``place``, whose gradient (``slope``) is largest: it moves if any does."""

    name: str
    parameter: Tensor
    place: int
    value: Tensor
    slope: float


class Moving(NamedTuple):
    """Trainable parameters before an update: one number of each, and the names of those the optimizer doesn't hold."""

    numbers: list[Number]
    not_held: list[str]

    def warn(self, unused: Sequence[str]) -> None:
        """Says after the update which are not trained, if there are any; no loss depends on the ``unused``."""
        largest = max((number.slope for number in self.numbers), default=0.0)
        felt = [number for number in self.numbers if number.slope > SLIGHT * largest]
        still = [each.name for each in felt if torch.equal(each.parameter.reshape(-1)[each.place], each.value)]
        found = {
            "no loss of the first batch depends on {}: until one does, noise is all they are given": unused,
            "the optimizer doesn't hold {}: they stay as they are, and their gradients take up a part of the clipping "
            "norm": self.not_held,
            "the first update left {} as they were: it is skipped, or lost in rounding": still,
        }
        if said := [problem.format(listed(names)) for problem, names in found.items() if names]:
            log.warning(
                "some trainable parameters are not trained: %s. Freeze what is not meant to be trained "
                "(requires_grad_(False)) before the engine is built, and give the optimizer the rest",
                "; ".join(said),
            )


@torch.no_grad()
def moving(sharding: Sharding, held: Collection[nn.Parameter], optimizer: Optimizer) -> Moving | None:
    """What an optimizer is about to update; None where every learning rate is zero.

    Args:
        sharding: of the model's parameters.
        held: the optimizer's parameters, their gradients in place.
        optimizer: that takes the step.
    """
    rates = {each: float(group.get("lr", 1.0)) for group in optimizer.param_groups for each in group["params"]}
    if not any(rates.values()):
        return None
    found = Moving([], [])
    for name, parameter, _ in sharding.pairs:
        if parameter.requires_grad and parameter not in held:
            found.not_held.append(name)
        elif parameter.requires_grad and rates[parameter] and parameter.grad is not None:
            slopes, values = local_part(parameter.grad).reshape(-1).abs(), local_part(parameter)
            if slopes.numel():
                place = int(slopes.argmax())
                value = values.reshape(-1)[place].clone()
                found.numbers.append(Number(name, values, place, value, float(slopes[place])))
    return found
