"""One step of DP-SGD, in the order of the algorithm (Abadi et al. 2016, algorithm 1): see `LogicalStep.step`."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ghostclip.clipper import ClippingResult
from ghostclip.clipper.forwards import LossFunction, check_loss_function, forward_of
from ghostclip.clipping.weighing import Weighing, may_weigh_jointly
from ghostclip.engine.micro_batching import Piece
from ghostclip.engine.release import Release
from ghostclip.errors import LossShapeError, PrivacyError, RowsMovedError, UnsupportedModelError
from ghostclip.sampling import BatchState, LogicalBatch
from ghostclip.self_check import SelfCheck
from ghostclip.traces import StepTrace

__all__ = ["BatchIndexOf", "LogicalStep", "LossFunction", "StepRecord"]

# Physical batch -> what `GhostClipper.backward` takes as ``batch_index``.
BatchIndexOf = Callable[[Any], Any] | None

TRACED_AND_COMPILED = (
    "trace() and compile() don't go together: a compiled step has its sums inside of its graph; leave one of them out"
)
OF_USERS = (
    "with unit_ids, a user's rows lie side by side in the batch, and a layer over [positions x rows, features] parts "
    "them: give it [positions, rows, features] with batch_dim=1, or [rows x positions, features]"
)


class LogicalStep:
    """Clips the physical batches of each logical batch and adds up their sums. `Release` adds the noise to the total.

    ``self_check``: whether the first steps are looked at, see `SelfCheck`.
    """

    def __init__(self, release: Release, self_check: bool = True) -> None:
        self.release, self.updates, self.micro_batches = release, release.updates, release.micro_batches
        self._clipper, self._optimizer, self._model = release.clipper, release.optimizer, release.clipper.model
        self._sums, self._scaling = release.sums, release.scaling
        self._self_check = self.self_check = release.self_check = SelfCheck(self._clipper, self._optimizer, self_check)
        policy = self._clipper.clipping
        self._weighing = Weighing(policy) if may_weigh_jointly(policy) else None
        self._used: Callable[[], Tensor | None] = lambda: None  # the losses that `backward` got last
        # As a `BatchOwner`.
        self.ready, self.begin = release.ready, release.begin

    def step(
        self, batch: LogicalBatch, loss_fn: LossFunction, batch_index: BatchIndexOf = None
    ) -> list[ClippingResult]:
        """The step of a logical batch that `start` has checked; returns what was clipped of each physical batch."""
        results = []
        try:
            for examples in batch.physical():
                whole = self._turn(examples, None if batch_index is None else batch_index(examples))
                self.micro_batches.find(self._clipper, self._optimizer, loss_fn, whole)  # once, where it is to be found
                self._self_check.before(loss_fn, whole, batch, self.micro_batches.most)  # in first and in random steps
                for piece in self.micro_batches.pieces(whole):  # one, unless memory runs out
                    with piece:
                        results.append(self._clip(loss_fn, piece))  # losses, norms, weights, clipped sums
            self.release.update()  # charge, noise, optimizer.step()
            self._optimizer.zero_grad()
        except BaseException as failure:
            self.abandon(failure)
            raise
        return results

    def _clip(self, loss_fn: LossFunction, piece: Piece) -> ClippingResult:
        """`_clip_once`, and again where rows don't lie as those of earlier batches, which another forward may show."""
        with suppress(RowsMovedError):
            return self._clip_once(loss_fn, piece)
        return self._clip_once(loss_fn, piece)

    def _clip_once(self, loss_fn: LossFunction, piece: Piece) -> ClippingResult:
        """Forward and both passes of a physical batch, or of a piece of one."""
        if self._clipper.compiled is not None and self._self_check.over:
            return self._clip_compiled(loss_fn, piece)
        with self._clipper.passes.running(forward_of(self._model, loss_fn, piece.examples, piece.rows)):
            losses = loss_fn(self._model, piece.examples)
            self._scaling.refuse_scaled(losses)
            return self._accumulate(losses, piece)

    def _accumulate(self, losses: Tensor, piece: Piece, retain_graph: bool = False) -> ClippingResult:
        """Adds the clipped sum of the gradients behind losses [rows] to the sums of the logical batch."""
        passes, release = self._clipper.passes, self.release
        _check_count(losses, piece)
        if piece.users is not None:
            losses = piece.users.add_up(losses)
        try:
            with self._clipper.with_index(piece.batch_index, losses), self._sums.physical_batch(piece.more) as add:
                self._self_check.backward(losses)
                if release.trace is not None:
                    release.trace.observe(losses)
                norms, weights = passes.clip(losses, add, retain_graph=retain_graph)
                result = ClippingResult(norms, weights, passes.sensitivity, losses.detach())
                self._bound(result)
                piece.done = True
        except UnsupportedModelError as error:
            if piece.users is None or isinstance(error, RowsMovedError):
                raise
            raise UnsupportedModelError(f"{error}; {OF_USERS}") from error
        release.saw(result)
        return result

    def _bound(self, result: ClippingResult) -> None:
        """Records the sensitivity of new sums before they are added: an interruption in between leaves too much noise.

        Raises:
            PrivacyError: it doesn't bound an example's part, since weights depend on other examples.
        """
        if self._weighing is not None:
            self._weighing.check(self._clipper.passes.scaled(result.norms))
        self.release.sensitivity = max(self.release.sensitivity, result.sensitivity)

    def _clip_compiled(self, loss_fn: LossFunction, piece: Piece) -> ClippingResult:
        """The same by one compiled graph of the forward and both passes, used once the self-check is over."""
        with self._sums.physical_batch(piece.more) as add:
            self._clipper.passes.index.watch()
            result, sums = self._clipper.clip_compiled(loss_fn, piece.examples)
            if result.losses is not None:
                _check_count(result.losses, piece)
            for owner, total in sums:
                add((owner, None), total)
            self._bound(result)
            piece.done = True
        self.release.saw(result)
        return result

    def backward(self, losses: Tensor, batch_index: Any, retain_graph: bool) -> ClippingResult:
        """Gathers the clipped sum of the physical batch that was handed out last; see `PrivacyEngine.backward`."""
        try:
            piece = self._turn(None, batch_index)
            if losses is self._used():
                raise PrivacyError(
                    "engine.backward() got the losses of the physical batch before again, so their examples would "
                    "take part twice; compute them from the examples that were handed out last"
                )
            self.micro_batches.check_found("engine.backward()")
            self._self_check.cannot_compare()
            unscaled = self._scaling.unscaled(losses)
            try:
                result = self._accumulate(unscaled, piece, retain_graph)
            except RowsMovedError as error:
                if not error.graph_stays:
                    raise
                result = self._accumulate(unscaled, piece, retain_graph)
            self._used = weakref.ref(losses)
            return result
        except BaseException as failure:
            self.release.failed(failure)
            raise

    def _turn(self, examples: Any, batch_index: Any) -> Piece:
        """The physical batch that was handed out last; raises PrivacyError unless it is the next to be gathered."""
        batch = self.release.current("engine.backward()")
        if batch.handed != self._sums.count + 1:
            raise PrivacyError(
                f"engine.backward() ran for {self._sums.count} of the {batch.handed} physical batches handed out so "
                "far, so this call is not the one that the last of them needs; call it exactly once in each turn of "
                "`for examples in batch.physical()` (add up several losses of one example first)"
            )
        self._clipper.check_whole()
        self.updates.check_written()
        rows, users = batch.sizes[batch.handed - 1], batch.users[batch.handed - 1]
        return Piece(examples, rows, rows if users is None else users.users, users, batch_index)

    def start(self, batch: LogicalBatch, loss_fn: LossFunction, batch_index: BatchIndexOf = None) -> None:
        """Checks the arguments of `PrivacyEngine.step`; all ranks begin it."""
        if not isinstance(batch, LogicalBatch):
            remedy = "are they swapped?" if callable(batch) else (
                "call it once for each batch (not one of a DataLoader of yours), inside of `for batch in "
                "engine.batches()`, or engine.backward(losses) for each physical one"
            )  # fmt: skip
            kind = type(batch).__name__
            raise PrivacyError(f"engine.step() takes a logical batch, then loss_fn; got {kind} first: {remedy}")
        if batch is not self.release.current("engine.step()"):
            raise PrivacyError(
                "engine.step() got a logical batch that had its step; take the next one of engine.batches()"
                if batch.state is BatchState.STEPPED
                else "engine.step() got another logical batch than engine.batches() gave last; use each in its turn"
            )
        check_loss_function(loss_fn, computed="; for losses that are computed already: engine.backward(losses)")
        if batch_index is not None:
            _check_batch_index(
                batch_index,
                {
                    "compile()": self._clipper.compiled is not None,
                    "unit_ids": any(users is not None for users in batch.users),
                    'max_physical_batch_size="auto"': self.micro_batches.is_open,
                },
            )
        self.release.start(discarded=False)

    @property
    def untested_words(self) -> str:
        """What a guarantee has to say of losses that came without a test; "" where they were tested."""
        told = " It holds if no loss depends on other examples of its batch, which was not tested."
        return told if self._self_check.untested else ""

    def left(self, batch: LogicalBatch, problem: Exception | None) -> None:
        """A logical batch was left before its last physical one: its sums are discarded, its step will be refused."""
        if batch is self.release.batch:
            self.release.discard()
            if problem is not None:
                self.release.ranks.report_failure(problem)

    def abandon(self, failure: BaseException) -> None:
        """Ends the logical batch after a failure wherever in its step: nothing stands in the way of the next one."""
        if isinstance(failure, Exception):
            self.release.ranks.report_failure(failure)
        took_place = self.release.state in (BatchState.RELEASED, BatchState.STEPPED)
        self.begin(None)
        if took_place or self._sums.is_released():
            self._sums.drop_gradients()

    def discard(self, batch: LogicalBatch | None) -> None:
        """Ends the logical batch without a release, and charges it; None: whichever had no step."""
        last = self.release.batch
        stepped = batch is not None and batch.state in (BatchState.RELEASED, BatchState.STEPPED)
        if stepped or (batch is not None and last not in (None, batch)):
            raise PrivacyError(
                "batch.discard() is for the logical batch that engine.batches() gave last, before its step; this one "
                f"{'had its step' if stepped else 'was over before'}"
            )
        if last is not None and last.state.is_open:
            try:
                self.release.start(discarded=True)
                self.release.charge(self.release.settings)
                last.state = BatchState.CHARGED
            finally:
                self.release.forget()

    def detach(self) -> None:
        """Discards what was gathered and takes the hooks off the optimizer."""
        self.begin(None)
        self.trace(None)
        self.release.detach()

    def trace(
        self, path: str | os.PathLike[str] | None, every: int = 1, steps: Callable[[], int] = int
    ) -> StepTrace | None:
        """Ends the trace there is, and begins one where ``path`` says; see `PrivacyEngine.trace` and `StepTrace`."""
        if path is not None and self._clipper.compiled is not None:
            raise ValueError(TRACED_AND_COMPILED)
        if path is not None and (self.release.ranks.size > 1 or self._clipper.sharding.sharded):
            raise ValueError("trace() isn't there for several processes that train together, or sharded; leave it out")
        if self.release.trace is not None:
            self.release.trace.close()
        self.release.trace = None if path is None else StepTrace(path, every, self._clipper.passes, steps)
        return self.release.trace

    def compile(self, largest: int | None) -> None:
        """Lets `step` compile, for physical batches of at most ``largest`` examples; raises ValueError if it can't."""
        if self.release.settings.event.unit == "user":
            raise ValueError(
                "compile() and unit_ids don't go together: a compiled step pads batches by rows; leave one of them out"
            )
        if self.release.ranks.size > 1:
            raise ValueError("compile() isn't there for several processes that train together; leave it out")
        if self.release.trace is not None:
            raise ValueError(TRACED_AND_COMPILED)
        self._clipper.compile(expected=self.release.settings.batch_size, largest=largest)

    def check_between(self, caller: str) -> None:
        """Raises PrivacyError when a logical batch is half done; else the model has the optimizer's own parameters."""
        if self._sums.count:
            raise PrivacyError(
                f"{caller} was called inside of a logical batch, with private sums of {self._sums.count} of its "
                "physical batches gathered, which may not be stored; call it after optimizer.step() or batch.discard()"
            )
        self._clipper.sharding.reshard_between_batches(caller)


def _check_count(losses: Tensor, piece: Piece) -> None:
    """Raises LossShapeError unless there is a loss for each row of the physical batch, as large as it is."""
    if isinstance(losses, Tensor) and losses.dim() == 0 and piece.rows == 1:
        raise LossShapeError(
            "the loss of a physical batch of one example must have shape [1], not []: a squeeze() took that dimension, "
            'too; write squeeze(-1) or flatten() (and for losses that are averaged: reduction="none")'
        )
    if isinstance(losses, Tensor) and losses.dim() == 1 and losses.shape[0] != piece.rows:
        raise LossShapeError(
            f"losses must have one entry for each of the {piece.rows} examples of this physical batch; got "
            f"{losses.shape[0]}. Average or add up several losses of one example, and give examples that are left "
            "out a loss of zero"
        )


def _check_batch_index(batch_index: Any, others: Mapping[str, bool]) -> None:
    """Raises TypeError for what can't be called with a physical batch, ValueError for what it doesn't go with."""
    if not callable(batch_index):
        raise TypeError(
            "batch_index must be a function of a physical batch that returns the example of each row; got "
            f"{type(batch_index).__name__}. For graphs of torch_geometric: lambda batch: batch.batch"
        )
    for other, is_used in others.items():
        if is_used:
            raise ValueError(f"batch_index and {other} don't go together; leave one of them out")


@dataclass(frozen=True)
class StepRecord:
    """Losses, norms and weights of one step. They are private data: use them to debug, don't publish them.

    Attributes:
        losses: [B], in the order of the physical batches.
        norms: [B], gradient norms before clipping ({group: [B]} under group-wise clipping).
        weights: [B], the factor each gradient was multiplied with (likewise).
    """

    losses: Tensor
    norms: Any
    weights: Any

    def __repr__(self) -> str:
        """No number: how many examples there are is private, too."""
        return "StepRecord(losses, norms, weights: private data of single examples)"

    @classmethod
    def of(cls, results: Sequence[ClippingResult]) -> StepRecord:
        """The record of a logical batch from its physical ones, in their order."""
        if not results:
            return cls(*map(torch.zeros, (0, 0, 0)))
        first, *others = [(result.losses, result.norms, result.weights) for result in results]
        return cls(*(tree_map(lambda *parts: torch.cat(parts), first, *others) if others else first))
