"""First passes over the graphs behind losses, which give norms, and what is remembered of graphs from one to the next.

Clipping stands on these in two_passes.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.aside import Aside
from ghostclip.at_once import AtOnce
from ghostclip.by_parts import collect
from ghostclip.clipping import Groupwise, Policy, Thresholds
from ghostclip.errors import LossShapeError, StaleInputError, UnsupportedModelError
from ghostclip.gradients import have_hooks, is_distributed
from ghostclip.graph import captured_calls, let_go
from ghostclip.groupwise import POSTPONED_BYTES, GroupSums
from ghostclip.index import ModelIndex
from ghostclip.narrowing import Narrowing, narrowing_of
from ghostclip.nn.base import Call, Repeat
from ghostclip.nn.fallback import Outside
from ghostclip.norms.term import is_traced
from ghostclip.outcome import FirstPass, norm_dtype
from ghostclip.passes import Collector
from ghostclip.planner import Choice, Planner
from ghostclip.regroup import Grouping
from ghostclip.tail import Tail, tail_of
from ghostclip.torch_errors import in_our_words

__all__ = ["FirstPasses", "check_losses", "owners_of", "without_autocast"]

# Batches of so many shapes are remembered.
MOST_SHAPES = 1000


class FirstPasses:
    """Finds the norms behind losses of one model and, where asked, what their clipped sums are formed of.

    Args:
        model: wrapped.
        clipping: the policy; groups and their thresholds come from it.
        second_pass: "reweight" or "cached".
        planner: chooses the way to each squared norm.
        memory_budget: bytes "cached" may keep, or None.
        loss_scale: a power of two; the passes see losses this many times as large.

    Attributes:
        index: the model's names.
        scale: what losses are multiplied with before the passes, and results divided by.
        choices: what the planner chose for the last batch it was asked for, by id of parameter; None before one.
        is_open: whether one of the last batch's layers isn't proved, which no gradient has reached so far.
        reduced_apart: whether sums of several processes are added up apart from any backward: nobody waits for one.
    """

    def __init__(
        self,
        model: nn.Module,
        clipping: Policy | Groupwise,
        second_pass: str,
        planner: Planner,
        memory_budget: int | None,
        loss_scale: float = 1.0,
    ) -> None:
        self.clipping, self.cached, self._planner = clipping, second_pass == "cached", planner
        self._memory_budget, self.scale = memory_budget, loss_scale
        self.index = ModelIndex(model)
        self.choices: Mapping[int, Choice] | None = None
        self.is_open = False
        self.reduced_apart = False
        self._parameters: dict[int, nn.Parameter] = {}
        self._grouping = Grouping()
        self._at_once = AtOnce(self.index, self._grouping, clipping)
        # Shapes of pre-activations whose terms are small in all.
        self._small: set[tuple[torch.Size, ...]] = set()
        # The same for graphs whose every parameter could be set aside, and how small it had to be.
        self._set_aside: set[tuple[Any, ...]] = set()
        self._names: list[str] | None = None
        self._groups: dict[str, str] = {}
        self.partition()

    def first_pass(self, losses: Tensor, **options: Any) -> FirstPass:
        """A backward from ``losses`` [B] to the pre-activations; raises what `GhostClipper.norms` raises.

        Where it brings the first gradient to a layer that isn't proved, the proof is made on this batch, and the pass
        again: nothing is clipped by rows of which it isn't known whose they are.

        Args:
            losses: [B].
            options: as `_pass` has them.
        """
        check_losses(losses, self.scale)
        return self._pass(losses, **options) or self._pass(losses, reached=True, **options)  # type: ignore[return-value]

    def _pass(
        self,
        losses: Tensor,
        *,
        keep: bool,
        retain_graph: bool,
        materialise: bool = False,
        aside: Aside | None = None,
        again: bool = False,
        ignore_budget: bool = False,
        groups: GroupSums | None = None,
        repeat: Repeat | None = None,
        margin: bool = True,
        postponed: bool = False,
        reached: bool = False,
    ) -> FirstPass | None:
        """One such backward; None, and the graph is still there, where it reached a layer that isn't proved.

        Args:
            keep: hold terms for a clipped sum.
            retain_graph: as torch's.
            materialise: hold per-example gradients, and no norms.
            aside: hold what is so small, for a second backward without it; where that was all there is, none follows.
            again: keep the graph for another backward, should one follow.
            ignore_budget: hold terms whatever they take.
            groups: takes the terms, to clip them group by group.
            repeat: this is the first of two passes.
            margin: the rounding margin of the norms can be had, for weights (`ghostclip.norms.rounding`).
            postponed: norms that need a look at values become NaN; `measure_again`, or another pass, has them.
            reached: an earlier pass over the graph was given up, for a gradient that reached what wasn't proved.
        """
        losses = losses if self.scale == 1.0 else losses * self.scale
        with in_our_words(), without_autocast(losses):
            uses = captured_calls(losses, self.index)
            trained = self.index.trained()
            self._parameters = {id(parameter): parameter for _, parameter in trained}
            tail = None if uses.leaves or (keep and groups is None) else tail_of(losses, uses.calls)
            layout = self._grouping.prove(losses, uses, self.index, tail=tail, reached=reached)
            calls, majors, watched = layout.calls, layout.majors, layout.watched
            self.is_open = not layout.proved
            if watched and is_traced():
                raise UnsupportedModelError(f"no gradient has reached {self.index.layer(watched[0])} yet")
            # What is computed again in order not to be kept is not kept here, either.
            partly = self.cached and keep and groups is None and not (ignore_budget or materialise)
            partly = partly and any(call.packed for call in calls)
            shapes = tuple([call.shape for call in calls])
            whole = aside is not None and (aside, *shapes) in self._set_aside
            keep, aside = keep or whole, None if whole else aside
            wanted, retain_graph = retain_graph, retain_graph or partly or (again and not whole)
            # What was set aside under the budget may stay under it.
            budget = None if ignore_budget or materialise or whole else self._memory_budget
            waits = groups is not None and not wanted and shapes in self._small
            # A graph that is let go of takes no more than an ordinary backward's.
            kept = retain_graph and not waits and (aside is None or aside.by_parts) and not (keep and groups is None)
            tail = tail if kept and not watched and tail is not None and self._goes_by_parts(tail, calls) else None
            above = calls if tail is None else [call for call in calls if call not in tail.calls]
            collector = Collector(
                losses, above, majors, self._planner, self.index,
                keep=keep, partly=partly, materialise=materialise, aside=aside, budget=budget, groups=groups,
                margin=margin, postponed=postponed, below=[] if tail is None else tail.calls,
                watched=watched,
            )  # fmt: skip
            if groups is not None:
                groups.calls, groups.waits = calls, waits
                retain_graph = retain_graph and not waits
            narrowing = _expect_again(losses, calls, None if whole else repeat)
            with nullcontext() if narrowing is None else narrowing.kept():
                collect(losses, above, tail, collector, groups, retain_graph=retain_graph or bool(watched))
            if watched:
                if collector.reached():
                    return None
                if not retain_graph:
                    let_go(losses, calls)
            if groups is not None:
                groups.close(collector.measured if postponed else None)
                _note(self._small, shapes, groups.nbytes <= POSTPONED_BYTES)
        run = FirstPass(collector, trained, calls, majors, self.scale, narrowing, tail)
        self.choices = run.choices
        if aside is not None:
            owners = [owner for call in calls for owner in owners_of(call)]
            _note(self._set_aside, (aside, *shapes), run.aside.issuperset(owners))
        # Only what was held within all bounds here may be held at once.
        held = run.holds_terms and self.cached and not (materialise or ignore_budget)
        if self.scale == 1.0 and (held or whole or (groups is not None and groups.nbytes <= POSTPONED_BYTES)):
            self._at_once.learn(uses, collector, self.partition())
        return run

    def rehearse(self, losses: Tensor) -> tuple[list[Call], bool]:
        """Proves of the graph behind ``losses``, those of a few examples, what a first pass would first.

        Returns:
            The uses of layers in the graph, and whether something isn't proved that another rehearsal may prove.
        """
        check_losses(losses, self.scale)
        losses = losses if self.scale == 1.0 else losses * self.scale
        with in_our_words(), without_autocast(losses):
            layout = self._grouping.prove(losses, captured_calls(losses, self.index), self.index, rehearsal=True)
        return layout.calls, self._grouping.is_open

    @property
    def constants(self) -> int:
        """How many uses of layers are known to see no examples."""
        return self._grouping.constants

    def group_pass(
        self,
        losses: Tensor,
        policy: Groupwise,
        given: dict[str, Tensor] | None,
        finite: Tensor | None,
        *,
        retain_graph: bool = True,
        again: bool = True,
        postponed: bool = False,
    ) -> GroupSums:
        """A first pass that clips on the way: by ``given`` weights, or by the policy's as norms come.

        The graph is kept where ``retain_graph`` says so, and where the pass may have to be repeated for all to be left
        out that has to be, unless without ``again``.
        """
        trained, partition = self.index.trained(), self.partition()
        thresholds = policy.thresholds_of(dict.fromkeys(partition.values())) if isinstance(policy, Thresholds) else {}
        bounds = {group: self.scale * threshold for group, threshold in thresholds.items()}
        group_of = {id(parameter): partition[name] for name, parameter in trained}
        sums = GroupSums(group_of, bounds, given, finite, norm_dtype(trained), losses, self._planner)
        self.first_pass(
            losses, keep=True, retain_graph=retain_graph, again=again, ignore_budget=True, groups=sums,
            postponed=postponed,
        )  # fmt: skip
        return sums

    def partition(self) -> dict[str, str]:
        """{name of a trained parameter: group} under a group-wise policy; {} under another."""
        if not isinstance(self.clipping, Groupwise):
            return {}
        names = [name for name, _ in self.index.trained()]
        if names != self._names:
            self._groups, self._names = self.clipping.partition(names), names
        return self._groups

    def _goes_by_parts(self, tail: Tail, calls: list[Call]) -> bool:
        """Whether no other backward is needed for the tail's layers, nor a group of parameters split at its end."""
        if isinstance(calls[-1], Outside):
            return False
        partition = self.partition()
        groups: list[set[str]] = [set(), set()]
        for call in calls if partition else []:
            own = call.layer._parameters
            names = [self.index.names[id(own[name])] for name in self.index.own_parameters(call)]
            groups[call in tail.calls].update([partition[name] for name in names])
        return groups[0].isdisjoint(groups[1])

    def _is_hooked(self) -> bool:
        """Whether there are hooks on parameters, or processes that wait for each other's gradients."""
        waited_for = is_distributed() and not self.reduced_apart
        return waited_for or have_hooks(parameter for _, parameter in self.index.trained())


def check_losses(losses: Tensor, scale: float) -> None:
    """Raises LossShapeError or StaleInputError unless ``losses`` are one number per example, attached to a graph."""
    if not isinstance(losses, Tensor):
        raise LossShapeError(f"losses must be a tensor of shape [B], one per example; got {type(losses).__name__}")
    if losses.dim() != 1:
        raise LossShapeError(
            f'losses must have shape exactly [B], one per example; got {list(losses.shape)}. Use reduction="none", and '
            "average what belongs to one example yourself: token losses [B, T] by .mean(1), a head of [B, 1] by [:, 0]"
        )
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


def without_autocast(losses: Tensor) -> AbstractContextManager[Any]:
    """Norms and sums are not computed in narrow types where only the forward was meant to be."""
    kind = losses.device.type if isinstance(losses, Tensor) else "cpu"
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def owners_of(call: Call) -> list[int]:
    """Ids of the parameters a call used."""
    return [id(call.layer._parameters[name]) for name in call.parameters]


def _expect_again(losses: Tensor, calls: list[Call], repeat: Repeat | None) -> Narrowing | None:
    """Tells layers with a row for each example that another pass may follow, or that this one stands for itself.

    Returns:
        Where a gradient may be kept for the other pass.
    """
    repeat = None if any(isinstance(call, Outside) for call in calls) else repeat
    for call in calls:
        call.repeat = None if call.packed or call.shape[call.batch_dim] != len(losses) else repeat
    return None if repeat is None or not calls else narrowing_of(losses)


def _note(known: set[Any], shapes: tuple[Any, ...], holds: bool) -> None:
    """Remembers whether something holds for graphs like one with pre-activations of these shapes."""
    if not holds:
        known.discard(shapes)
    elif len(known) < MOST_SHAPES:
        known.add(shapes)
