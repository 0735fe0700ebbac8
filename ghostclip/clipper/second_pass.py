"""The two passes over one graph: norms, weights, clipped sums (Lee & Kifer 2020, algorithm 1).

Norms come from a first pass (first_pass.py); here they become weights, and weights become sums in the p.grads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ghostclip.clipper.collector import Keep, Kept, NormCollector, Part, TermReceiver
from ghostclip.clipper.first_pass import FirstPasses, in_our_words, without_autocast
from ghostclip.clipper.gradient_guard import have_hooks, is_distributed
from ghostclip.clipping import Groupwise
from ghostclip.errors import PrivacyError
from ghostclip.graph.reader import AT_LEAST_FLOAT32, first_pass, free_graph
from ghostclip.graph.row_layout import RowLayout
from ghostclip.nn.base import LayerCall
from ghostclip.norms.affine import LinearPair
from ghostclip.norms.precision import full_precision
from ghostclip.norms.reduce import all_finite
from ghostclip.norms.term import PerExampleGrads, may_sync

__all__ = ["Reweighting", "TwoPasses", "add_to_gradient"]

# Takes a part and what is to be added to its sum.
Add = Callable[[Part, Tensor], None]


class TwoPasses(FirstPasses):
    """Clips the gradients behind losses of one model, by one policy.

    Arguments, and all other attributes, are those of `FirstPasses`.

    Attributes:
        wide_sums: None, or, after `reduce_apart`, what that returned.
        deliver: gets the sums in the place of the p.grads; None: they are added to these.
        threshold_factor: the thresholds over the policy's, which is applied to gradients divided by it.
    """

    wide_sums: dict[int, Tensor] | None = None
    deliver: Add | None = None
    threshold_factor: float = 1.0

    @property
    def sensitivity(self) -> float:
        """The L2 bound on one example's weighted gradient."""
        return self.clipping.sensitivity * self.threshold_factor

    def scaled(self, norms: Any) -> Any:
        """Norms, [B] or {group: [B]}, as the policy gets them."""
        return norms if self.threshold_factor == 1.0 else tree_map(lambda each: each / self.threshold_factor, norms)

    def reduce_apart(self) -> dict[int, Tensor]:
        """From now on the caller adds up the sums of several processes itself, so that no backward delivers them.

        Returns where sums of parameters narrower than float32 are gathered in float32, by the parameter's id.
        """
        self.wide_sums = {}
        return self.wide_sums

    def clip(self, losses: Tensor, *, retain_graph: bool) -> tuple[Any, Any]:
        """Adds the clipped sum of losses [B] to each p.grad; returns norms and weights, [B] or {group: [B]}."""
        if self.wide_sums is not None:
            self.wide_sums.clear()
        delivered = self._are_delivered()
        with without_autocast(losses), self.placed():
            run, norms, bounds, finite = self._measured(losses, retain_graph)
            weights: Any = self.clipping.weights(self.scaled(bounds))
            if finite is not None:
                weights = tree_map(lambda each: torch.where(finite, each, torch.zeros_like(each)), weights)
            if not delivered:
                self._sum(losses, run, weights, finite, retain_graph, self.deliver or self._add)
                return norms, weights
            totals: dict[int, Tensor] = {}
            self._sum(losses, run, weights, finite, retain_graph, partial(self._gather, totals))
            if totals:
                parameters = [self._parameters[owner] for owner in totals]
                sums = [total.to(parameter.dtype) for parameter, total in zip(parameters, totals.values(), strict=True)]
                torch.autograd.backward(parameters, sums)
            return norms, weights

    def _measured(self, losses: Tensor, retain_graph: bool) -> tuple[NormCollector, Any, Any, Tensor | None]:
        """A first pass, its `norms_and_bounds`, and which examples are finite, [B]; None where all are."""
        run = self.first_pass(losses, Keep.CHOSEN, retain_graph=retain_graph)
        norms, bounds = self.norms_and_bounds(run)
        finite = _finite(norms, losses)
        if finite is not None and not may_sync(losses.device):
            # In no form that may cancel: from what was kept, or by another first pass.
            if run.unkept_calls():
                run = self.first_pass(losses, Keep.CHOSEN, exact=True, retain_graph=True)
            else:
                run.measure_exactly()
            norms, bounds = self.norms_and_bounds(run)
            finite = _finite(norms, losses)
        return run, norms, bounds, finite

    def unclipped(self, losses: Tensor, groups: Mapping[int, str]) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
        """Norms [B] by group, and sums ``sum_i g_i`` over the finite examples; keeps the graph, and changes no p.grad.

        Args:
            losses: [B].
            groups: {id of a trained parameter: group}.

        Returns:
            {group: [B]} and {id of a parameter: sum}, float32 or wider.
        """
        with without_autocast(losses), self.placed():
            run, norms, _, finite = self._measured(losses, retain_graph=True)
            by_group, _ = run.norms_by_group(groups)
            some = next(iter(norms.values())) if isinstance(norms, dict) else norms
            weights = torch.ones_like(some) if finite is None else finite.to(some.dtype)
            totals: dict[int, Tensor] = {}
            self._sum(losses, run, weights, finite, True, partial(self._gather, totals))
            return by_group, totals

    def weighted_sums(self, losses: Tensor, weights: Any, run: NormCollector) -> list[tuple[Part, Tensor]]:
        """``sum_i weights[i] g_i`` of all parts, formed as `clip` forms them after this first pass; keeps the graph."""
        found: list[tuple[Part, Tensor]] = []
        self._sum(losses, run, weights, None, True, lambda *each: found.append(each))
        return found

    def _are_delivered(self) -> bool:
        """Whether hooks on parameters, or other processes, wait for gradients: autograd delivers the finished sums.

        A hook runs once, on the sum over all uses and examples; and so does DistributedDataParallel's reducer. What a
        hook makes of a clipped sum, nothing bounds any more: PrivacyError, where the sums are to get noise.
        """
        trained = self.index.trained()
        hooked = have_hooks([parameter for _, parameter in trained])
        if hooked and self.wide_sums is not None:
            name = next(name for name, parameter in trained if have_hooks([parameter]))
            raise PrivacyError(
                f"the parameter {name!r} has a hook, which may change its clipped sum before the noise is added; "
                "remove it (to train a part of the model, set requires_grad=False on the rest)"
            )
        return hooked or (is_distributed() and self.wide_sums is None)

    def norms_and_bounds(self, run: NormCollector) -> tuple[Any, Any]:
        """Norms of a first pass as measured and with the rounding margin, [B] or {group: [B]}."""
        return run.norms_by_group(self.group_of()) if isinstance(self.clipping, Groupwise) else run.norms_and_bounds()

    def _sum(
        self, losses: Tensor, run: NormCollector, weights: Any, finite: Tensor | None, retain_graph: bool, add: Add
    ) -> None:
        """Hands the clipped sums to ``add``: of what the first pass kept, and of the rest by a second backward.

        That ends at the lowest layer that it is needed for. ``weights`` are [B] or {group: [B]}, ``finite`` is as
        `WeightedSums` has it.
        """
        scaled = weights if self.scale == 1.0 else tree_map(lambda each: each / self.scale, weights)
        if isinstance(scaled, Tensor):
            by_owner = dict.fromkeys(self._parameters, scaled)
        else:
            by_owner = {owner: scaled[group] for owner, group in self.group_of().items()}
        sums, repeat = WeightedSums(by_owner, finite), run.repeat
        done, wanted = run.kept_owners, run.unkept_calls()
        sums.of_kept(run.kept, add)
        losses = self._scaled(losses)
        whole = len(wanted) == len(run.calls)
        if repeat is not None:
            repeat.begun = True
        try:
            with in_our_words(), self.placed():
                if wanted:
                    sink = Reweighting(run.layout, done, sums, add)
                    keep, ends = retain_graph or not whole, None if whole else wanted
                    with nullcontext() if run.random_states is None else run.random_states.again():
                        first_pass(losses, run.calls, sink.receive, retain_graph=keep, wanted=ends)
                if run.holds_graph and not retain_graph and not whole:
                    free_graph(losses, run.calls)
        finally:
            if repeat is not None:
                # Whatever else goes over this graph, after a failure, has gradients of its own.
                repeat.begun = False

    def _add(self, part: Part, amount: Tensor) -> None:
        """Adds a part's sum to its p.grad; with ``wide_sums``, those of narrow parameters are gathered there, too."""
        owner, rows = part
        parameter = self._parameters[owner]
        add_to_gradient(parameter, rows, amount)
        if self.wide_sums is not None and parameter.dtype not in AT_LEAST_FLOAT32:
            self._gather(self.wide_sums, part, amount)

    def _gather(self, totals: dict[int, Tensor], part: Part, amount: Tensor) -> None:
        """Adds a part's sum to its parameter's in ``totals``, in the precision that it was formed in."""
        owner, rows = part
        if owner not in totals:
            totals[owner] = torch.zeros_like(self._parameters[owner], dtype=amount.dtype)
        totals[owner][slice(*rows) if rows else ...] += amount


def add_to_gradient(parameter: nn.Parameter, rows: tuple[int, int] | None, amount: Tensor) -> None:
    """``amount`` added to p.grad, or to the given rows of it, in the parameter's dtype."""
    if amount.dtype != parameter.dtype:
        amount = amount.to(parameter.dtype)
    if rows is None:
        if parameter.grad is None:
            parameter.grad = amount if amount.is_contiguous() else amount.contiguous()
        else:
            parameter.grad += amount
        return
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    parameter.grad[slice(*rows)] += amount


@dataclass(frozen=True)
class WeightedSums:
    """Clipped sums of terms.

    Attributes:
        weights: [B] by the id of the parameter, zero for examples that are left out.
        finite: [B] bool, False for examples whose rows are replaced by zeros (0 * NaN is NaN); None when all count.
    """

    weights: Mapping[int, Tensor]
    finite: Tensor | None

    @torch.no_grad()
    def of_kept(self, kept: Kept, add: Add) -> None:
        """Those of what a first pass kept, which is let go of one after another."""
        if not kept:
            return
        with full_precision(next(iter(self.weights.values())).device):
            while kept:
                parts, term = kept.popitem()
                if isinstance(term, LinearPair):
                    self.of_pair(parts, term, add)
                else:
                    add(parts[0], self.of(parts[0], term))

    def of(self, part: Part, term: PerExampleGrads) -> Tensor:
        """That of one term."""
        term = term if self.finite is None else term.keep_only(self.finite)
        return term.weighted_sum(self.weights[part[0]])

    def of_pair(self, parts: Sequence[Part], pair: LinearPair, add: Add) -> None:
        """Those of a linear layer's parameters, at once where they have the same weights."""
        pair = pair if self.finite is None else pair.keep_only(self.finite)
        weights = [self.weights[owner] for owner, _ in parts]
        if all(each is weights[0] for each in weights):
            found = pair.weighted_sums(weights[0])
        else:
            alone = [replace(pair, names=(name,)) for name in pair.names]
            found = [one.weighted_sums(each)[0] for one, each in zip(alone, weights, strict=True)]
        for part, amount in zip(parts, found, strict=True):
            add(part, amount)


class Reweighting(TermReceiver):
    """The sink of a second backward: clipped sums by each layer's rule, from the gradients that were measured.

    It starts from the losses as they are, not from weighted ones, so that every rounding error is the first pass's:
    what is summed has the norm that was measured. Reweighting the losses (Lee & Kifer 2020) is the same in exact
    arithmetic; in floating point an attention or a normalization of large, nearly constant or saturated inputs, or two
    branches that cancel, give mostly rounding errors, others for other weights, and one example could move the sum by
    many times the bound. Sums in narrow types are float32's here.

    Args:
        layout: the first pass's.
        done: ids of parameters whose sums are known already.
        sums: how terms are summed.
        add: takes a part and what is to be added to its sum: that of all uses, to be rounded to its type once.
    """

    def __init__(self, layout: RowLayout, done: frozenset[int], sums: WeightedSums, add: Add) -> None:
        super().__init__(layout, without=done)
        self._sums, self._add = sums, add
        self._gathered: dict[Part, Tensor] = {}

    def _take_pair(self, parts: Sequence[Part], pair: LinearPair) -> None:
        self._sums.of_pair(parts, pair, self._add)

    def _take(self, call: LayerCall, terms: Iterable[tuple[str, Part, PerExampleGrads]]) -> None:
        for _, part, term in terms:
            amount = self._sums.of(part, term)
            self._left[part] -= 1
            if part in self._gathered:
                amount = self._gathered.pop(part).add_(amount)
            if self._left[part]:
                self._gathered[part] = amount
            else:
                self._add(part, amount)


def _finite(norms: Any, losses: Tensor) -> Tensor | None:
    """[B] bool, False for an example whose loss or norm, in any group, isn't finite; None where all are."""
    found = [*(norms.values() if isinstance(norms, dict) else [norms]), losses.detach()]
    return None if all_finite(*found) else torch.stack([each.isfinite() for each in found]).all(0)
