"""A whole step as one graph: forward, passes, weights, noise and update of a logical batch that comes in one piece.

Nothing leaves the graph but losses, norms and weights; parameters and the optimizer's state are written in place, and
only where all norms and losses are finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from ghostclip.clipper.replay import Replay
from ghostclip.compiled.clip import CompiledClip, LossFunction, in_a_line, rolled
from ghostclip.compiled.region import Region, trace, write_back
from ghostclip.compiled.signature import CompileRequest
from ghostclip.compiled.trace_friendly import Clipped, Groups, put_together, taken_apart, trace_friendly
from ghostclip.compiled.trial import Trial
from ghostclip.compiled.update import Update

__all__ = ["CompiledStep", "WholeStep"]


@dataclass
class WholeStep:
    """One shape's graph of a whole step.

    Attributes:
        region: the graph; None where steps are taken apart.
        kept: what the key was made of, so that no id in it is used again.
        others: parameters and buffers that the update doesn't write.
        groups: how a `Clipped` is made of the graph's outputs.
        trial: of graph and eager.
    """

    region: Region | None
    kept: list[Any]
    others: list[Tensor]
    groups: Groups = (None, None)
    trial: Trial = field(default_factory=Trial)

    def run(
        self, asked: CompileRequest, keep: Tensor, written: list[Tensor], noise: Tensor, numbers: Tensor
    ) -> Clipped | None:
        """Takes the step, on ``written``; None, and nothing was written, when a norm or a loss isn't finite.

        Args:
            asked: the batch.
            keep: 1 for rows that are examples, 0 for padding.
            written: `Update.written`, or copies of it.
            noise: one number for each of the update's, of the standard deviation it has after the division.
            numbers: `Update.numbers`.
        """
        assert self.region is not None
        fine, *vectors = self.region(*written, *self.others, *asked.leaves, keep, noise, numbers)
        if not math.isfinite(fine.item()):
            return None
        return put_together(vectors, self.groups, asked.examples, [])


class CompiledStep:
    """Makes and keeps the graphs of whole steps.

    Args:
        clip: whose model, passes, padding and records these are; where a whole step can't be compiled or isn't faster,
            it isn't tried for the passes alone.
    """

    def __init__(self, clip: CompiledClip) -> None:
        self._clip = clip
        self._plans: dict[tuple, WholeStep] = {}

    def find(
        self, loss_fn: LossFunction, batch: Any, update: Update, noise: Tensor
    ) -> tuple[WholeStep, CompileRequest] | None:
        """The graph for this batch and update, compiled if it is the first of its kind; None to go another way.

        Args:
            loss_fn: (model, batch) -> losses [B].
            batch: what it takes.
            update: the optimizer's step.
            noise: of the shape and type that `WholeStep.run` will be given.
        """
        passes = self._clip.passes
        if passes.is_open or (asked := self._clip.ask(loss_fn, batch)) is None:
            return None
        key = (asked.key, update.key)
        if key not in self._plans and not self._clip.gave_up and self._clip.may_have(len(self._plans)):
            made = self._compile(loss_fn, asked, update, noise)
            if passes.is_open:
                return None
            self._plans[key] = made
        plan = self._plans.get(key)
        return None if plan is None or plan.region is None else (plan, asked)

    def refuse(self, plan: WholeStep, asked: CompileRequest, reason: str) -> None:
        """The graph is not used any more, nor one of the passes alone tried."""
        plan.region, plan.kept = None, []
        self._clip.leave(asked)
        self._clip.refuse(reason)

    def _compile(self, loss_fn: LossFunction, asked: CompileRequest, update: Update, noise: Tensor) -> WholeStep:
        plan = WholeStep(None, [*self._clip.kept(asked), *update.parameters], [])
        try:
            with Replay(self._clip.model).again(gradients=True):
                if (reason := self._clip.obstacle(loss_fn, asked)) is None:
                    self._graph(plan, loss_fn, asked, update, noise)
        except Exception as error:  # whatever the compiler stumbles over, the eager step is there
            reason = in_a_line(error)
        if self._clip.passes.is_open:
            return plan
        if reason is not None:
            plan.kept = []
            self._clip.leave(asked)
        self._clip.tried(reason)
        return plan

    def _graph(
        self, plan: WholeStep, loss_fn: LossFunction, asked: CompileRequest, update: Update, noise: Tensor
    ) -> None:
        clip, written = self._clip, update.written
        ids = set(map(id, written))
        plan.others = [tensor for tensor in clip.held if id(tensor) not in ids]
        start = len(written) + len(plan.others)
        trained = [id(parameter) for _, parameter in clip.passes.index.trained()]

        def step(*inputs: Tensor) -> tuple[Tensor, ...]:
            *leaves, keep, noise, numbers = inputs[start:]
            fine, result = trace_friendly(
                clip.passes, loss_fn(clip.model, tree_unflatten(leaves, asked.structure)), keep
            )
            vectors, plan.groups = taken_apart(result)
            totals = dict(zip(trained, result.sums, strict=True))
            before = [tensor.detach() for tensor in inputs[: len(written)]]
            sums = [totals.get(id(parameter)) for parameter in update.parameters]
            after = update.formula(sums, noise, numbers, before)
            finite = torch.isfinite(fine)
            after = [torch.where(finite, new, old) for new, old in zip(after, before, strict=True)]
            return tuple(output.detach() for output in (fine, *vectors, *after))

        keep, numbers = clip.keep_rows(asked), update.numbers(1.0)
        inputs, others = (
            [*written, *plan.others, *leaves, keep, noise, numbers] for leaves in (asked.leaves, rolled(asked))
        )
        graph = trace(step, inputs, others)
        write_back(graph, len(written))
        # Compiling runs the graph once, which is not to be a step.
        copies = [tensor.detach().clone() for tensor in written]
        plan.region = Region(graph, [*copies, *inputs[len(written) :]], start)
        clip.compiled(plan.region, f"a whole step for {len(keep)} rows")
