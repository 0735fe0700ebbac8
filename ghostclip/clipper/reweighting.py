"""The second pass of "reweight": clipped sums by each layer's rule, from the gradients that were measured.

It goes to the pre-activations once more, and each layer's clipped sum is formed as its gradient comes. It starts from
the losses as they are, not from weighted ones, so that every rounding error is the first pass's: what is summed has the
norm that was measured. Reweighting the losses (Lee & Kifer 2020) is the same in exact arithmetic; in floating point an
attention or a normalization of large, nearly constant or saturated inputs, or two branches that cancel, give mostly
rounding errors, others for other weights, and one example could move the sum by many times the bound. Sums in narrow
types are float32's here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from ghostclip.graph.parameter_names import ParameterNames
from ghostclip.graph.row_layout import row_count
from ghostclip.nn.base import LayerCall
from ghostclip.norms.affine import LinearPair, weighted_sums_of
from ghostclip.planner import Planner

__all__ = ["Reweighting"]

# Small layers wait for each other, up to so many bytes: one call serves all.
POSTPONED_BYTES = 1 << 20

# As in `ghostclip.clipper.groupwise`.
Part = tuple[int, tuple[int, int] | None]


class Reweighting:
    """The sink of a second pass.

    Args:
        examples: B.
        row_orders: how each call's rows are grouped, by id(call).
        index: of the model.
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
        index: ParameterNames,
        done: Collection[int],
        weights: Tensor,
        add: Callable[[Part, Tensor], None],
        calls: Sequence[LayerCall],
        planner: Planner,
        finite: Tensor | None = None,
    ) -> None:
        self._examples, self._row_orders, self._index, self._done = examples, row_orders, index, done
        self._weights, self._add, self._planner, self._finite = weights, add, planner, finite
        self._waiting: list[tuple[list[int], LinearPair]] = []
        self._bytes = 0
        self._left = Counter([self._part(call, name) for call in calls for name in index.own_parameters(call)])
        self._gathered: dict[Part, Tensor] = {}

    @torch.no_grad()
    def receive(self, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> None:
        """Takes the gradient at one pre-activation; called by the layer's node in the graph."""
        own = call.layer._parameters
        names = [name for name in self._index.own_parameters(call) if id(own[name]) not in self._done]
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
                term = term.regroup(count, self._row_orders[id(call)])
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
