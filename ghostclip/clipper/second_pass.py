"""The two passes over one graph: norms, weights, clipped sums (Lee & Kifer 2020, algorithm 1).

Norms come from a first pass (first_pass.py); here they become weights, and weights become sums in the p.grads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ghostclip.clipper.collector import Keep, NormCollector, Wanted, norm_dtype
from ghostclip.clipper.first_pass import FirstPasses, in_our_words, without_autocast
from ghostclip.clipper.gradient_guard import add_to_gradient, have_hooks
from ghostclip.clipper.groupwise import POSTPONED_BYTES, GroupSums, Part
from ghostclip.clipping import Groupwise, Policy, Thresholds
from ghostclip.errors import PrivacyError
from ghostclip.graph.reader import AT_LEAST_FLOAT32, first_pass, free_graph
from ghostclip.graph.row_layout import row_count
from ghostclip.nn.base import LayerCall
from ghostclip.nn.fallback import FallbackCall
from ghostclip.norms.affine import LinearPair, weighted_sums_of
from ghostclip.norms.reduce import all_finite
from ghostclip.norms.term import may_sync
from ghostclip.planner import Planner

__all__ = ["Reweighting", "TwoPasses"]


class TwoPasses(FirstPasses):
    """Clips the gradients behind losses of one model, by one policy.

    Arguments, and all other attributes, are those of `FirstPasses`.

    Attributes:
        wide_sums: where clipped sums of parameters narrower than float32 are gathered besides, by id; None: nowhere.
    """

    wide_sums: dict[int, Tensor] | None = None
    _finished: dict[int, Tensor] | None = None

    def reduce_apart(self) -> dict[int, Tensor]:
        """From now on the caller adds up the sums of several processes itself, so that no backward delivers them.

        Returns:
            Where sums of parameters narrower than float32 are gathered in float32, by the parameter's id.
        """
        self.wide_sums, self.reduced_apart = {}, True
        return self.wide_sums

    def clip(self, losses: Tensor, *, retain_graph: bool) -> tuple[Any, Any]:
        """Adds the clipped sum to each p.grad; returns norms and weights, [B] or {group: [B]}.

        Args:
            losses: [B].
            retain_graph: as torch's.
        """
        if self.wide_sums is not None:
            self.wide_sums.clear()
        with without_autocast(losses), self._delivered():
            if isinstance(self.clipping, Groupwise):
                return self._clip_groups(losses, self.clipping, retain_graph)
            return self._clip_whole(losses, self.clipping, retain_graph)

    @contextmanager
    def _delivered(self) -> Iterator[None]:
        """Where hooks on parameters, or other processes, wait for gradients: autograd delivers the finished sums.

        A hook runs once, on the sum over all uses and examples; and so does DistributedDataParallel's reducer.
        """
        if not self._is_hooked():
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

    def _clip_whole(self, losses: Tensor, policy: Policy, retain_graph: bool) -> tuple[Tensor, Tensor]:
        """Adds the clipped sum to each p.grad; returns norms and weights [B]."""
        run = self.first_pass(losses, Wanted(Keep.CHOSEN), retain_graph=retain_graph)
        norms, bounds = run.norms_and_bounds()
        fine = all_finite(norms, losses.detach())
        if not fine and not may_sync(losses.device):
            run = self._exactly(losses, run)
            norms, bounds = run.norms_and_bounds()
            fine = all_finite(norms, losses.detach())
        finite = None
        weights = policy.weights(bounds)
        if not fine:
            finite = torch.isfinite(norms + losses.detach())
            weights = torch.where(finite, weights, torch.zeros_like(weights))
        kept = run.kept
        self._add(run.weighted_sums(weights, finite))
        self._sum_by_rules(losses, weights, finite, run, kept, retain_graph, self._add_part)
        return norms, weights

    def _exactly(self, losses: Tensor, run: NormCollector) -> NormCollector:
        """The first pass with norms in no form that may cancel: from what it kept, or by another one."""
        if not run.keeps_all:
            return self.first_pass(losses, Wanted(Keep.CHOSEN, exact=True), retain_graph=True)
        run.measure_exactly()
        return run

    def weighted_sums(self, losses: Tensor, weights: Tensor, run: NormCollector) -> list[tuple[Part, Tensor]]:
        """``sum_i weights[i] g_i`` of all parts, formed as `clip` forms them after this first pass; keeps the graph."""
        kept = run.kept
        found = list(run.weighted_sums(weights, None))
        self._sum_by_rules(losses, weights, None, run, kept, True, lambda *each: found.append(each))
        return found

    def _sum_by_rules(
        self,
        losses: Tensor,
        weights: Tensor,
        finite: Tensor | None,
        run: NormCollector,
        kept: frozenset[int],
        retain_graph: bool,
        add: Callable[[Part, Tensor], None],
    ) -> None:
        """The second backward: each layer's rule forms the clipped sum of what the first pass did not keep.

        It ends at the lowest layer that it is needed for. ``kept`` has the ids of parameters whose sums are there, and
        ``add`` takes the other sums.
        """
        losses = losses if self.scale == 1.0 else losses * self.scale
        wanted, repeat = run.unkept_calls(kept), run.repeat
        if repeat is not None:
            repeat.begun = True
        try:
            with in_our_words():
                if wanted:
                    weights = weights / self.scale
                    sink = Reweighting(
                        len(losses), run.row_orders, kept, weights, add, run.calls, self._planner, finite
                    )
                    self._second_backward(losses, run, wanted, sink, retain_graph)
                if run.holds_graph and not retain_graph and len(wanted) < len(run.calls):
                    free_graph(losses, run.calls)
        finally:
            if repeat is not None:
                # Whatever else goes over this graph, after a failure, has gradients of its own.
                repeat.begun = False

    def _second_backward(
        self,
        losses: Tensor,
        run: NormCollector,
        wanted: list[LayerCall],
        sink: Reweighting,
        retain_graph: bool,
    ) -> None:
        """A backward to the ``wanted`` calls, whose sums are added to the p.grads."""
        # What all examples share is found by a pass over the whole graph.
        whole = len(wanted) == len(run.calls)
        ends = None if whole or isinstance(run.calls[-1], FallbackCall) else wanted
        first_pass(
            losses,
            run.calls,
            sink.receive,
            retain_graph=retain_graph or len(wanted) < len(run.calls),
            wanted=ends,
        )
        sink.finish()

    def _clip_groups(
        self, losses: Tensor, policy: Groupwise, retain_graph: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The same group by group; returns {group: norms [B]} and {group: weights [B]} of all groups.

        With thresholds each group is clipped as the first pass completes it. The graph stays until all norms are known:
        an example that turns out not to be finite in the last group is left out of all of them by another pass.
        """
        by = self._clip_by_thresholds if isinstance(policy, Thresholds) else self._clip_by_norms
        sums = by(losses, policy)
        if not retain_graph:
            self.free(losses, sums.calls)
        return self._groups_added(losses, sums)

    def _clip_by_thresholds(self, losses: Tensor, policy: Groupwise) -> GroupSums:
        sums = self.group_pass(losses, policy, None, None)
        found = self._finite_in_all(losses, sums.norms)
        exact = found is not None and not may_sync(losses.device)
        if exact:
            sums = self.group_pass(losses, policy, None, None, exact=True)
            found = self._finite_in_all(losses, sums.norms)
        return sums if found is None else self.group_pass(losses, policy, None, found, exact=exact)

    def _clip_by_norms(self, losses: Tensor, policy: Groupwise) -> GroupSums:
        norms, bounds, found = self._norms_of_groups(losses)
        exact = found is not None and not may_sync(losses.device)
        if exact:
            norms, bounds, found = self._norms_of_groups(losses, exact=True)
        sums = self.group_pass(losses, policy, policy.weights(bounds), found, exact=exact)
        # Those that the weights are of.
        sums.norms = {group: norms[group] * self.scale for group in sums.norms}
        return sums

    def _norms_of_groups(
        self, losses: Tensor, exact: bool = False
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor | None]:
        """{group: norms [B]}, the same with the rounding margin, and `_finite_in_all`; keeps the graph."""
        run = self.first_pass(losses, Wanted(exact=exact), retain_graph=True)
        norms, bounds = run.norms_and_bounds_by_group(self.partition())
        return norms, bounds, self._finite_in_all(losses, norms)

    def _finite_in_all(self, losses: Tensor, norms: Mapping[str, Tensor]) -> Tensor | None:
        """[B] bool, False for an example whose loss or norm in any group isn't finite; None where all are."""
        found = [losses.detach().to(norm_dtype(self.index.trained())), *norms.values()]
        return None if all_finite(*found) else torch.isfinite(torch.stack(found)).all(0)

    def _groups_added(self, losses: Tensor, sums: GroupSums) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Adds the sums to the p.grads; returns norms and weights of all groups, those that took no part included."""
        taken = sums.pop()
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
        if self.wide_sums is not None and parameter.dtype not in AT_LEAST_FLOAT32:
            if owner not in self.wide_sums:
                self.wide_sums[owner] = torch.zeros_like(parameter, dtype=torch.float32)
            self.wide_sums[owner][slice(*rows) if rows else ...] += amount


class Reweighting:
    """The sink of a second backward: clipped sums by each layer's rule, from the gradients that were measured.

    It starts from the losses as they are, not from weighted ones, so that every rounding error is the first pass's:
    what is summed has the norm that was measured. Reweighting the losses (Lee & Kifer 2020) is the same in exact
    arithmetic; in floating point an attention or a normalization of large, nearly constant or saturated inputs, or two
    branches that cancel, give mostly rounding errors, others for other weights, and one example could move the sum by
    many times the bound. Sums in narrow types are float32's here.

    Args:
        examples: B.
        row_orders: how each call's rows are grouped, by id(call).
        done: ids of parameters whose sums are known already.
        weights: [B].
        add: told (parameter id, rows or None) and what is to be added to its sum.
        calls: all uses in the graph; the sums of a parameter's uses are added up here, and rounded to its type once.
        finite: [B] bool, False for examples whose rows are replaced by zeros (0 * NaN is NaN); None when all count.
        planner: chooses the way to each sum.
    """

    def __init__(
        self,
        examples: int,
        row_orders: Mapping[int, str],
        done: Collection[int],
        weights: Tensor,
        add: Callable[[Part, Tensor], None],
        calls: Sequence[LayerCall],
        planner: Planner,
        finite: Tensor | None = None,
    ) -> None:
        self._examples, self._row_orders, self._done = examples, row_orders, done
        self._weights, self._add, self._planner, self._finite = weights, add, planner, finite
        self._waiting: list[tuple[list[int], LinearPair]] = []
        self._bytes = 0
        self._left = Counter([self._part(call, name) for call in calls for name in call.own])
        self._gathered: dict[Part, Tensor] = {}

    @torch.no_grad()
    def receive(self, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> None:
        """Takes the gradient at one pre-activation; called by the layer's node in the graph."""
        own = call.layer._parameters
        names = [name for name in call.own if id(own[name]) not in self._done]
        if not names:
            return
        inputs = tuple([tensor.detach() if tensor.requires_grad else tensor for tensor in inputs])
        if len(names) == len(call.parameters) and call.shape[call.batch_dim] == self._examples and not call.rows:
            affine = call.layer.linear_pair(call, inputs, grad)
            if affine is not None:
                affine = affine if self._finite is None else affine.keep_only(self._finite)
                self._waiting.append(([id(own[name]) for name in names], affine))
                self._bytes += affine.nbytes
                if self._bytes > POSTPONED_BYTES:
                    self.finish()
                return
        for name in names:
            term = call.term(name, inputs, grad)
            count = row_count(call, self._examples, name)
            if count != 1:
                term = term.split_rows(count, self._row_orders[id(call)])
            term = term if self._finite is None else term.keep_only(self._finite)
            self._take(self._part(call, name), self._planner.weighted_sum(term, self._weights))

    def _part(self, call: LayerCall, name: str) -> Part:
        return id(call.layer._parameters[name]), call.rows.get(name)

    def _take(self, part: Part, amount: Tensor) -> None:
        """Takes the sum of one use; hands on that of all uses with the last."""
        self._left[part] -= 1
        if part in self._gathered:
            amount = self._gathered.pop(part).add_(amount)
        if self._left[part] > 0:
            self._gathered[part] = amount
        else:
            self._add(part, amount)

    @torch.no_grad()
    def finish(self) -> None:
        """Answers for what waited; to be called when all gradients have come."""
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        if not waiting:
            return
        affines = [affine for _, affine in waiting]
        sums = weighted_sums_of(affines, [self._weights] * len(affines))
        for (owners, _), amounts in zip(waiting, sums, strict=True):
            for owner, amount in zip(owners, amounts, strict=True):
                self._take((owner, None), amount)
