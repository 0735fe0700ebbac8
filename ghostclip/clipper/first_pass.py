"""First passes over the graphs behind losses, which give norms, and what is remembered of graphs from one to the next.

Clipping stands on these in second_pass.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.clipper.batch_index import read_indices
from ghostclip.clipper.collector import Keep, NormCollector
from ghostclip.clipper.forwards import ModelCalls
from ghostclip.clipper.random_states import random_states
from ghostclip.clipping import Groupwise, Policy
from ghostclip.errors import LossShapeError, StaleInputError, UnsupportedModelError
from ghostclip.graph.alarm import ALARM
from ghostclip.graph.layouts import Layouts
from ghostclip.graph.overwritten import FindForward, OverwrittenForward
from ghostclip.graph.parameter_names import ParameterNames
from ghostclip.graph.reader import backward_to_layers, free_graph, from_gradients, read_graph
from ghostclip.graph.row_layout import RowLayout
from ghostclip.native.custom_ops import is_traced
from ghostclip.nn.base import LayerCall, Sink
from ghostclip.norms.ragged import RowIndex
from ghostclip.norms.reduce import all_finite
from ghostclip.norms.term import may_sync
from ghostclip.planner import Planner, StrategyChoice
from ghostclip.sharding.plain import Sharding

__all__ = ["FirstPasses", "check_losses", "check_shape", "check_type", "translated_errors", "without_autocast"]

# "reweight" may keep materialised gradients up to this share of all pre-activations, and the size of the parameters.
SMALL_SHARE = 0.15
# Where layers are computed again, such gradients may take this share of the whole model's bytes besides.
RECOMPUTED_SHARE = 0.1
# What to do about losses of another type, and about those of single tokens.
REMEDY_OF_KIND = {"NoneType": "is a `return` missing?", "float": 'leave out .item(), and use reduction="none"'}
SQUARE_REMEDY = (
    "give outputs [B, 1] and labels [B] one shape, by outputs[:, 0] for instance, or average each text's token losses"
)
TOKENS_REMEDY = (
    "average over all dimensions but the first, losses.flatten(1).mean(1); for padded texts over each text's own "
    "tokens, (losses * mask).sum(1) / mask.sum(1)"
)


class FirstPasses:
    """Finds the norms behind losses of one model and, where asked, what their clipped sums are formed of.

    Args:
        model: wrapped.
        sharding: of its parameters.
        clipping: the policy; groups and their thresholds come from it.
        second_pass: "auto", "cached" or "reweight".
        planner: chooses the way to each squared norm.
        memory_budget: bytes "cached" may keep, or None.
        loss_scale: a power of two; the passes see losses this many times as large.

    Attributes:
        index: the model's names.
        parameters: {id: Parameter} of those that required a gradient at the last pass.
        scale: what losses are multiplied with before the passes, and results divided by.
        choices: what the planner chose for the last batch it was asked for, by id of parameter; None before one.
        sharding: as given.
        forward: runs the step's forward again on other examples, for a batch whose layout isn't known; None where
            nothing can.
        calls: of the model, to be run again where no loss function is known.
        must_measure: whether ownership is measured in the next batch, whatever is known.
        is_open: whether the last batch's layout isn't stored, so that the next one like it will be measured.
    """

    def __init__(
        self,
        model: nn.Module,
        sharding: Sharding,
        clipping: Policy | Groupwise,
        second_pass: str,
        planner: Planner,
        memory_budget: int | None,
        loss_scale: float = 1.0,
    ) -> None:
        self.sharding, self.clipping, self._second_pass, self._planner = sharding, clipping, second_pass, planner
        self._memory_budget, self.scale = memory_budget, loss_scale
        self.index = ParameterNames(model)
        self.choices: Mapping[int, StrategyChoice] | None = None
        self.forward: OverwrittenForward | None = None
        self.calls: ModelCalls | None = None
        self.is_open = self.must_measure = False
        self.parameters: dict[int, nn.Parameter] = {}
        self._layouts = Layouts(sharding.keep_resident)
        self._indices = list[RowIndex]()
        self._partition: dict[str, str] = {}
        self.group_of()

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """(name, Parameter) of those that require a gradient now, which are those that sums are formed of."""
        trained = self.index.trained()
        self.parameters.clear()
        for _, parameter in trained:
            self.parameters[id(parameter)] = parameter
        return trained

    def first_pass(
        self, losses: Tensor, keep: Keep = Keep.NOTHING, *, retain_graph: bool, exact: bool = False
    ) -> NormCollector:
        """A backward from ``losses`` [B] to the pre-activations; raises what `GhostClipper.norms` raises.

        Where it brings a gradient to where there were zeros when ownership was measured, the batch is measured, and the
        pass is made again: nothing is clipped by rows of which it isn't known whose they are.

        Args:
            losses: [B].
            keep: which gradients are kept.
            retain_graph: as torch's. The graph also stays where a second backward may follow.
            exact: use no form of a norm that may cancel, and wait for a GPU where that takes it.
        """
        losses = self._scaled(losses)
        # What isn't clipped isn't watched by marks, either.
        anew = (keep is not Keep.CHOSEN or self.must_measure) and not is_traced()
        found = self._pass(losses, keep, exact, retain_graph, anew)
        if found is None:
            found = self._pass(losses, keep, exact, retain_graph, anew=True)
        assert found is not None
        if self.calls is not None:
            self.calls.begin()
        self.must_measure = False
        return found

    def _scaled(self, losses: Tensor) -> Tensor:
        """The losses as the passes see them; raises what `check_losses` raises."""
        check_losses(losses, self.scale)
        return losses if self.scale == 1.0 else losses * self.scale

    def _pass(self, losses: Tensor, keep: Keep, exact: bool, retain_graph: bool, anew: bool) -> NormCollector | None:
        """One such backward; None, and the graph is still there, where a gradient came that had been zero.

        Args:
            losses, keep, exact, retain_graph: as `first_pass` has them.
            anew: measure ownership, whatever is known.
        """
        with translated_errors(), without_autocast(losses), self.sharding.unsharded_parameters():
            uses = read_graph(losses, self.index, None if self.calls is None else self.calls.hooked)
            trained = self.trained()
            # What checkpointing computes again in order not to keep it isn't held here, either.
            recomputed = any(map(attrgetter("has_saved_tensor_hooks"), uses.calls))
            layout = self._layouts.lay_out(
                losses, uses, self.index, forward=self._forward(losses), indices=self._indices, anew=anew,
                hold=not recomputed and self._keep_of(keep, uses.calls) is Keep.ALL,
            )  # fmt: skip
            self.is_open = not layout.stored
            chosen, keep = keep is Keep.CHOSEN, self._keep_of(keep, layout.calls)
            small = keep is Keep.SMALL
            marks = self._marks(losses, layout, uses.structure) if chosen else None
            collector = NormCollector(
                losses, layout, self._planner, trained, self.scale if marks is None else self.scale * marks,
                keep=keep, room=self._room(layout.calls, recomputed) if small or recomputed else 0, exact=exact,
            )  # fmt: skip
            collector.structure, collector.marks = uses.structure, marks
            collector.random_states = random_states() if recomputed and not is_traced() else None
            collector.holds_graph = retain_graph or (chosen and (small or bool(collector.not_kept)))
            if marks is not None and small:
                collector.note_rows()
            if not self._run(collector):
                return None
        self.choices = collector.choices
        return collector

    def _marks(self, losses: Tensor, layout: RowLayout, structure: int) -> Tensor | None:
        """Marks [B] for the pass of a batch that the alarm watches; None where all is known, or chance says no."""
        # A batch under float16 autocast may be laid out as one under bfloat16 was, whose graph is the same.
        half = layout.half or torch.float16 in map(attrgetter("dtype"), layout.calls)
        known = layout.measured or half or is_traced() or len(losses) < 2
        return None if known or not self._layouts.draws_watched(structure) else ALARM.drawn(losses)

    def _run(self, collector: NormCollector) -> bool:
        """Hands the collector what it is to receive; False, and the graph is there, where a zero has become another."""
        losses, layout, holds = collector.losses, collector.layout, collector.holds_graph
        check, held = layout.check, layout.gradients
        sink: Sink = collector.receive if check is None else check.watched(collector.receive)
        stays = holds or check is not None
        if held is not None:
            from_gradients(losses, layout.calls, sink, held)
        else:
            edges = () if check is None else check.edges
            grads = backward_to_layers(losses, layout.calls, sink, collector.marks, retain_graph=stays, edges=edges)
            found_nonzero = None if check is None else check.found_nonzero(grads)
            if is_traced():
                collector.found_nonzero = found_nonzero
            elif found_nonzero is not None and bool(found_nonzero):
                return False
        if not holds and (held is not None or stays):
            free_graph(losses, layout.calls)
        return True

    def _forward(self, losses: Tensor) -> FindForward:
        """Finds what runs the forward behind the losses again."""
        return lambda: self.forward or (None if self.calls is None else self.calls.behind(losses))

    def _keep_of(self, keep: Keep, calls: Sequence[LayerCall]) -> Keep:
        """What is kept of these uses of layers, by the second pass that was asked for and the memory budget."""
        if keep is Keep.CHOSEN:
            keep = Keep.SMALL if self._second_pass == "reweight" else Keep.ALL
        if keep is Keep.ALL and self._memory_budget is not None and bytes_to_keep(calls) > self._memory_budget:
            return Keep.SMALL
        return keep

    def _room(self, calls: Sequence[LayerCall], recomputed: bool) -> int:
        """Bytes that materialised gradients may take in the place of a second backward."""
        room = int(SMALL_SHARE * sum([call.nbytes for call in calls]))
        room += sum([parameter.nbytes for parameter in self.parameters.values()])
        if recomputed:
            room += int(RECOMPUTED_SHARE * self.index.nbytes)
        return room if self._memory_budget is None else min(room, self._memory_budget)

    def norms_pass(self, losses: Tensor, keep: Keep = Keep.NOTHING, *, retain_graph: bool) -> NormCollector:
        """A first pass for norms; on a GPU once more, exactly, where a norm is not finite."""
        once = not isinstance(losses, Tensor) or may_sync(losses.device)
        run = self.first_pass(losses, keep, retain_graph=retain_graph or not once)
        if not once:
            if not all_finite(run.norms()):
                run = self.first_pass(losses, keep, retain_graph=True, exact=True)
            if not retain_graph:
                with translated_errors():
                    free_graph(losses, run.calls)
        return run

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """What is measured of graphs meanwhile, of batches made up of few examples or copies, is forgotten after it."""
        known, self._layouts = self._layouts, Layouts(self.sharding.keep_resident)
        try:
            yield
        finally:
            self._layouts = known

    @contextmanager
    def running(self, forward: OverwrittenForward | None) -> Iterator[None]:
        """Inside, the forward behind the losses can be run again by ``forward``."""
        before, self.forward = self.forward, forward
        if self.calls is not None:
            self.calls.noting = forward is None
        try:
            yield
        finally:
            self.forward = before
            if self.calls is not None:
                self.calls.noting = before is None

    @contextmanager
    def with_index(self, batch_index: Any, losses: Tensor) -> Iterator[None]:
        """Inside, rows of layers belong to the examples of ``losses`` [B] by indices.

        Raises what `check_losses` and `read_indices` raise.
        """
        check_losses(losses, self.scale)
        self._indices = read_indices(batch_index, losses)
        try:
            yield
        finally:
            self._indices = []

    def group_of(self) -> dict[int, str]:
        """{id of a trained parameter: its group} under a group-wise policy; {} under another."""
        if not isinstance(self.clipping, Groupwise):
            return {}
        trained = self.index.trained()
        if [name for name, _ in trained] != list(self._partition):
            self._partition = self.clipping.partition({name: parameter.numel() for name, parameter in trained})
        return {id(parameter): self._partition[name] for name, parameter in trained}


def check_losses(losses: Tensor, scale: float) -> None:
    """Raises LossShapeError or StaleInputError unless ``losses`` are one number per example, attached to a graph."""
    check_type(losses)
    check_shape(losses)
    if not losses.dtype.is_floating_point:
        raise LossShapeError(f"losses must be floating point numbers; got {losses.dtype}")
    if scale > torch.finfo(losses.dtype).max:
        raise LossShapeError(
            f"losses of {losses.dtype} can't be multiplied with loss_scale={scale:g}; compute them in float32 (from "
            "output.float()), or take a smaller loss_scale"
        )
    if not losses.requires_grad:
        raise StaleInputError(
            "the losses are not attached to a graph: they were detached or computed under no_grad, or nothing in the "
            "model is trained; compute them from the model's output with gradients on"
        )
    if losses.grad_fn is None:
        raise LossShapeError(
            "the losses are a parameter, or another tensor that nothing computed; compute them from the batch by the "
            "model, one per example"
        )


def check_type(losses: Any) -> None:
    """Raises LossShapeError unless ``losses`` are a tensor."""
    if not isinstance(losses, Tensor):
        kind = type(losses).__name__
        remedy = REMEDY_OF_KIND.get(kind, "return a tensor")
        raise LossShapeError(f"losses must be a tensor of shape [B], one per example; got {kind}: {remedy}")


def check_shape(losses: Tensor) -> None:
    """Raises LossShapeError unless ``losses`` have one dimension."""
    if losses.dim() == 1:
        return
    shape = list(losses.shape)
    if not shape:
        remedy = 'compute them with reduction="none"'
    elif shape[1:] == [1]:
        remedy = "take [:, 0] of them"
    else:
        remedy = SQUARE_REMEDY if shape[1:] == shape[:1] else TOKENS_REMEDY
    raise LossShapeError(f"losses must have shape exactly [B], one per example, not {shape}; {remedy}")


def without_autocast(losses: Tensor) -> AbstractContextManager[Any]:
    """Norms and sums are not computed in narrow types where only the forward was meant to be."""
    kind = losses.device.type if isinstance(losses, Tensor) else "cpu"
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def bytes_to_keep(calls: Sequence[LayerCall]) -> int:
    """Estimate of what `Keep.ALL` takes beside inputs: of each call the smaller of both kinds of gradients."""
    found = 0
    for call in calls:
        own: Mapping[str, Any] = call.owners
        materialised = call.shape[call.batch_dim] * sum([own[name].nbytes for name in call.parameters])
        found += min(call.nbytes, materialised)
    return found


class translated_errors(AbstractContextManager[Any]):
    """A context that raises our errors for torch's about changed or freed tensors and missing second derivatives."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *where: Any) -> None:
        if not isinstance(error, RuntimeError):
            return
        text = str(error)
        if "modified by an inplace operation" in text:
            raise StaleInputError(
                "a tensor that the per-example gradients need was modified in place after a layer had used it; "
                f"clone it before the change. torch says: {text.splitlines()[0]}"
            ) from error
        if "backward through the graph a second time" in text or "freed" in text:
            raise StaleInputError(
                "the graph of these losses was freed by an earlier norms(), backward() or .backward(); run the forward "
                "again, or pass retain_graph=True to the earlier call"
            ) from error
        if "derivative for" in text and "not implemented" in text:
            raise UnsupportedModelError(
                "the losses contain a gradient that went through an operation which torch can't differentiate twice; "
                "leave the gradient out of the losses, or replace the operation (attention has second derivatives "
                f"under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)). torch says: {text.splitlines()[0]}"
            ) from error
