"""Whether the first update moved what is to be trained: adapters trained to nothing look like training."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ghostclip.graph.parameter_names import ParameterNames

__all__ = ["Movement"]

log = logging.getLogger("ghostclip")

NAMES_SHOWN = 5
# Gradients below this share of the largest may be lost in rounding without anything being wrong.
SLIGHT = 1e-3


@dataclass(frozen=True)
class _Entry:
    """The one number of a parameter whose gradient is largest, so that it moves if any does."""

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
        saw_examples: to be set when there are examples in the update, which is waited for.
        noted: whether an update was seen coming; one in which every learning rate is zero is none.
    """

    def __init__(self, index: ParameterNames, optimizer: Optimizer) -> None:
        self._index, self._optimizer = index, optimizer
        self.saw_examples = self.noted = False
        self._entries: list[_Entry] = []
        self._not_held: list[str] = []

    @torch.no_grad()
    def note(self, held: Collection[nn.Parameter]) -> None:
        """Remembers one number of each parameter that is about to be updated.

        Args:
            held: the optimizer's parameters, their gradients in place.
        """
        groups = self._optimizer.param_groups
        rates = {p: float(group.get("lr", 1.0)) for group in groups for p in group["params"]}
        if not self.saw_examples or not any(rates.values()):
            return
        self.noted = True
        for name, parameter in self._index.trained():
            if parameter not in held:
                self._not_held.append(name)
            elif rates[parameter] and parameter.grad is not None and parameter.numel():
                sizes = parameter.grad.reshape(-1).abs()
                place = int(sizes.argmax())
                value = parameter.reshape(-1)[place].clone()
                self._entries.append(_Entry(name, parameter, place, value, float(sizes[place])))

    @torch.no_grad()
    def warn(self, unused: Sequence[str]) -> None:
        """Says which trainable parameters are not trained, if there are any.

        Args:
            unused: trained parameters on which the losses didn't depend.
        """
        largest = max((entry.slope for entry in self._entries), default=0.0)
        still = [
            entry.name
            for entry in self._entries
            if entry.slope > SLIGHT * largest and torch.equal(entry.parameter.reshape(-1)[entry.place], entry.value)
        ]
        said = []
        if unused:
            said.append(
                f"no loss of the first batch depends on {_listed(unused)}: until one does, noise is all they are given"
            )
        if self._not_held:
            said.append(
                f"the optimizer doesn't hold {_listed(self._not_held)}: they stay as they are, and their gradients "
                "take up a part of the clipping norm"
            )
        if still:
            said.append(f"the first update left {_listed(still)} as they were: it is skipped, or lost in rounding")
        if said:
            log.warning(
                "some trainable parameters are not trained: %s. Freeze what is not meant to be trained "
                "(requires_grad_(False)) before the engine is built, and give the optimizer the rest",
                "; ".join(said),
            )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
