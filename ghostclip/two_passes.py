"""The two passes over one graph: norms, weights, clipped sums (Lee & Kifer 2020, algorithm 1).

The only place that runs autograd for clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.at_once import AtOnce
from ghostclip.clipping import Groupwise, Policy, Thresholds
from ghostclip.errors import LossShapeError, StaleInputError
from ghostclip.gradients import have_hooks
from ghostclip.graph import WIDE, captured_calls, first_pass, let_go
from ghostclip.groupwise import POSTPONED_BYTES, GroupSums, Part
from ghostclip.index import ModelIndex
from ghostclip.nn.base import Call, Repeat
from ghostclip.nn.fallback import Outside
from ghostclip.norms.whole import all_finite, bounded_weights
from ghostclip.outcome import FirstPass, add_to_gradient, norm_dtype
from ghostclip.passes import OF_WHOLE, Aside, Collector
from ghostclip.planner import Choice, Planner
from ghostclip.regroup import Grouping
from ghostclip.reweighting import Reweighting
from ghostclip.second_pass import in_our_words, reweighted_backward

__all__ = ["TwoPasses"]

# Batches of so many shapes are remembered.
MOST_SHAPES = 1000


class TwoPasses:
    """Clips the gradients behind losses of one model, by one policy.

    Args:
        model: wrapped.
        clipping: the policy.
        second_pass: "reweight" or "cached".
        planner: chooses the way to each squared norm.
        memory_budget: bytes "cached" may keep, or None.
        loss_scale: a power of two; the passes see losses this many times as large.

    Attributes:
        index: the model's names.
        scale: what losses are multiplied with before the passes, and results divided by.
        choices: what the planner chose for the last batch it was asked for, by id of parameter; None before one.
        steady: whether the last batch's gradients scale with its losses (`Uses.steady`).
        reduced_apart: whether sums of several processes are added up apart from any backward: nobody waits for one.
        wide_sums: where clipped sums of parameters narrower than float32 are gathered besides, by id; None: nowhere.
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
        self.steady = True
        self.reduced_apart = False
        self.wide_sums: dict[int, Tensor] | None = None
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

    def clip(
        self,
        losses: Tensor,
        *,
        retain_graph: bool,
        forward: Callable[[], Tensor] | None = None,
        aside: Aside = OF_WHOLE,
    ) -> tuple[Any, Any]:
        """Adds the clipped sum to each p.grad; returns norms and weights, [B] or {group: [B]}.

        Args:
            losses: [B].
            retain_graph: as torch's.
            forward: gives the batch's losses anew, so that a pass that clips on its way needn't keep the graph for an
                example that turns out not to be finite.
            aside: how much "reweight" may set aside.
        """
        if self.wide_sums is not None:
            self.wide_sums.clear()
        with _without_autocast(losses):
            if self._at_once and (at_once := self._clip_at_once(losses, retain_graph)):
                return at_once
            if not isinstance(self.clipping, Groupwise):
                return self._clip_whole(losses, self.clipping, retain_graph, aside)
            found = self._clip_groups(losses, self.clipping, retain_graph, again=retain_graph or forward is None)
        if found is None:
            assert forward is not None
            return self.clip(forward(), retain_graph=False, aside=aside)
        return found

    def _clip_at_once(self, losses: Tensor, retain_graph: bool) -> tuple[Any, Any] | None:
        """`clip` where it is known to take a single call; None where it isn't, and nothing was done."""
        if not (self.cached or isinstance(self.clipping, Groupwise)) and self._is_hooked():
            return None
        _check_losses(losses, self.scale)
        with in_our_words():
            return self._at_once.clip(losses, retain_graph)

    def _clip_whole(self, losses: Tensor, policy: Policy, retain_graph: bool, aside: Aside) -> tuple[Tensor, Tensor]:
        """Adds the clipped sum to each p.grad; returns norms and weights [B]."""
        cached = self.cached
        repeat = None if cached or retain_graph else Repeat()
        run = self.first_pass(
            losses,
            keep=cached,
            aside=None if cached or self._is_waited_for() else aside,
            retain_graph=retain_graph,
            again=not cached or self._memory_budget is not None,
            repeat=repeat,
        )
        norms = run.norms()
        fine = all_finite(norms, losses.detach())
        finite = None
        weights = policy.weights(norms)
        if not fine:
            finite = torch.isfinite(norms + losses.detach())
            weights = torch.where(finite, weights, torch.zeros_like(weights))
        if not fine and not run.holds_terms:
            run = self.first_pass(losses, keep=True, retain_graph=retain_graph, ignore_budget=True)
        if run.holds_terms:
            self._add(run.weighted_sums(weights, finite))
        elif not self._second_backward(losses, weights, run, retain_graph, repeat):
            run = self.first_pass(losses, keep=True, retain_graph=retain_graph, ignore_budget=True)
            self._add(run.weighted_sums(weights, finite))
        return norms, weights

    def _second_backward(
        self, losses: Tensor, weights: Tensor, run: FirstPass, retain_graph: bool, repeat: Repeat | None
    ) -> bool:
        """A backward of the reweighted losses, without the parameters whose gradients were set aside; see there."""
        by_rules = not (self.steady or self._is_hooked())
        if repeat is not None:
            repeat.begun, repeat.factors = True, None if by_rules else weights
        try:
            if by_rules:
                self._sum_by_rules(losses, weights, run, retain_graph)
                return True
            aside = run.aside
            done = reweighted_backward(
                losses,
                weights,
                [parameter for _, parameter in self.index.trained() if id(parameter) not in aside],
                run.calls,
                scale=self.scale,
                strays=bool(aside) and any(_is_lowest(call) and aside.issuperset(_owners(call)) for call in run.calls),
                retain_graph=retain_graph,
                repeatable=not self._is_waited_for(),
            )
        finally:
            if repeat is not None:
                # Whatever else goes over this graph, after a failure, has gradients of its own.
                repeat.begun = False
        if done:
            self._add(run.weighted_sums(weights, None))
        return done

    def _is_waited_for(self) -> bool:
        """Whether other processes wait for this one's backward."""
        return is_distributed() and not self.reduced_apart

    def _is_hooked(self) -> bool:
        """Whether there are hooks on parameters, or processes that wait for each other: they need a backward."""
        return self._is_waited_for() or have_hooks(parameter for _, parameter in self.index.trained())

    def _sum_by_rules(self, losses: Tensor, weights: Tensor, run: FirstPass, retain_graph: bool) -> None:
        """Adds what a backward of reweighted losses would, where rounding might undo their weights."""
        aside = frozenset(run.aside)
        self._add(run.weighted_sums(weights, None))
        sink = Reweighting(len(losses), run.majors, self.index, aside, weights / self.scale, self._add_part, run.calls)
        losses = losses if self.scale == 1.0 else losses * self.scale
        with in_our_words():
            if len(aside) < len(self.index.trained()):
                first_pass(losses, run.calls, sink.receive, retain_graph=retain_graph)
                sink.finish()
            elif not retain_graph:
                let_go(losses, run.calls)

    def _clip_groups(
        self, losses: Tensor, policy: Groupwise, retain_graph: bool, *, again: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        """The same group by group; returns {group: norms [B]} and {group: weights [B]} of all groups.

        The graph is kept until all norms are known: an example that turns out not to be finite in the last group is
        left out of all of them by going ``again``. Groups that are known to be small wait for each other instead, and
        need no graph any more then. Without ``again`` there is none, and None is returned in that case, nothing added.
        """
        partition = self.partition()
        given: dict[str, Tensor] | None = None
        if isinstance(policy, Thresholds):
            sums = self.group_pass(losses, policy, None, None, retain_graph=retain_graph, again=again)
            if sums.waits:
                return self._groups_added(losses, sums)
            norms = sums.norms
            if not again:
                fine = all_finite(losses.detach().to(norm_dtype(self.index.trained())), *norms.values())
                return self._groups_added(losses, sums) if fine else None
        else:
            norms = self.first_pass(losses, keep=False, retain_graph=True).norms_by_group(partition)
            given = policy.weights(norms)
        found = [losses.detach().to(norm_dtype(self.index.trained())), *norms.values()]
        finite = None if all_finite(*found) else torch.isfinite(torch.stack(found)).all(0)
        if finite is not None or given is not None:
            sums = self.group_pass(losses, policy, given, finite)
        if not retain_graph:
            with in_our_words():
                let_go(losses, sums.calls)
        return self._groups_added(losses, sums)

    def _groups_added(self, losses: Tensor, sums: GroupSums) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Adds the sums to the p.grads; returns norms and weights of all groups, those that took no part included."""
        taken = sums.taken()
        if self.scale != 1.0:
            taken = ((part, amount / self.scale) for part, amount in taken)
            sums.norms = {group: norms / self.scale for group, norms in sums.norms.items()}
        self._add(taken)
        groups = dict.fromkeys(self.partition().values())
        if len(sums.norms) == len(groups):
            return {group: sums.norms[group] for group in groups}, {group: sums.weights[group] for group in groups}
        none = losses.new_zeros(losses.shape, dtype=norm_dtype(self.index.trained()))
        unused = none + 1 if sums.finite is None else sums.finite.to(none.dtype)
        norms, weights = sums.norms, sums.weights
        return {g: norms.get(g, none) for g in groups}, {g: weights.get(g, unused) for g in groups}

    def _add(self, sums: Iterator[tuple[Part, Tensor]]) -> None:
        """Adds the clipped sums of parts to the p.grads."""
        for part, amount in sums:
            self._add_part(part, amount)

    def _add_part(self, part: Part, amount: Tensor) -> None:
        """The same for one part; with ``wide_sums``, sums of narrow parameters are gathered in float32 there, too."""
        owner, rows = part
        parameter = self._parameters[owner]
        add_to_gradient(parameter, rows, amount)
        if self.wide_sums is not None and parameter.dtype not in WIDE:
            if owner not in self.wide_sums:
                self.wide_sums[owner] = torch.zeros_like(parameter, dtype=torch.float32)
            self.wide_sums[owner][slice(*rows) if rows else slice(None)] += amount

    def partition(self) -> dict[str, str]:
        """{name of a trained parameter: group} under a group-wise policy; {} under another."""
        if not isinstance(self.clipping, Groupwise):
            return {}
        names = [name for name, _ in self.index.trained()]
        if names != self._names:
            self._groups, self._names = self.clipping.partition(names), names
        return self._groups

    def group_pass(
        self,
        losses: Tensor,
        policy: Groupwise,
        given: dict[str, Tensor] | None,
        finite: Tensor | None,
        *,
        retain_graph: bool = True,
        again: bool = True,
    ) -> GroupSums:
        """A first pass that clips on the way: by ``given`` weights, or by the policy's as norms come.

        The graph is kept where ``retain_graph`` says so, and where the pass may have to be repeated for all to be left
        out that has to be, unless without ``again``.
        """
        trained, partition = self.index.trained(), self.partition()
        thresholds = policy.thresholds_of(dict.fromkeys(partition.values())) if isinstance(policy, Thresholds) else {}

        def weigh(groups: list[str], norms: Tensor) -> Tensor:
            if given is not None:
                return torch.stack([given[group] for group in groups])
            return bounded_weights(norms, [self.scale * thresholds[group] for group in groups])

        sums = GroupSums({id(p): partition[name] for name, p in trained}, weigh, finite, norm_dtype(trained), losses)
        self.first_pass(losses, keep=True, retain_graph=retain_graph, again=again, ignore_budget=True, groups=sums)
        return sums

    def rehearse(self, losses: Tensor) -> tuple[list[Call], bool]:
        """Proves of the graph behind ``losses``, those of a few examples, what a first pass would first.

        Returns:
            The uses of layers in the graph, and whether something isn't proved that another rehearsal may prove.
        """
        _check_losses(losses, self.scale)
        losses = losses if self.scale == 1.0 else losses * self.scale
        with in_our_words(), _without_autocast(losses):
            calls, _ = self._grouping.prove(losses, captured_calls(losses, self.index), self.index, rehearsal=True)
        return calls, self._grouping.is_open

    def first_pass(
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
        roomy: bool = True,
    ) -> FirstPass:
        """A backward from ``losses`` [B] to the pre-activations; raises what `GhostClipper.norms` raises.

        Args:
            keep: hold terms for a clipped sum.
            retain_graph: as torch's.
            materialise: hold per-example gradients, and no norms.
            aside: hold what is so small, for a second backward without it; where that was all there is, none follows.
            again: keep the graph for another backward, should one follow.
            ignore_budget: hold terms whatever they take.
            groups: takes the terms, to clip them group by group.
            repeat: this is the first of two passes.
            roomy: norms have room for rounding where weights need it (`ghostclip.norms.rounding`).
        """
        _check_losses(losses, self.scale)
        losses = losses if self.scale == 1.0 else losses * self.scale
        with in_our_words(), _without_autocast(losses):
            uses = captured_calls(losses, self.index)
            trained = self.index.trained()
            self._parameters = {id(parameter): parameter for _, parameter in trained}
            narrow = any(parameter.dtype not in WIDE for _, parameter in trained)
            self.steady = uses.steady and not narrow
            calls, majors = self._grouping.prove(losses, uses, self.index)
            # What is computed again in order not to be kept is not kept here, either.
            partly = self.cached and keep and groups is None and not (ignore_budget or materialise)
            partly = partly and not self._is_waited_for() and any(call.packed for call in calls)
            shapes = tuple([call.shape for call in calls])
            whole = aside is not None and (aside, *shapes) in self._set_aside and not self._is_hooked()
            keep, aside = keep or whole, None if whole else aside
            wanted, retain_graph = retain_graph, retain_graph or partly or (again and not whole)
            # What was set aside under the budget may stay under it.
            budget = None if ignore_budget or materialise or whole else self._memory_budget
            collector = Collector(
                losses, calls, majors, self._planner, self.index,
                keep=keep, partly=partly, materialise=materialise, aside=aside, budget=budget, groups=groups,
                roomy=roomy and not self.steady,
            )  # fmt: skip
            if groups is not None:
                groups.calls, groups.waits = calls, not wanted and shapes in self._small
                retain_graph = retain_graph and not groups.waits
            _expect_again(calls, repeat, len(losses))
            first_pass(losses, calls, collector.receive, retain_graph=retain_graph)
            collector.finish()
            if groups is not None:
                groups.close()
                _note(self._small, shapes, groups.nbytes <= POSTPONED_BYTES)
        run = FirstPass(collector, trained, calls, majors, self.scale)
        self.choices = run.choices
        if aside is not None:
            owners = [owner for call in calls for owner in _owners(call)]
            _note(self._set_aside, (aside, *shapes), run.aside.issuperset(owners))
        # Only what was held within all bounds here may be held at once.
        held = run.holds_terms and self.cached and not (materialise or ignore_budget)
        if self.scale == 1.0 and (held or whole or (groups is not None and groups.nbytes <= POSTPONED_BYTES)):
            self._at_once.learn(uses, collector, self.partition())
        return run


def _expect_again(calls: list[Call], repeat: Repeat | None, examples: int) -> None:
    """Tells layers with a row for each example that another pass may follow, or that this one stands for itself."""
    outside = any(isinstance(call, Outside) for call in calls)
    for call in calls:
        call.repeat = None if outside or call.packed or call.shape[call.batch_dim] != examples else repeat


def _note(known: set[Any], shapes: tuple[Any, ...], holds: bool) -> None:
    """Remembers whether something holds for graphs like one with pre-activations of these shapes."""
    if not holds:
        known.discard(shapes)
    elif len(known) < MOST_SHAPES:
        known.add(shapes)


def _owners(call: Call) -> list[int]:
    """Ids of the parameters a call used."""
    return [id(call.layer._parameters[name]) for name in call.parameters]


def _is_lowest(call: Call) -> bool:
    """Whether no graph goes on below the layer."""
    return all(isinstance(source, Tensor) for source in call.sources)


def is_distributed() -> bool:
    """Whether several processes train together, who wait for each other's gradients of every parameter."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _without_autocast(losses: Tensor) -> AbstractContextManager[Any]:
    """Norms and sums are not computed in narrow types where only the forward was meant to be."""
    kind = losses.device.type if isinstance(losses, Tensor) else "cpu"
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _check_losses(losses: Tensor, scale: float) -> None:
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
