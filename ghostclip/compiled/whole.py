"""Graphs that take a step: a whole one, from the forward to the update, or noise and update of sums that are there.

A whole one is for a logical batch that comes in one piece. Nothing leaves it but losses, norms and weights; parameters
and the optimizer's state are written in place, and only where all norms and losses are finite. The other is for batches
in several pieces, or in none, and where the passes are not compiled: the optimizer's many small operations become one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ghostclip.compiled.clip import CompiledClip, GraphPlan, LossFunction, in_a_line, rolled
from ghostclip.compiled.region import Region, trace, write_back
from ghostclip.compiled.signature import CompileRequest
from ghostclip.compiled.update import Update

__all__ = ["CompiledStep"]


class CompiledStep:
    """Makes and keeps the graphs that take a step, whole or from the sums on.

    Args:
        clip: whose model, passes, padding and records these are; where a whole step can't be compiled or isn't faster,
            it isn't tried for the passes alone.

    Attributes:
        whole, releases: the plans of both kinds, by what they hold for.
    """

    def __init__(self, clip: CompiledClip) -> None:
        self._clip = clip
        self.whole: dict[tuple, GraphPlan] = {}
        self.releases: dict[tuple, GraphPlan] = {}

    def find(
        self, loss_fn: LossFunction, batch: Any, update: Update, noise: Tensor
    ) -> tuple[GraphPlan, CompileRequest] | None:
        """The graph of a whole step for this batch, compiled if it is the first of its kind; None to go another way.

        Args:
            loss_fn: (model, batch) -> losses [B].
            batch: what it takes.
            update: the optimizer's step.
            noise: of the shape and type that the graph will be given: one number for each of the update's, of the
                standard deviation it has after the division.
        """
        clip = self._clip
        if clip.passes.is_open or (asked := clip.ask(loss_fn, batch)) is None:
            return None
        key = (asked.key, update.key)
        if clip.is_due(key):
            return None
        if key not in self.whole and not clip.gave_up and clip.may_have(len(self.whole)):
            made = clip.attempt(loss_fn, asked, partial(self._whole_graph, update, noise))
            if made is None:
                return None
            if made.region is None:
                clip.leave(asked)
            self.whole[key] = made
        plan = self.whole.get(key)
        return None if plan is None or plan.region is None else (plan, asked)

    def find_release(self, update: Update, sums: list[Tensor], noise: Tensor) -> GraphPlan | None:
        """The graph of noise and update, compiled if it is the first of its kind; None to leave it to the optimizer.

        Args:
            update: the optimizer's step.
            sums: the clipped sum of each parameter; not changed.
            noise: as for `find`.
        """
        if any(total.stride() != p.stride() for total, p in zip(sums, update.parameters, strict=True)):
            return None
        key = update.key
        if key not in self.releases and self._clip.may_have(len(self.releases)):
            plan = self.releases[key] = GraphPlan(list(update.parameters))
            try:
                plan.region = self._release_graph(update, sums, noise)
            except Exception as error:  # whatever the compiler stumbles over, the optimizer is there
                self.refuse(plan, in_a_line(error))
        found = self.releases.get(key)
        return None if found is None or found.region is None else found

    def refuse(self, plan: GraphPlan, reason: str, asked: CompileRequest | None = None) -> None:
        """The graph is not used any more, nor one tried of the passes alone for the batch of a whole step."""
        plan.region, plan.kept = None, []
        if asked is not None:
            self._clip.leave(asked)
        self._clip.refuse(reason if asked is not None else f"the update by itself: {reason}")

    def _whole_graph(self, update: Update, noise: Tensor, loss_fn: LossFunction, asked: CompileRequest) -> GraphPlan:
        clip, count = self._clip, len(update.written)
        ids = set(map(id, update.written))
        held = [tensor for tensor in clip.state.held if id(tensor) not in ids]
        plan = GraphPlan([*clip.kept(asked), *update.parameters], held)
        trained = [id(parameter) for _, parameter in clip.passes.index.trained()]

        def step(*inputs: Tensor) -> tuple[Tensor, ...]:
            *leaves, keep, noise, numbers = inputs[count + len(held) :]
            seen, totals = clip.write_down(plan, loss_fn, asked, leaves, keep)
            known = dict(zip(trained, totals, strict=True))
            before = [tensor.detach() for tensor in inputs[:count]]
            after = update.formula([known.get(id(p)) for p in update.parameters], noise, numbers, before)
            finite = torch.isfinite(seen[0])
            after = [torch.where(finite, new, old) for new, old in zip(after, before, strict=True)]
            return tuple(output.detach() for output in (*seen, *after))

        keep, numbers = clip.keep_rows(asked), update.numbers(1.0)
        batches = asked.leaves, map(rolled, asked.leaves)
        inputs, others = ([*held, *leaves, keep, noise, numbers] for leaves in batches)
        plan.region = self._region(step, update, inputs, others, len(held), f"a whole step for {len(keep)} rows")
        return plan

    @torch.no_grad()
    def _release_graph(self, update: Update, sums: list[Tensor], noise: Tensor) -> Region:
        count = len(update.written)

        def step(*inputs: Tensor) -> tuple[Tensor, ...]:
            *sums, noise, numbers = inputs[count:]
            return tuple(update.formula(sums, noise, numbers, inputs[:count]))

        inputs = [*sums, noise, update.numbers(1.0)]
        return self._region(step, update, inputs, inputs, 0, f"an update of {update.size} numbers")

    def _region(
        self,
        step: Callable[..., tuple[Tensor, ...]],
        update: Update,
        inputs: Sequence[Tensor],
        others: Sequence[Tensor],
        held: int,
        what: str,
    ) -> Region:
        """The graph of a step that writes to `Update.written`, its first inputs; ``held`` of the next ones last too."""
        written = update.written
        graph = trace(step, [*written, *inputs], [*written, *others])
        write_back(graph, len(written))
        # Compiling runs the graph once, which is not to be a step.
        copies = [tensor.detach().clone() for tensor in written]
        return self._clip.compile(graph, [*copies, *inputs], len(written) + held, what)
