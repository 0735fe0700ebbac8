"""The two passes over one graph: norms, weights, clipped sums (Lee & Kifer 2020, algorithm 1).

Norms come from a first pass (first_passes.py); here they become weights, and weights become sums in the p.grads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ghostclip.aside import OF_WHOLE, Aside
from ghostclip.by_parts import add_up
from ghostclip.clipping import Groupwise, Policy, Thresholds
from ghostclip.errors import PrivacyError
from ghostclip.first_passes import FirstPasses, check_losses, owners_of, without_autocast
from ghostclip.gradients import have_hooks
from ghostclip.graph import WIDE, first_pass, let_go
from ghostclip.groupwise import GroupSums, Part
from ghostclip.nn.base import Call, Repeat
from ghostclip.nn.fallback import Outside
from ghostclip.norms.looks import looks_stall
from ghostclip.norms.whole import all_finite
from ghostclip.outcome import FirstPass, add_to_gradient, norm_dtype
from ghostclip.reweighting import Reweighting
from ghostclip.torch_errors import in_our_words

__all__ = ["TwoPasses"]

# After a norm that needed a look, or wasn't finite, each norm of so many batches is looked at as it is formed: where
# that keeps happening, it costs less than passes over and over again.
WATCHED = 64


class TwoPasses(FirstPasses):
    """Clips the gradients behind losses of one model, by one policy.

    Arguments, and all other attributes, are those of `FirstPasses`.

    Attributes:
        wide_sums: where clipped sums of parameters narrower than float32 are gathered besides, by id; None: nowhere.
    """

    wide_sums: dict[int, Tensor] | None = None
    _finished: dict[int, Tensor] | None = None
    _watched = 0

    def clip(
        self,
        losses: Tensor,
        *,
        retain_graph: bool,
        forward: Callable[[], Tensor] | None = None,
        aside: Aside = OF_WHOLE,
        sure: bool = False,
    ) -> tuple[Any, Any]:
        """Adds the clipped sum to each p.grad; returns norms and weights, [B] or {group: [B]}.

        Args:
            losses: [B].
            retain_graph: as torch's.
            forward: gives the batch's losses anew, so that a pass that clips on its way needn't keep the graph for an
                example that turns out not to be finite.
            aside: how much "reweight" may set aside.
            sure: look at each norm that needs it as it is formed. Otherwise, where looks stall, there is one at all
                norms, and only where that finds one that isn't finite, or was left open, all is done again to be sure.
        """
        if self.wide_sums is not None:
            self.wide_sums.clear()
        again = retain_graph or forward is None or not isinstance(self.clipping, Thresholds)
        postponed = not sure and self._postpones(losses)
        with without_autocast(losses), self._delivered():
            if self._at_once and self._finished is None and (at_once := self._clip_at_once(losses, retain_graph)):
                return at_once
            found: tuple[Any, Any] | None
            if isinstance(self.clipping, Groupwise):
                found = self._clip_groups(losses, self.clipping, retain_graph, again=again, postponed=postponed)
            else:
                found = self._clip_whole(losses, self.clipping, retain_graph, aside, postponed)
        if found is None:
            self._watched = WATCHED
            losses = losses if again or forward is None else forward()
            return self.clip(losses, retain_graph=retain_graph, aside=aside, sure=True)
        return found

    @contextmanager
    def _delivered(self) -> Iterator[None]:
        """Where hooks on parameters, or other processes, wait for gradients: autograd delivers the finished sums.

        A hook runs once, on the sum over all uses and examples; and so does DistributedDataParallel's reducer.
        """
        if self._finished is not None or not self._is_hooked():
            yield
            return
        if self.reduced_apart:
            self._refuse_hooks()
        self._finished = {}
        try:
            yield
            finished = [(self._parameters[owner], total) for owner, total in self._finished.items()]
            if finished:
                sums = [total.to(parameter.dtype) for parameter, total in finished]
                torch.autograd.backward([parameter for parameter, _ in finished], sums)
        finally:
            self._finished = None

    def _refuse_hooks(self) -> None:
        """Raises PrivacyError: what a hook makes of a clipped sum, nothing bounds any more."""
        name = next(name for name, parameter in self.index.trained() if have_hooks([parameter]))
        raise PrivacyError(
            f"the parameter {name!r} has a hook, which may change its clipped sum before the noise is added; remove "
            "it (to train a part of the model, set requires_grad=False on the rest)"
        )

    def _postpones(self, losses: Tensor) -> bool:
        """Whether norms that need a look wait for the one at all of them."""
        self._watched = max(0, self._watched - 1)
        return self._watched == 0 and isinstance(losses, Tensor) and looks_stall(losses.device)

    def _clip_at_once(self, losses: Tensor, retain_graph: bool) -> tuple[Any, Any] | None:
        """`clip` where it is known to take a single call; None where it isn't, and nothing was done."""
        check_losses(losses, self.scale)
        with in_our_words():
            return self._at_once.clip(losses, retain_graph)

    def _clip_whole(
        self, losses: Tensor, policy: Policy, retain_graph: bool, aside: Aside, postponed: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Adds the clipped sum to each p.grad; returns norms and weights [B].

        None, nothing added and the graph still there, where norms have to be formed again, with looks.
        """
        cached = self.cached
        repeat = None if cached or retain_graph else Repeat()
        run = self.first_pass(
            losses,
            keep=cached,
            aside=None if cached else aside,
            retain_graph=retain_graph,
            again=not cached or self._memory_budget is not None,
            repeat=repeat,
            postponed=postponed,
        )
        norms, bounds = run.norms_and_bounds()
        fine = all_finite(norms, losses.detach())
        if postponed and not fine:
            if not run.holds_terms:
                return None
            self._watched = WATCHED
            run.measure_again()
            norms, bounds = run.norms_and_bounds()
            fine = all_finite(norms, losses.detach())
        finite = None
        weights = policy.weights(bounds)
        if not fine:
            finite = torch.isfinite(norms + losses.detach())
            weights = torch.where(finite, weights, torch.zeros_like(weights))
        kept = frozenset(run.aside)
        self._add(run.weighted_sums(weights, finite))
        if not run.holds_terms:
            self._sum_by_rules(losses, weights, finite, run, kept, retain_graph, repeat, self._add_part)
        return norms, weights

    def weighted_sums(self, losses: Tensor, weights: Tensor, run: FirstPass) -> list[tuple[Part, Tensor]]:
        """``sum_i weights[i] g_i`` of all parts, formed as `clip` forms them after this first pass; keeps the graph."""
        kept = frozenset(run.aside)
        found = list(run.weighted_sums(weights, None))
        if not run.holds_terms:
            self._sum_by_rules(losses, weights, None, run, kept, True, None, lambda *each: found.append(each))
        return found

    def _sum_by_rules(
        self,
        losses: Tensor,
        weights: Tensor,
        finite: Tensor | None,
        run: FirstPass,
        kept: frozenset[int],
        retain_graph: bool,
        repeat: Repeat | None,
        add: Callable[[Part, Tensor], None],
    ) -> None:
        """The second backward: each layer's rule forms the clipped sum of what the first pass did not keep.

        It ends at the lowest layer that it is needed for. ``kept`` has the ids of parameters whose sums are there, and
        ``add`` takes the other sums.
        """
        tail, narrowing = run.tail, run.narrowing
        losses = losses if self.scale == 1.0 else losses * self.scale
        wanted = [call for call in run.calls if not kept.issuperset(owners_of(call))]
        if repeat is not None:
            repeat.begun = True
        try:
            with in_our_words():
                if wanted:
                    sink_of = self._sink(run, weights / self.scale, finite, kept, add)
                    self._second_backward(losses, run, wanted, kept, sink_of, retain_graph)
                if not retain_graph and (tail is not None or len(wanted) < len(run.calls)):
                    let_go(losses, run.calls)
                elif not retain_graph and narrowing is not None and narrowing.done:
                    let_go(losses, run.calls, narrowing)
        finally:
            if repeat is not None:
                # Whatever else goes over this graph, after a failure, has gradients of its own.
                repeat.begun = False

    def _second_backward(
        self,
        losses: Tensor,
        run: FirstPass,
        wanted: list[Call],
        kept: frozenset[int],
        sink_of: Callable[[slice, Sequence[Call]], Reweighting],
        retain_graph: bool,
    ) -> None:
        """A backward to the ``wanted`` calls, whose sums are added to the p.grads."""
        tail, narrowing = run.tail, run.narrowing
        sink = sink_of(slice(None), run.calls)
        if narrowing is not None:
            narrowing.done = narrowing.above is None or kept.issuperset(owners_of(narrowing.above))
        in_tail = set() if tail is None else {id(call) for call in tail.calls}
        above = [call for call in run.calls if id(call) not in in_tail]
        # To the tail all ways lead, and what all examples share is found by a pass over the whole graph.
        whole = len(wanted) == len(run.calls) or any(id(call) in in_tail for call in wanted)
        ends = None if whole or isinstance(run.calls[-1], Outside) else wanted
        with nullcontext() if tail is None else tail.stopped():
            first_pass(
                losses,
                above,
                sink.receive,
                retain_graph=retain_graph or tail is not None or len(wanted) < len(run.calls),
                narrowing=narrowing,
                wanted=ends,
            )
        if tail is not None:
            add_up(tail, kept, sink_of)
        sink.finish()

    def _sink(
        self,
        run: FirstPass,
        weights: Tensor,
        finite: Tensor | None,
        kept: frozenset[int],
        add: Callable[[Part, Tensor], None],
    ) -> Callable[[slice, Sequence[Call]], Reweighting]:
        """(part of the examples, their uses of layers) -> what adds these layers' sums, by ``weights`` [B]."""

        def sink(part: slice, calls: Sequence[Call]) -> Reweighting:
            own, left = weights[part], None if finite is None else finite[part]
            return Reweighting(len(own), run.majors, self.index, kept, own, add, calls, self._planner, left)

        return sink

    def _clip_groups(
        self, losses: Tensor, policy: Groupwise, retain_graph: bool, *, again: bool, postponed: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        """The same group by group; returns {group: norms [B]} and {group: weights [B]} of all groups.

        The graph is kept until all norms are known: an example that turns out not to be finite in the last group is
        left out of all of them by going ``again``. Groups that are known to be small wait for each other instead, and
        need no graph any more then. Without ``again`` there is none, and None is returned in that case, nothing added;
        so it is, whether there is a graph or not, where norms have to be formed again, with looks.
        """
        partition = self.partition()
        given: dict[str, Tensor] | None = None
        if isinstance(policy, Thresholds):
            sums = self.group_pass(
                losses, policy, None, None, retain_graph=retain_graph, again=again, postponed=postponed
            )
            if sums.waits:
                return self._groups_added(losses, sums)
            norms = sums.norms
        else:
            run = self.first_pass(losses, keep=False, retain_graph=True, postponed=postponed)
            norms, upper = run.norms_and_bounds_by_group(partition)
        found = [losses.detach().to(norm_dtype(self.index.trained())), *norms.values()]
        fine = all_finite(*found)
        if postponed and not fine:
            return None
        if not isinstance(policy, Thresholds):
            given = policy.weights(upper)
        elif not again:
            return self._groups_added(losses, sums) if fine else None
        finite = None if fine else torch.isfinite(torch.stack(found)).all(0)
        if finite is not None or given is not None:
            sums = self.group_pass(losses, policy, given, finite, postponed=postponed)
            if postponed:
                # Those that were looked at, and that the weights are of.
                sums.norms = {group: norms[group] * self.scale for group in sums.norms}
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
        if self._finished is not None:
            total = self._finished.get(owner)
            if total is None:
                total = self._finished[owner] = torch.zeros_like(parameter, dtype=amount.dtype)
            total[slice(*rows) if rows else ...] += amount
            return
        add_to_gradient(parameter, rows, amount)
        if self.wide_sums is not None and parameter.dtype not in WIDE:
            if owner not in self.wide_sums:
                self.wide_sums[owner] = torch.zeros_like(parameter, dtype=torch.float32)
            self.wide_sums[owner][slice(*rows) if rows else ...] += amount
