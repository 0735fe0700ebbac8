"""Compiled steps of an engine: which part of a step runs as one graph, and its charge before that.

A logical batch in one piece is one graph from the forward to the update; in several, each has a graph for its forward
and passes, and noise and update have one. Graphs are tried first on copies of what they write.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ghostclip.clipper import ClippingResult, GhostClipper
from ghostclip.clipper.random_states import drawing_from, random_states
from ghostclip.clipper.second_pass import Add
from ghostclip.compiled import NOT_YET, CompiledStep, GraphPlan, Update, UpdateReader
from ghostclip.compiled.clip import LossFunction, in_a_line
from ghostclip.compiled.signature import CompileRequest
from ghostclip.compiled.trial import drift, movement, timed
from ghostclip.sampling import LogicalBatch
from ghostclip.sharding.detection import is_distributed

if TYPE_CHECKING:
    from ghostclip.clipping import Schedule
    from ghostclip.engine.distributed import Ranks
    from ghostclip.engine.step import LogicalStep
    from ghostclip.self_check import SelfCheck

__all__ = ["CompiledSteps", "LossFunction", "check_compilable"]

# The engine's own hooks before the optimizer's step, and after it.
OWN_HOOKS = 1


def check_compilable(unit: str, ranks: Ranks, schedule: Schedule | None) -> None:
    """Raises ValueError where the engine can't compile its steps."""
    if unit == "user":
        raise ValueError(
            "compile() and unit_ids don't go together: a compiled step pads batches by rows; leave one of them out"
        )
    if ranks.size > 1:
        raise ValueError("compile() isn't there for several processes that train together; leave it out")
    if schedule is not None:
        raise ValueError(
            "compile() and schedule don't go together: a graph is made for one threshold; leave one of them out"
        )


class CompiledSteps:
    """`LogicalStep.step` with graphs.

    Args:
        steps: whose logical batches, checks and charges these are.
        clipper: compiling.
        optimizer: as `LogicalStep` has it.
        self_check: of the first steps, which aren't compiled.

    Attributes:
        graphs: of whole steps, and of noise and update.
    """

    def __init__(self, steps: LogicalStep, clipper: GhostClipper, optimizer: Optimizer, self_check: SelfCheck) -> None:
        assert clipper.compiled is not None
        self._steps, self._clipper, self._optimizer, self._self_check = steps, clipper, optimizer, self_check
        self._release = steps.release
        self._clip = clipper.compiled
        self.graphs = CompiledStep(self._clip)
        # Where nearly all logical batches come in several pieces, one graph for the others isn't worth its compilation.
        self._in_one_as_a_rule = self._clip.largest is None or self._clip.largest >= steps.release.terms.batch_size
        self._reader = UpdateReader(optimizer, OWN_HOOKS)
        self._draws_ahead = steps.release.draws_ahead
        self._noise = torch.empty(0)
        self._refused: str | None = None

    def step(self, batch: LogicalBatch, loss_fn: LossFunction) -> list[ClippingResult]:
        """Takes the step of a logical batch and returns what was seen of each physical one."""
        update = self._read()
        checked, in_one = self._self_check.over, len(batch.sizes) == 1 and self._in_one_as_a_rule
        # A whole step's graph is made as soon as the optimizer has state; one of the passes alone isn't needed.
        eagerly = not checked or (in_one and update == NOT_YET)
        seen = []
        for examples in batch.physical():
            self._steps.prepare(loss_fn, examples)
            if checked and in_one and isinstance(update, Update):
                found = self.graphs.find(loss_fn, examples, update, self._buffer(update))
                if found is not None:
                    return self._take_whole(*found, update, loss_fn, examples)
            seen += self._steps.in_pieces(self._steps.clip if eagerly else self._clip_compiled, loss_fn, examples)
        if not (checked and isinstance(update, Update) and self._update(update)):
            self._update_eagerly()
        return seen

    def _clip_compiled(self, loss_fn: LossFunction, examples: Any) -> ClippingResult:
        """`LogicalStep.clip`, by a graph of forward and passes."""

        def clip(add: Add) -> ClippingResult:
            self._clipper.passes.index.watch()
            found, sums = self._clipper.clip_compiled(loss_fn, examples)
            for owner, total in sums:
                add((owner, None), total)
            return found

        result = self._steps.gather(clip)
        if result.losses is not None:
            self._steps.check_count(result.losses)
        return result

    def _read(self) -> Update | str:
        """The optimizer's next step, or why it is left to the optimizer."""
        if is_distributed():
            update: Update | str = "several processes train together"
        elif not self._draws_ahead:
            update = "its noise can't be had before the sums are there"
        else:
            update = self._reader.read()
        if isinstance(update, str) and update not in (NOT_YET, self._refused):
            self._refused = update
            self._clip.refuse(f"the update: {update}")
        return update

    def _take_whole(
        self, plan: GraphPlan, asked: CompileRequest, update: Update, loss_fn: LossFunction, examples: Any
    ) -> list[ClippingResult]:
        """One graph from the forward to the update; at first the eager step, and the graph's on copies beside it."""
        keep = self._clip.keep_rows(asked)

        def clip() -> list[ClippingResult]:
            return self._steps.in_pieces(self._steps.clip, loss_fn, examples)

        if plan.trial.left:
            states = random_states()
            seen, clipping = timed(clip)
            # Padding shifts which random number is whose, so that only whole batches of a random model are compared.
            comparable = asked.examples == asked.key[0] or random_states() == states

            def run(written: list[Tensor], noise: Tensor, numbers: Tensor) -> bool:
                return plan.run(asked, written, [keep, noise, numbers]) is not None

            if (reason := self._try(plan, update, clipping, comparable, run, states)) is not None:
                self.graphs.refuse(plan, reason, asked)
            return seen
        held = self._release.check(missing=1)
        sensitivity = self._release.sensitivity
        self._release.spend()
        noise, numbers = self._draw(update)
        found = plan.run(asked, update.written, [keep, noise, numbers])
        if found is None:
            # Charged already, and with the noise that was drawn: an example that isn't finite is left out eagerly.
            seen = clip()
            self._release.put_in_place(held, self._private_with(noise))
            self._update_eagerly()
            return seen
        self._took_place(update)
        return [ClippingResult(found.norms, found.weights, sensitivity, found.losses)]

    def _update(self, update: Update) -> bool:
        """Noise and update of what was gathered as one graph, or its trial; False: that is left to the optimizer."""
        self._release.check()
        sums = self._release.sums.of(update.parameters)
        plan = self.graphs.find_release(update, sums, self._buffer(update))
        if plan is None:
            return False
        region = plan.region

        def run(written: list[Tensor], noise: Tensor, numbers: Tensor) -> bool:
            assert region is not None
            region(*written, *sums, noise, numbers)
            return True

        if plan.trial.left:
            if (reason := self._try(plan, update, 0.0, True, run)) is not None:
                self.graphs.refuse(plan, reason)
            return True
        self._release.spend()
        run(update.written, *self._draw(update))
        self._took_place(update)
        self._optimizer.zero_grad()
        return True

    def _took_place(self, update: Update) -> None:
        """Ends the logical batch, whose step a graph took."""
        self._release.updated()
        update.took_place()

    def _update_eagerly(self) -> None:
        """The optimizer's own step, with the noise that is in place or still to be drawn."""
        self._release.update()
        self._optimizer.zero_grad()

    def _try(
        self,
        plan: GraphPlan,
        update: Update,
        clipping: float,
        comparable: bool,
        run: Callable[[list[Tensor], Tensor, Tensor], bool],
        states: tuple[Any, ...] | None = None,
    ) -> str | None:
        """The optimizer's own step with what was gathered, and beside it ``run``; says why the graph is to be refused.

        Args:
            plan: of the graph.
            update: the optimizer's step.
            clipping: seconds that were taken before, and are part of the graph.
            comparable: whether both must come to the same.
            run: (what is written, noise, numbers) -> whether the step was taken.
            states: from which it draws the random numbers that the passes drew.
        """
        held = self._release.check()
        self._release.spend()
        noise, numbers = self._draw(update)
        copies, failure = plan.trial.copy(update.written), None
        try:
            with torch.no_grad(), nullcontext() if states is None else drawing_from(states):
                taken, compiled = timed(lambda: run(copies, noise, numbers))
        except Exception as problem:
            taken, compiled, failure = False, float("inf"), in_a_line(problem)
        count = len(update.parameters)
        moved = [movement(copies[part], update.written[part]) for part in (slice(count), slice(count, None))]
        self._release.put_in_place(held, self._private_with(noise))
        _, updating = timed(self._update_eagerly)
        error = 0.0
        if taken and comparable:
            linear = all(rule.linear for rule in update.rules)
            error = max(
                drift(copies[:count], update.written[:count], moved[0], amplified=not linear),
                drift(copies[count:], update.written[count:], moved[1]),
            )
        reason = failure or plan.trial.note(compiled, clipping + updating, error, noise.dtype)
        if reason is not None or not plan.trial.left:
            plan.trial.copies = []
        return reason

    def _draw(self, update: Update) -> tuple[Tensor, Tensor]:
        """The noise of a step that is charged, and the update's numbers."""
        self._release.fill_with_noise(noise := self._buffer(update))
        return noise, update.numbers(self._release.terms.batch_size)

    def _buffer(self, update: Update) -> Tensor:
        """Memory for the noise, the same at every step."""
        size, like = update.size, update.parameters[0]
        if self._noise.shape[0] != size or self._noise.dtype != like.dtype or self._noise.device != like.device:
            self._noise = torch.empty(size, dtype=like.dtype, device=like.device)
        return self._noise

    def _private_with(self, noise: Tensor) -> Callable[[list[nn.Parameter], list[Tensor]], list[Tensor]]:
        """A function that divides sums and adds the ``noise`` [n] that was drawn for them."""

        def make_private(parameters: list[nn.Parameter], sums: list[Tensor]) -> list[Tensor]:
            parts = noise.split([total.numel() for total in sums])
            share = 1.0 / self._release.terms.batch_size
            return [torch.add(part.view_as(total), total, alpha=share) for total, part in zip(sums, parts, strict=True)]

        return make_private
