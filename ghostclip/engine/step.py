"""One step: clip the physical batches of a logical batch, add up their sums, release the noisy gradient, update."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.loss import _Loss

from ghostclip.clipper import ClippingResult
from ghostclip.clipper.second_pass import Add
from ghostclip.clipping.weighing import may_weigh_jointly, refuse_joint_weights
from ghostclip.engine.compiled_steps import CompiledSteps, LossFunction
from ghostclip.engine.micro_batching import clip_with_retry
from ghostclip.engine.release import Release
from ghostclip.errors import LossShapeError, PrivacyError, RowsMovedError, UnsupportedModelError
from ghostclip.sampling import LogicalBatch, UserRows
from ghostclip.self_check import LoadedRows
from ghostclip.traces import StepTrace

__all__ = ["BatchIndexOf", "LogicalStep", "LossFunction", "StepRecord"]

# Physical batch -> what `GhostClipper.backward` takes as ``batch_index``.
BatchIndexOf = Callable[[Any], Any] | None

TRACED_AND_COMPILED = (
    "trace() and compile() don't go together: a compiled step has its sums inside of its graph; leave one of them out"
)
OF_INDEX = "batch_index says whose rows are in the whole of it"
OF_USERS = (
    "with unit_ids, a user's rows lie side by side in the batch, and a layer over [positions x rows, features] parts "
    "them: give it [positions, rows, features] with batch_dim=1, or [rows x positions, features]"
)


class LogicalStep:
    """Clips the physical batches of each logical batch and adds up their sums. `Release` adds the noise to the total.

    Attributes:
        release: as given: checks, charge, noise and update.
        updates, micro_batches: its own.
    """

    def __init__(self, release: Release) -> None:
        self.release, self.updates, self.micro_batches = release, release.updates, release.micro_batches
        self._clipper, self._optimizer, self._model = release.clipper, release.optimizer, release.clipper.model
        self._sums, self._self_check, self._scaling = release.sums, release.self_check, release.scaling
        # As a `BatchOwner`.
        self.ready, self.begin = release.ready, release.begin
        self._compiled: CompiledSteps | None = None
        # Of ragged examples; and what it gave for the current physical batch.
        self._index_of: BatchIndexOf = None
        self._batch_index: Any = None
        # The physical batch that was handed out last, or the piece of it that is clipped now.
        self._now = _Rows(0, 0, None)
        self._weighs_jointly = may_weigh_jointly(self._clipper.clipping)

    def left(self, batch: LogicalBatch) -> None:
        """A logical batch was left before its last physical one: its sums are discarded, its step will be refused."""
        if batch is self.release.batch:
            self.release.discard()

    def abandon(self, failure: BaseException) -> None:
        """Ends the logical batch after a failure wherever in its step: nothing stands in the way of the next one."""
        if isinstance(failure, Exception):
            self.release.tell(failure)
        self.begin(None)
        if self._sums.is_released():
            self._sums.drop_gradients()

    def discard(self, batch: LogicalBatch | None) -> None:
        """Ends the logical batch without a release, and charges it; None: whichever had no step."""
        if batch is not None and (batch.stepped or self.release.batch not in (None, batch)):
            raise PrivacyError(
                "batch.discard() is for the logical batch that engine.batches() gave last, before its step; this one "
                f"{'had its step' if batch.stepped else 'was over before'}"
            )
        if self.release.batch is not None:
            try:
                self.release.start(discarded=True)
                self.release.charge(self.release.terms)
            finally:
                self.begin(None)
                self.release.pending = False

    def detach(self) -> None:
        """Discards what was gathered and takes the hooks off the optimizer."""
        self.begin(None)
        self.trace(None)
        self.release.detach()

    def trace(
        self, path: str | os.PathLike[str] | None, every: int = 1, steps: Callable[[], int] = int
    ) -> StepTrace | None:
        """Ends the trace there is, and begins one where ``path`` says; see `PrivacyEngine.trace` and `StepTrace`."""
        if path is not None and self._compiled is not None:
            raise ValueError(TRACED_AND_COMPILED)
        if path is not None and self._clipper.sharding.sharded:
            raise ValueError("trace() and fully_shard don't go together: no rank has whole sums; leave one of them out")
        if self.release.trace is not None:
            self.release.trace.close()
        self.release.trace = None if path is None else StepTrace(path, every, self._clipper.passes, steps)
        return self.release.trace

    def compile(self, largest: int | None) -> None:
        """Lets `step` compile, for physical batches of at most ``largest`` examples."""
        if self.release.trace is not None:
            raise ValueError(TRACED_AND_COMPILED)
        self._clipper.compile(expected=self.release.terms.batch_size, largest=largest)
        self._compiled = CompiledSteps(self, self._clipper, self._optimizer, self._self_check)

    def check_between(self, caller: str) -> None:
        """Raises PrivacyError when a logical batch is half done; else the model has the optimizer's own parameters."""
        if self._sums.count:
            raise PrivacyError(
                f"{caller} was called inside of a logical batch, with private sums of {self._sums.count} of its "
                "physical batches gathered, which may not be stored; call it after optimizer.step() or batch.discard()"
            )
        self._clipper.sharding.reshard_between_batches(caller)

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
                if batch.stepped
                else "engine.step() got another logical batch than engine.batches() gave last; use each in its turn"
            )
        _check_loss_function(loss_fn)
        if batch_index is not None:
            _check_batch_index(
                batch_index,
                {
                    "compile()": self._compiled is not None,
                    "unit_ids": any(users is not None for users in batch.users),
                    'max_physical_batch_size="auto"': self.micro_batches.is_open,
                },
            )
        self._index_of, self._batch_index = batch_index, None
        self.release.start(discarded=False)

    def step(self, batch: LogicalBatch, loss_fn: LossFunction) -> list[ClippingResult]:
        """Clips all physical batches, steps the optimizer, ``zero_grad()``; compiled where that was asked for."""
        if self._compiled is not None:
            return self._compiled.step(batch, loss_fn)
        seen = []
        for examples in batch.physical():
            self.prepare(loss_fn, examples)
            seen += self.in_pieces(self.clip, loss_fn, examples)
        self.release.update()
        self._optimizer.zero_grad()
        return seen

    def prepare(self, loss_fn: LossFunction, examples: Any) -> None:
        """Before the passes of a physical batch: how many examples fit, and whether their losses depend on others."""
        self.check_turn()
        now, batch = self._now, self.release.batch
        assert batch is not None
        if self._index_of is not None:
            self._batch_index = self._index_of(examples)
        elif self.micro_batches.is_open:
            self.micro_batches.find(self._clipper, self._optimizer, loss_fn, examples, now.rows)
        places, each = batch.rows[batch.handed - 1], now.rows // now.units if now.units else 1
        rows = LoadedRows(batch.dataset, batch.collate, places, batch.passed, each)
        self._self_check.before(
            loss_fn, examples, rows, batch, most=self.micro_batches.most, ragged=self._batch_index is not None
        )

    def in_pieces(
        self, clip: Callable[[LossFunction, Any], ClippingResult], loss_fn: LossFunction, examples: Any
    ) -> list[ClippingResult]:
        """``clip`` of the physical batch that was handed out last, in pieces that fit into memory."""
        whole = self._now
        if self._batch_index is not None:
            return [self.micro_batches.run_whole(lambda: clip(loss_fn, examples), whole.units, OF_INDEX)]

        def work(piece: Any, start: int, stop: int) -> ClippingResult:
            self._now = whole.piece(start, stop)
            return clip(loss_fn, piece)

        try:
            return self.micro_batches.run(work, examples, whole.units, whole.rows)
        finally:
            self._now = whole

    def clip(self, loss_fn: LossFunction, examples: Any) -> ClippingResult:
        """Forward and both passes of the physical batch (or piece of one) that `prepare` has seen."""
        return clip_with_retry(
            self._clipper.passes, self._model, loss_fn, examples, self._gather_losses, self._now.rows
        )

    def backward(self, losses: Tensor, batch_index: Any, retain_graph: bool) -> ClippingResult:
        """Gathers the clipped sum of the physical batch that was handed out last; see `PrivacyEngine.backward`."""
        try:
            self.check_turn()
            self.micro_batches.check_found()
            self._batch_index = batch_index
            self._self_check.cannot_compare()
            return self._gather_losses(self._scaling.unscaled(losses), retain_graph)
        except BaseException:
            self.release.failed()
            raise

    def _gather_losses(self, losses: Tensor, retain_graph: bool = False) -> ClippingResult:
        passes, users = self._clipper.passes, self._now.users
        self.check_count(losses)
        if users is not None:
            losses = users.add_up(losses)

        def clip(add: Add) -> ClippingResult:
            passes.index.watch()
            if self.release.trace is not None:
                self.release.trace.observe(losses)
            norms, weights = passes.clip(losses, add, retain_graph=retain_graph)
            return ClippingResult(norms, weights, self._clipper.sensitivity, losses.detach())

        try:
            with self._clipper.indexed(self._batch_index, losses):
                self._self_check.backward(losses)
                try:
                    return self.gather(clip)
                except RowsMovedError as error:
                    if not error.graph_stays:
                        raise
                return self.gather(clip)
        except UnsupportedModelError as error:
            raise error if users is None else UnsupportedModelError(f"{error}; {OF_USERS}") from error

    def gather(self, clip: Callable[[Add], ClippingResult]) -> ClippingResult:
        """Gathers the sums that ``clip`` hands over of the current physical batch, or piece of one."""

        def clipped(add: Add) -> ClippingResult:
            result = clip(add)
            if self._weighs_jointly:
                refuse_joint_weights(self._clipper.clipping, self._clipper.passes.scaled(result.norms))
            # Before the sums count as gathered, lest an interruption part them from their noise.
            self.release.sensitivity = max(self.release.sensitivity, result.sensitivity)
            return result

        result = self._sums.gather(clipped, more=self._now.more)
        self.release.saw(result)
        self.release.current("engine.backward()").failed = False
        return result

    def check_turn(self) -> None:
        """Raises PrivacyError unless the physical batch that was handed out last is the next to be gathered."""
        batch = self.release.current("engine.backward()")
        self._clipper.check_whole()
        if batch.handed != self._sums.count + 1:
            raise PrivacyError(
                f"engine.backward() ran for {self._sums.count} of the {batch.handed} physical batches handed out so "
                "far, so this call is not the one that the last of them needs; call it exactly once in each turn of "
                "`for examples in batch.physical()` (add up several losses of one example first)"
            )
        self.updates.check_written()
        rows, users = batch.sizes[batch.handed - 1], batch.users[batch.handed - 1]
        self._now = _Rows(rows, rows if users is None else users.users, users)

    def check_count(self, losses: Tensor) -> None:
        """Raises LossShapeError unless there is a loss for each example of the physical batch, as large as it is."""
        self._scaling.refuse_scaled(losses)
        expected = self._now.rows
        if isinstance(losses, Tensor) and losses.dim() == 1 and losses.shape[0] != expected:
            raise LossShapeError(
                f"losses must have one entry for each of the {expected} examples of this physical batch; got "
                f"{losses.shape[0]}. Average or add up several losses of one example, and give examples that are left "
                "out a loss of zero"
            )


class _Rows(NamedTuple):
    """What is known of a physical batch, or a piece of one: its rows, its examples or users, and whose rows they are.

    ``users`` are None where every row is a unit of its own; ``more``: another piece of the same physical batch follows.
    """

    rows: int
    units: int
    users: UserRows | None
    more: bool = False

    def piece(self, start: int, stop: int) -> _Rows:
        """Of the units from ``start`` to before ``stop``."""
        if (start, stop) == (0, self.units):
            return self
        users = None if self.users is None else self.users.part(start, stop)
        return _Rows(self.rows // self.units * (stop - start), stop - start, users, stop < self.units)


def _check_loss_function(loss_fn: Any) -> None:
    """Raises TypeError for what can't be called with (model, examples), as losses or a criterion can't."""
    if not callable(loss_fn) or isinstance(loss_fn, _Loss):
        raise TypeError(
            "loss_fn must be a function of (model, examples) that returns one loss for each example; got "
            f'{type(loss_fn).__name__}. For a criterion with reduction="none": lambda model, batch: '
            "criterion(model(batch[0]), batch[1]); for losses that are computed already: "
            "engine.backward(losses)"
        )
    with contextlib.suppress(ValueError):  # a function in C may have no signature
        signature = inspect.signature(loss_fn)
        try:
            signature.bind(None, None)
        except TypeError as error:
            raise TypeError(f"loss_fn is called as loss_fn(model, examples), which it can't be: {error}") from None


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

    @classmethod
    def of(cls, results: Sequence[ClippingResult]) -> StepRecord:
        """The record of a logical batch from its physical ones, in their order."""
        return cls(
            _joined([result.losses for result in results]),
            _joined([result.norms for result in results]),
            _joined([result.weights for result in results]),
        )


def _joined(parts: list[Any]) -> Any:
    """The physical batches' values one after another: [B], or {group: [B]}."""
    if len(parts) == 1:
        return parts[0]
    if parts and isinstance(parts[0], dict):
        return {group: torch.cat([part[group] for part in parts]) for group in parts[0]}
    return torch.cat(parts) if parts else torch.zeros(0)
