"""The two passes over one graph: norms, weights, clipped sums (Lee & Kifer 2020, algorithm 1).

Norms come from a first pass (first_pass.py). Here they become weights, and weights become clipped sums. The caller gets
each sum as soon as it is formed: of a parameter, or of some rows of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.clipper.collector import Keep, Kept, NormCollector, TermReceiver
from ghostclip.clipper.first_pass import FirstPasses, translated_errors, without_autocast
from ghostclip.clipper.random_states import drawing_from
from ghostclip.clipping import Groupwise
from ghostclip.errors import RowsMovedError, UnsupportedModelError
from ghostclip.graph.alarm import figures
from ghostclip.graph.layouts import MOVED
from ghostclip.graph.marks import MarkScheme, compared, numbers
from ghostclip.graph.reader import backward_to_layers, free_graph
from ghostclip.graph.row_layout import RowLayout
from ghostclip.nn.base import LayerCall, Part
from ghostclip.norms.affine import LinearPair
from ghostclip.norms.precision import full_precision
from ghostclip.norms.reduce import all_finite
from ghostclip.norms.term import PerExampleGrads, may_sync
from ghostclip.sharding.plain import Add

__all__ = ["Add", "ParameterSums", "Reweighting", "TwoPasses"]

MARKS = MarkScheme()


class ParameterSums:
    """Adds up parts of sums, in float32 or wider.

    Args:
        parameters: {id: Parameter}, of all that a part may come of.

    Attributes:
        totals: {id of a parameter: its sum}, of those that a part came of.
    """

    def __init__(self, parameters: Mapping[int, nn.Parameter]) -> None:
        self._parameters = parameters
        self.totals: dict[int, Tensor] = {}

    def add(self, part: Part, amount: Tensor) -> None:
        """Adds a part's amount; the first one of a whole parameter is kept as it is."""
        owner, rows = part
        parameter = self._parameters[owner]
        amount = amount.to(torch.promote_types(parameter.dtype, torch.float32))
        if owner in self.totals:
            self.totals[owner][slice(*rows) if rows else ...] += amount
        elif rows is None:
            # An optimizer is slow on gradients that lie otherwise than their parameters, as those of convolutions may.
            self.totals[owner] = amount if amount.stride() == parameter.stride() else amount.contiguous()
        else:
            # Not zeros_like: the memory of a sharded model's whole Parameter may be freed.
            total = self.totals[owner] = torch.zeros(parameter.shape, dtype=amount.dtype, device=amount.device)
            total[slice(*rows)] = amount


class TwoPasses(FirstPasses):
    """Clips the gradients behind losses of one model, by one policy.

    Arguments, and all other attributes, are those of `FirstPasses`.

    Attributes:
        left_out: whether the last `clip` left out an example that wasn't finite.
        threshold_factor: the thresholds in force over the policy's. The policy is given norms divided by it.
    """

    left_out: bool = False
    threshold_factor: float = 1.0

    @property
    def sensitivity(self) -> float:
        """The L2 bound on one example's weighted gradient."""
        return self.clipping.sensitivity * self.threshold_factor

    def scaled(self, norms: Any) -> Any:
        """Norms, [B] or {group: [B]}, as the policy gets them."""
        return norms if self.threshold_factor == 1.0 else _each(norms, lambda norm: norm / self.threshold_factor)

    def clip(self, losses: Tensor, add: Add, *, retain_graph: bool) -> tuple[Any, Any]:
        """Hands the clipped sum of losses [B] to ``add``; returns norms and weights, [B] or {group: [B]}."""
        with without_autocast(losses), self.sharding.unsharded_parameters():
            run, norms, bounds, finite = self._first_pass(losses, retain_graph)
            weights: Any = self.clipping.weights(self.scaled(bounds))
            self.left_out = finite is not None
            if finite is not None:
                weights = _each(weights, lambda weight: torch.where(finite, weight, torch.zeros_like(weight)))
            self._sum(run, weights, finite, retain_graph, add, norms)
            return norms, weights

    def new_sums(self) -> ParameterSums:
        """An empty accumulator, whose ``add`` is to be given to `clip`."""
        return ParameterSums(self.parameters)

    def _first_pass(self, losses: Tensor, retain_graph: bool) -> tuple[NormCollector, Any, Any, Tensor | None]:
        """A first pass, its `norms_and_bounds`, and which examples are finite, [B]; None where all are."""
        run = self.first_pass(losses, Keep.CHOSEN, retain_graph=retain_graph)
        norms, bounds = self.norms_and_bounds(run)
        finite = self._looked_at(run, norms, losses)
        if finite is not None and not may_sync(losses.device):
            # Norms again, by no form whose terms may cancel: from the kept terms, or by another first pass.
            if run.unkept_calls():
                run = self.first_pass(losses, Keep.CHOSEN, exact=True, retain_graph=True)
            else:
                run.measure_exactly()
            norms, bounds = self.norms_and_bounds(run)
            finite = _finite(norms, losses)
        return run, norms, bounds, finite

    def _looked_at(self, run: NormCollector, norms: Any, losses: Tensor) -> Tensor | None:
        """Which examples are finite, [B]; None where all are. One look at the device, as a rule.

        Raises:
            RowsMovedError: norms, [B] or {group: [B]}, follow the marks that the pass started from.
        """
        if run.marks is None and not run.layout.measured:
            return _finite(norms, losses)
        whole = _whole(norms)
        # A sum is finite only where all that goes into it is.
        total = whole.sum() + losses.detach().sum().to(whole.dtype)
        first, *found = torch.cat([total.reshape(1), figures(whole, run.marks)]).tolist()
        stays = run.holds_graph
        self._layouts.check_norms(
            run.structure, found, len(losses), measured=run.marks is None, again=stays or self.forward is not None,
            graph_stays=stays,
        )  # fmt: skip
        return None if math.isfinite(first) else _finite(norms, losses)

    def unclipped(self, losses: Tensor, groups: Mapping[int, str]) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
        """Norms [B] by group, and sums ``sum_i g_i`` over the finite examples; keeps the graph.

        Args:
            losses: [B].
            groups: {id of a trained parameter: group}.

        Returns:
            {group: [B]} and {id of a parameter: sum}, float32 or wider.
        """
        with without_autocast(losses), self.sharding.unsharded_parameters():
            run, norms, _, finite = self._first_pass(losses, retain_graph=True)
            by_group, _ = run.norms_by_group(groups)
            some = next(iter(norms.values())) if isinstance(norms, dict) else norms
            weights = torch.ones_like(some) if finite is None else finite.to(some.dtype)
            sums = self.new_sums()
            self._sum(run, weights, finite, True, sums.add, norms)
            return by_group, sums.totals

    def weighted_sums(self, weights: Any, run: NormCollector) -> list[tuple[Part, Tensor]]:
        """``sum_i weights[i] g_i`` of all parts, formed as `clip` forms them after this first pass; keeps the graph."""
        found: list[tuple[Part, Tensor]] = []
        self._sum(run, weights, None, True, lambda *each: found.append(each))
        return found

    def norms_and_bounds(self, run: NormCollector) -> tuple[Any, Any]:
        """Norms of a first pass as measured and with the rounding margin, [B] or {group: [B]}."""
        return run.norms_by_group(self.group_of()) if isinstance(self.clipping, Groupwise) else run.norms_and_bounds()

    def _sum(
        self, run: NormCollector, weights: Any, finite: Tensor | None, retain_graph: bool, add: Add, norms: Any = None
    ) -> None:
        """Hands the clipped sums to ``add``: of what the first pass kept, and of the rest by a second backward.

        That ends at the lowest layer that it is needed for. ``weights`` are [B] or {group: [B]}, ``finite`` is as
        `WeightedSums` has it.
        """
        sums = WeightedSums(self._by_owner(weights, run.scale), finite)
        done, wanted = run.kept_owners, run.unkept_calls()
        sums.of_kept(run.kept, add)
        # Where nothing can run the forward again, the graph stays until the second backward has checked all rows.
        losses, needed = run.losses, run.seen is not None and self.forward is None
        # A pass to its end frees the graph as it goes. To free it later would compute checkpointed blocks once more.
        frees = bool(wanted) and run.random_states is not None and not (retain_graph or needed)
        whole = frees or len(wanted) == len(run.calls)
        with translated_errors(), self.sharding.unsharded_parameters():
            if wanted:
                marks = None if run.seen is None else MARKS.drawn(losses, sizes=_whole(norms))
                scale = self.scale if marks is None else self.scale * marks
                sums = WeightedSums(self._by_owner(weights, scale), finite)
                times = None if marks is None or run.marks is None else marks / run.marks
                sink = Reweighting(run.layout, done, sums, add, run.seen, times)
                keep, ends = retain_graph or needed or not whole, None if whole else wanted
                with nullcontext() if run.random_states is None else drawing_from(run.random_states):
                    backward_to_layers(losses, run.calls, sink.receive, marks, retain_graph=keep, wanted=ends)
                if sink.off and bool(torch.stack(sink.off).any()):
                    self._layouts.measure_next(run.structure)
                    raise RowsMovedError(MOVED, graph_stays=keep)
            if run.holds_graph and not retain_graph and (needed or not whole):
                free_graph(losses, run.calls)

    def _by_owner(self, weights: Any, scale: float | Tensor) -> Mapping[int, Tensor]:
        """{id of a parameter: weights [B] of gradients that are ``scale`` times as large}."""
        if isinstance(scale, Tensor) or scale != 1.0:
            weights = _each(weights, lambda weight: weight / scale)
        if isinstance(weights, Tensor):
            return Weights.fromkeys(self.parameters, weights)
        return Weights({owner: weights[group] for owner, group in self.group_of().items()})


class Weights(dict[int, Tensor]):
    """{id of a parameter: weights [B]} of those that are trained now."""

    def __missing__(self, owner: int) -> Tensor:
        raise UnsupportedModelError(
            "a parameter was frozen between the forward and the backward, so that it would count in the norms, not in "
            "the sums; freeze it before the forward, or compute the losses again"
        )


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
        """Adds the weighted sums of the terms that a first pass kept; each is freed once it is summed."""
        if not kept:
            return
        (owner, _), *_ = next(iter(kept))
        with full_precision(self.weights[owner].device):
            while kept:
                parts, term = kept.popitem()
                if isinstance(term, LinearPair):
                    self.of_pair(parts, term, add)
                else:
                    add(parts[0], self.of(parts[0], term))

    def of(self, part: Part, term: PerExampleGrads) -> Tensor:
        """The weighted sum of one term."""
        term = term if self.finite is None else term.keep_only(self.finite)
        return term.weighted_sum(self.weights[part[0]])

    def of_pair(self, parts: Sequence[Part], pair: LinearPair, add: Add) -> None:
        """Adds the weighted sums of a linear layer's parameters, by one product where they have the same weights."""
        pair = pair if self.finite is None else pair.keep_only(self.finite)
        weights = [self.weights[owner] for owner, _ in parts]
        if len(set(map(id, weights))) == 1:
            found = pair.weighted_sums(weights[0])
        else:
            alone = [replace(pair, names=(name,)) for name in pair.names]
            found = [one.weighted_sums(each)[0] for one, each in zip(alone, weights, strict=True)]
        for part, amount in zip(parts, found, strict=True):
            add(part, amount)


class Reweighting(TermReceiver):
    """The sink of a second backward: clipped sums by each layer's rule, from the gradients that were measured.

    It starts from the losses as they are, not from weighted ones, so that rounding errors are those of the first pass:
    what is summed has the norm that was measured. In exact arithmetic, reweighting the losses (Lee & Kifer 2020) gives
    the same. In floating point, gradients below an attention or a normalization of large, nearly constant or saturated
    inputs are mostly rounding errors. Weighted losses round in another way, and the sum of an example could exceed its
    measured norm many times. Sums of narrow types are formed in float32.

    Args:
        layout: the first pass's.
        done: ids of parameters whose sums are known already.
        sums: how terms are summed.
        add: called once for each part, after its last use, with the sum over all uses, which is then rounded to the
            parameter's type once.
        seen: what the first pass noted of rows; None: nothing is checked.
        times: [B], how many times as large each example's gradients are as in the first pass; None where that isn't
            looked at.

    Attributes:
        off: whether some row of each subject didn't follow the mark of its example, bool [].
    """

    def __init__(
        self, layout: RowLayout, done: frozenset[int], sums: WeightedSums, add: Add,
        seen: Mapping[Any, Any] | None = None, times: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(layout, without=done)
        self._sums, self._add, self._seen, self._times = sums, add, seen, times
        self._sum_of_uses: dict[Part, Tensor] = {}  # so far, of parts that are used again
        self.off: list[Tensor] = []
        if seen is not None and times is not None:
            self.show_rows()

    def look(self, subject: Any, grad: Tensor) -> None:
        """Holds the rows of a subject against what the first pass noted."""
        if self._seen is None or self._times is None or subject not in self._seen:
            return
        rows = self.layout.rows[subject]
        owner = rows.owners(grad.shape[rows.dim] if grad.dim() else 1, len(self._times), grad.device)
        found = compared(self._seen[subject], numbers(grad, rows.dim), self._times[owner], MARKS)
        self.off.append(found.off.any())

    def _take_pair(self, parts: Sequence[Part], pair: LinearPair) -> None:
        self._sums.of_pair(parts, pair, self._add)

    def _take(self, call: LayerCall, name: str, part: Part, term: PerExampleGrads) -> None:
        amount = self._sums.of(part, term)
        self._uses_to_come[part] -= 1
        if part in self._sum_of_uses:
            amount = self._sum_of_uses.pop(part).add_(amount)
        if self._uses_to_come[part]:
            self._sum_of_uses[part] = amount
        else:
            self._add(part, amount)


def _each(values: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``function`` of [B], or {group: function of [B]}. torch's tree_map leaves cycles, for Python to collect."""
    if isinstance(values, dict):
        return {group: function(value) for group, value in values.items()}
    return function(values)


def _whole(norms: Any) -> Tensor:
    """[B], of norms [B] or {group: [B]}."""
    if not isinstance(norms, dict):
        return norms
    parts = [*norms.values()]
    return parts[0] if len(parts) == 1 else torch.stack(parts).norm(dim=0)


def _finite(norms: Any, losses: Tensor) -> Tensor | None:
    """[B] bool, False for an example whose loss or norm, in any group, isn't finite; None where all are."""
    found = [*(norms.values() if isinstance(norms, dict) else [norms]), losses.detach()]
    return None if all_finite(*found) else torch.stack([each.isfinite() for each in found]).all(0)
