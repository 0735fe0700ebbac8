"""Whether the first update moved what is to be trained: adapters trained to nothing look like training."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ghostclip.engine.agreement import listed
from ghostclip.graph.parameter_names import ParameterNames

__all__ = ["Movement"]

log = logging.getLogger("ghostclip")

# Gradients below this share of the largest may be lost in rounding without anything being wrong.
SLIGHT = 1e-3


class _Entry(NamedTuple):
    """The one number of a parameter whose gradient (``slope``) is largest, so that it moves if any does."""

    name: str
    parameter: nn.Parameter
    place: int
    value: Tensor
    slope: float


class Movement:
    """Looks at one update of a model's trained parameters.

    Args:
        index: the model's names.
        optimizer: that takes the step.

    Attributes:
        noted: whether an update was seen coming; one in which every learning rate is zero is none.
        unused: trained parameters on which the losses didn't depend.
    """

    def __init__(self, index: ParameterNames, optimizer: Optimizer) -> None:
        self._index, self._optimizer = index, optimizer
        self.noted = False
        self.unused: Sequence[str] = ()
        self._entries: list[_Entry] = []
        self._not_held: list[str] = []

    @torch.no_grad()
    def note(self, held: Collection[nn.Parameter]) -> None:
        """Remembers one number of each parameter that is about to be updated.

        Args:
            held: the optimizer's parameters, their gradients in place.
        """
        rates = {p: float(group.get("lr", 1.0)) for group in self._optimizer.param_groups for p in group["params"]}
        if not any(rates.values()):
            return
        self.noted = True
        for name, parameter in self._index.trained():
            if parameter not in held:
                self._not_held.append(name)
            elif rates[parameter] and parameter.grad is not None and parameter.numel():
                slopes = parameter.grad.reshape(-1).abs()
                place = int(slopes.argmax())
                value = parameter.reshape(-1)[place].clone()
                self._entries.append(_Entry(name, parameter, place, value, float(slopes[place])))

    @torch.no_grad()
    def warn(self) -> None:
        """Says which trainable parameters are not trained, if there are any."""
        largest = max((entry.slope for entry in self._entries), default=0.0)
        felt = [entry for entry in self._entries if entry.slope > SLIGHT * largest]
        still = [entry.name for entry in felt if torch.equal(entry.parameter.reshape(-1)[entry.place], entry.value)]
        found = {
            "no loss of the first batch depends on {}: until one does, noise is all they are given": self.unused,
            "the optimizer doesn't hold {}: they stay as they are, and their gradients take up a part of the clipping "
            "norm": self._not_held,
            "the first update left {} as they were: it is skipped, or lost in rounding": still,
        }
        said = [problem.format(listed(names)) for problem, names in found.items() if names]
        if said:
            log.warning(
                "some trainable parameters are not trained: %s. Freeze what is not meant to be trained "
                "(requires_grad_(False)) before the engine is built, and give the optimizer the rest",
                "; ".join(said),
            )
