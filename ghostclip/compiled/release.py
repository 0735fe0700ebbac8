"""Noise and update of clipped sums as one graph: what follows when a logical batch came in several pieces, or in none.

So it does where the passes are not compiled: the optimizer's many small operations become one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ghostclip.compiled.clip import CompiledClip, in_a_line
from ghostclip.compiled.region import Region, trace, write_back
from ghostclip.compiled.trial import Trial
from ghostclip.compiled.update import Update

__all__ = ["CompiledRelease", "ReleaseGraph"]


@dataclass
class ReleaseGraph:
    """One update's graph.

    Attributes:
        region: None where the optimizer's own step is to be used.
        kept: what the key was made of, so that no id in it is used again.
        trial: of both.
    """

    region: Region | None
    kept: list[nn.Parameter]
    trial: Trial = field(default_factory=Trial)

    def run(self, written: list[Tensor], sums: list[Tensor], noise: Tensor, numbers: Tensor) -> None:
        """Takes the step, on ``written``.

        Args:
            written: `Update.written`, or copies of it.
            sums: the clipped sum of each parameter; not changed.
            noise: one number for each of the update's, of the standard deviation it has after the division.
            numbers: `Update.numbers`.
        """
        assert self.region is not None
        self.region(*written, *sums, noise, numbers)


class CompiledRelease:
    """Makes and keeps the graphs.

    Args:
        clip: who keeps the records.
    """

    def __init__(self, clip: CompiledClip) -> None:
        self._clip = clip
        self._plans: dict[tuple, ReleaseGraph] = {}

    def find(self, update: Update, sums: list[Tensor], noise: Tensor) -> ReleaseGraph | None:
        """The update's graph, compiled if it is the first of its kind; None to leave it to the optimizer."""
        if any(total.stride() != p.stride() for total, p in zip(sums, update.parameters, strict=True)):
            return None
        key = update.key
        if key not in self._plans and self._clip.may_have(len(self._plans)):
            self._plans[key] = self._compile(update, sums, noise)
        plan = self._plans.get(key)
        return None if plan is None or plan.region is None else plan

    def refuse(self, plan: ReleaseGraph, reason: str) -> None:
        """The graph is not used any more."""
        plan.region = None
        self._clip.refuse(f"the update by itself: {reason}")

    @torch.no_grad()
    def _compile(self, update: Update, sums: list[Tensor], noise: Tensor) -> ReleaseGraph:
        plan, count = ReleaseGraph(None, update.parameters), len(update.written)

        def step(*inputs: Tensor) -> tuple[Tensor, ...]:
            *sums, noise, numbers = inputs[count:]
            return tuple(update.formula(sums, noise, numbers, inputs[:count]))

        try:
            copies = [tensor.detach().clone() for tensor in update.written]
            inputs = [*copies, *sums, noise, update.numbers(1.0)]
            graph = trace(step, inputs, inputs)
            write_back(graph, count)
            plan.region = Region(graph, inputs, count)
            self._clip.compiled(plan.region, f"an update of {update.size} numbers")
        except Exception as error:  # whatever the compiler stumbles over, the optimizer is there
            self.refuse(plan, in_a_line(error))
        return plan
