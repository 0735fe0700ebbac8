"""The two passes over one graph: norms, weights, clipped sums (Lee & Kifer 2020, algorithm 1).

Norms come from a first pass (first_pass.py); here they become weights, and weights become sums in the p.grads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ghostclip.clipper.first_pass import FirstPasses, without_autocast
from ghostclip.clipper.gradient_guard import have_hooks
from ghostclip.clipper.groupwise import GroupSums, Part
from ghostclip.clipper.outcome import FirstPass, add_to_gradient, norm_dtype
from ghostclip.clipper.reweighting import Reweighting
from ghostclip.clipper.torch_errors import in_our_words
from ghostclip.clipper.wanted import Keep, Wanted
from ghostclip.clipping import Groupwise, Policy, Thresholds
from ghostclip.errors import PrivacyError
from ghostclip.graph.reader import WIDE, first_pass, free_graph
from ghostclip.nn.base import LayerCall
from ghostclip.nn.fallback import FallbackCall
from ghostclip.norms.host_sync import may_sync
from ghostclip.norms.whole import all_finite

__all__ = ["TwoPasses"]


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

    def _exactly(self, losses: Tensor, run: FirstPass) -> FirstPass:
        """The first pass with norms in no form that may cancel: from what it kept, or by another one."""
        if not run.keeps_all:
            return self.first_pass(losses, Wanted(Keep.CHOSEN, exact=True), retain_graph=True)
        run.measure_exactly()
        return run

    def weighted_sums(self, losses: Tensor, weights: Tensor, run: FirstPass) -> list[tuple[Part, Tensor]]:
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
        run: FirstPass,
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
                        len(losses), run.row_orders, self.index, kept, weights, add, run.calls, self._planner, finite
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
        run: FirstPass,
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
