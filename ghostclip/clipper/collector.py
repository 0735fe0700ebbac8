"""What a first pass gathers: squared norms as gradients arrive and, where asked, the terms of a clipped sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ghostclip.clipper.groupwise import POSTPONED_BYTES, GroupSums, Part
from ghostclip.clipper.wanted import Keep, Wanted
from ghostclip.graph.parameter_names import ParameterNames
from ghostclip.graph.row_layout import row_count
from ghostclip.nn.base import LayerCall
from ghostclip.norms.affine import LinearPair, squared_norms_of
from ghostclip.norms.combine import combine
from ghostclip.norms.dense import Dense
from ghostclip.norms.term import NormResult, PerExampleGrads
from ghostclip.planner import SOLE, Planner, StrategyChoice, kept_bytes

__all__ = ["NormCollector"]


def overlapping_parts(calls: Iterable[LayerCall]) -> set[int]:
    """Ids of parameters that were used by parts which overlap without being the same."""
    owners = [id(call.layer._parameters[name]) for call in calls for name in call.parameters]
    if len(set(owners)) == len(owners):
        return set()
    used: dict[int, set[tuple[int, int]]] = {}
    for call in calls:
        for name in call.parameters:
            if call.rows or id(call.layer._parameters[name]) in used:
                parameter = call.layer._parameters[name]
                assert parameter is not None
                used.setdefault(id(parameter), set()).add(call.rows.get(name, (0, parameter.shape[0])))
    found = set()
    for owner, spans in used.items():
        ordered = sorted(spans)
        if any(left[1] > right[0] for left, right in pairwise(ordered)):
            found.add(owner)
    return found


class NormCollector:
    """The sink of a first pass: answers for a parameter as soon as the gradient of its last use has come.

    Args:
        losses: [B].
        calls: all uses in the graph, so that it is known which is the last.
        row_orders: how each call's rows are grouped, by id(call).
        planner: chooses the way to each squared norm.
        index: of the model; parameters of another model, in a layer that shares one with ours, are passed over.
        wanted: what is to be found and kept.
        groups: takes all terms, to clip them group by group; nothing is kept here then.
        room: bytes that `Keep.SMALL` may take.
        watched: uses of which `reached` says whether a gradient other than zero came.
    """

    def __init__(
        self,
        losses: Tensor,
        calls: Sequence[LayerCall],
        row_orders: Mapping[int, str],
        planner: Planner,
        index: ParameterNames,
        *,
        wanted: Wanted,
        groups: GroupSums | None = None,
        room: int = 0,
        watched: Sequence[LayerCall] = (),
    ) -> None:
        self.examples, self.device = losses.shape[0], losses.device
        self.squared: list[tuple[list[int], Tensor]] = []
        self.absolute: list[tuple[int, Tensor]] = []
        self.terms: dict[Part, PerExampleGrads] = {}
        self.affines: list[tuple[list[int], LinearPair]] = []
        self.choices: dict[int, StrategyChoice] = {}
        self._wanted, self._groups, self._room = wanted, groups, room
        # What is computed again in order not to be kept is not kept here, either.
        packed = any(call.packed for call in calls) and groups is None and not wanted.materialise
        again = [call for call in calls if call.packed or call.rows] if packed else []
        self._not_kept = {id(call.layer._parameters[name]) for call in again for name in call.parameters}
        self._row_orders, self._planner, self._index = row_orders, planner, index
        self._padded = overlapping_parts(calls)
        # What each call used of parameters that are ours: in its own order, and by their names in that of `receive`.
        self._own = {id(call): self._used(call, groups is not None) for call in calls}
        self._left = Counter([part for parts, _ in self._own.values() for part in parts])
        self._waiting: dict[Part, list[PerExampleGrads]] = {}
        self._unanswered: list[tuple[list[Part], LinearPair]] = []
        self._unanswered_bytes = 0
        self._watched, self._arrived = set(map(id, watched)), list[Tensor]()
        if groups is not None:
            groups.expect(self._left)

    def _used(self, call: LayerCall, in_groups: bool) -> tuple[list[Part], list[tuple[str, Part]]]:
        own: Mapping[str, Any] = call.layer._parameters
        used = [(name, self._part(call, name)) for name in self._index.own_parameters(call)]
        # The largest first, which are the last to be worth keeping: what they hold is there for the others. Of a weight
        # and a bias in groups the weight comes last, so that its group may be complete with it.
        ordered = sorted(used, key=lambda each: -own[each[0]].numel())
        return [part for _, part in used], ordered[::-1] if in_groups and len(used) == 2 else ordered

    def _part(self, call: LayerCall, name: str) -> Part:
        owner = id(call.layer._parameters[name])
        return (owner, None) if owner in self._padded else (owner, call.rows.get(name))

    def receive(self, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> None:
        """Takes the gradient at one pre-activation; called by the layer's node in the graph."""
        if self._watched and id(call) in self._watched:
            self._arrived.append(grad.any())
        # Saved inputs still know their history; what is held must not keep that part of the graph alive.
        inputs = tuple([tensor.detach() if tensor.requires_grad else tensor for tensor in inputs])
        parts, used = self._own[id(call)]
        if self._answer_at_once(call, parts, inputs, grad):
            return
        held: set[int] = set()
        for name, part in used:
            term = self._term(call, name, inputs, grad)
            self._left[part] -= 1
            if self._left[part] or part in self._waiting:
                self._waiting.setdefault(part, []).append(term)
                if self._left[part]:
                    continue
                term = combine(self._waiting.pop(part))
            self._add(part, term, call.nbytes, held)

    def reached(self) -> bool:
        """Whether a watched use was given a gradient that isn't zero."""
        return bool(self._arrived) and bool(torch.stack(self._arrived).any())

    def _answer_at_once(self, call: LayerCall, parts: list[Part], inputs: tuple[Tensor, ...], grad: Tensor) -> bool:
        """The layer's own joint answer for all its parameters, where it has one and this is their only use."""
        if (
            self._wanted.materialise
            or call.shape[call.batch_dim] != self.examples
            or len(parts) != len(call.parameters)
        ):
            return False
        for part in parts:
            if self._left[part] != 1 or part in self._waiting or part[0] in self._not_kept:
                return False
        if self._groups is not None and not self._groups.are_one_group(parts):
            return False
        affine = call.layer.linear_pair(call, inputs, grad)
        if affine is None:
            return False
        for part in parts:
            self._left[part] = 0
        self._unanswered.append((parts, affine))
        self._unanswered_bytes += affine.nbytes
        if self._unanswered_bytes > POSTPONED_BYTES:
            self.finish()
        return True

    def finish(self) -> None:
        """Answers for what waited for company; to be called when the gradients of all calls have come."""
        waited, self._unanswered, self._unanswered_bytes = self._unanswered, [], 0
        if not waited:
            return
        together = squared_norms_of([affine for _, affine in waited])
        owners = [owner for parts, _ in waited for owner, _ in parts]
        self.squared.append((owners, together))
        self.choices.update(dict.fromkeys(owners, SOLE))
        if self._groups is not None:
            rows = torch.split_with_sizes(together, [len(parts) for parts, _ in waited])
            for (parts, affine), squared in zip(waited, rows, strict=True):
                self._groups.take(parts, squared, None, affine)
        elif self._wanted.keep is Keep.ALL:
            self.affines += [([owner for owner, _ in parts], affine) for parts, affine in waited]

    def _term(self, call: LayerCall, name: str, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        term = call.term(name, inputs, grad)
        count = row_count(call, self.examples, name)
        if count != 1:
            term = term.regroup(count, self._row_orders[id(call)])
        parameter = call.layer._parameters[name]
        assert parameter is not None
        if id(parameter) in self._padded:
            gradients = term.per_example()
            start, stop = call.rows.get(name, (0, parameter.shape[0]))
            full = gradients.new_zeros(gradients.shape[0], *parameter.shape)
            full[:, start:stop] = gradients
            term = Dense(full, term.absolute())
        return term

    def _note(self, part: Part, term: PerExampleGrads, answer: NormResult, choice: StrategyChoice) -> Tensor | None:
        """Takes the squared norms of a term; returns what their rounding margin follows from, [B], or None."""
        self.choices[part[0]] = choice
        absolute = self._absolute(term, answer)
        self.squared.append(([part[0]], answer.squared_norms))
        if absolute is not None:
            self.absolute.append((part[0], absolute))
        return absolute

    def _absolute(self, term: PerExampleGrads, answer: NormResult) -> Tensor | None:
        """`PerExampleGrads.absolute` where a margin is asked for, and gradients aren't summed as measured."""
        if not self._wanted.margin or answer.kept is not None:
            return None
        return term.absolute() if answer.absolute is None else answer.absolute

    @torch.no_grad()
    def measure_exactly(self) -> None:
        """Squared norms of all parameters once more, from what is kept of them all, in no form that may cancel."""
        self.squared, self.absolute = [], []
        for part, term in self.terms.items():
            answer, choice = self._planner.answer(term, False, exact=True)
            self._note(part, term, answer, choice)
        self.squared += [(owners, affine.squared_norms()) for owners, affine in self.affines]

    def weighted_sum(self, term: PerExampleGrads, weights: Tensor) -> Tensor:
        """The clipped sum [*shape] of a term that was held, for weights [B]."""
        return self._planner.weighted_sum(term, weights)

    def _add(self, part: Part, term: PerExampleGrads, layer_bytes: int, held: set[int]) -> None:
        """Takes the term of a parameter's last use.

        Args:
            part: the parameter, or its rows.
            term: of all its uses.
            layer_bytes: what the layer's pre-activation takes.
            held: addresses of tensors that kept terms of the same use hold on to; those of this one are added.
        """
        if self._wanted.materialise:
            self.terms[part] = Dense(term.per_example())
            return
        keep, room = self._may_keep(part, term, layer_bytes, held)
        answer, choice = self._planner.answer(term, keep, room, exact=self._wanted.exact)
        absolute = self._note(part, term, answer, choice)
        if keep and answer.kept is None:
            held.update(tensor.untyped_storage().data_ptr() for tensor in term.tensors)
        term = term if answer.kept is None else Dense(answer.kept)
        if self._groups is not None:
            self._groups.take([part], answer.squared_norms, absolute, term)
        elif keep and (self._wanted.keep is Keep.ALL or isinstance(term, Dense)):
            self.terms[part] = term
            self._room -= term.nbytes

    def _may_keep(self, part: Part, term: PerExampleGrads, layer_bytes: int, held: set[int]) -> tuple[bool, int]:
        """Whether a term may be kept, and how many bytes its materialised gradients may take."""
        if self._groups is None and self._wanted.keep is Keep.SMALL:
            bytes_ = kept_bytes(term)
            return part[1] is None and bytes_ <= min(self._room, layer_bytes), bytes_
        keep = self._groups is not None or (self._wanted.keep is Keep.ALL and part[0] not in self._not_kept)
        # No more than the tensors that it lets go of.
        tensors = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in term.tensors} if keep else {}
        return keep, sum([nbytes for address, nbytes in tensors.items() if address not in held])
