"""What a first pass gathers as gradients arrive: squared norms and, where asked, the terms of a clipped sum."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.clipper.groupwise import POSTPONED_BYTES, GroupSums, Part
from ghostclip.graph.row_layout import overlapping_parts, row_count
from ghostclip.nn.base import LayerCall, Repeat
from ghostclip.norms.affine import LinearPair, squared_norms_of, weighted_sums_of
from ghostclip.norms.combine import combine
from ghostclip.norms.reduce import norms, rounding_margin
from ghostclip.norms.term import Dense, NormResult, PerExampleGrads, to_float32
from ghostclip.planner import SOLE, Planner, StrategyChoice, kept_bytes

__all__ = ["Keep", "NormCollector", "Wanted", "norm_dtype"]


class Keep(enum.Enum):
    """Which per-example gradients are kept.

    NOTHING: none outlives its layer.
    SMALL: materialised ones that are smaller than their pre-activation gradient ("reweight").
    ALL: each parameter's: the pre-activation gradient with the layer's input, or materialised gradients that take no
        more bytes than both ("cached").
    CHOSEN: SMALL or ALL, by the clipper's ``second_pass`` and ``memory_budget``.
    """

    NOTHING = enum.auto()
    SMALL = enum.auto()
    ALL = enum.auto()
    CHOSEN = enum.auto()


@dataclass(frozen=True)
class Wanted:
    """What a first pass is for.

    Attributes:
        keep: which per-example gradients are kept.
        materialise: materialise and keep every per-example gradient, and find no norms.
        margin: also gather what the rounding margin of weights follows from (`ghostclip.norms.reduce`).
        exact: use no form of a norm that may cancel, and wait for a GPU where that takes it.
    """

    keep: Keep = Keep.NOTHING
    materialise: bool = False
    margin: bool = True
    exact: bool = False


def norm_dtype(trained: Sequence[tuple[str, nn.Parameter]]) -> torch.dtype:
    """float64 as soon as one parameter is, else float32."""
    double = any(parameter.dtype == torch.float64 for _, parameter in trained)
    return torch.float64 if double else torch.float32


def owners_of(call: LayerCall) -> list[int]:
    """Ids of the parameters a call used."""
    return [id(call.layer._parameters[name]) for name in call.parameters]


class NormCollector:
    """Answers for a parameter as soon as the gradient of its last use has come, and knows the norms when all came.

    Args:
        losses: [B].
        calls: all uses in the graph, so that it is known which is the last.
        row_orders: how each call's rows are grouped, by id(call).
        planner: chooses the way to each squared norm.
        trained: the model's trained parameters by name.
        scale: what the losses were multiplied with, and results are divided by.
        wanted: what is to be found and kept.
        groups: takes all terms, to clip them group by group; nothing is kept here then.
        room: bytes that `Keep.SMALL` may take.
        watched: uses of which `reached` says whether a gradient other than zero came.

    Attributes:
        calls, row_orders: as given.
        choices: what the planner chose, by the id of the parameter.
        holds_graph: whether the graph is still there, though it may not have been asked for.
        repeat: what a second backward over this graph repeats; None where none may follow.
    """

    def __init__(
        self,
        losses: Tensor,
        calls: Sequence[LayerCall],
        row_orders: Mapping[int, str],
        planner: Planner,
        trained: Sequence[tuple[str, nn.Parameter]],
        scale: float,
        *,
        wanted: Wanted,
        groups: GroupSums | None = None,
        room: int = 0,
        watched: Sequence[LayerCall] = (),
    ) -> None:
        self._examples, self._device, self._scale = losses.shape[0], losses.device, scale
        self.calls, self.row_orders, self.holds_graph = calls, row_orders, True
        self.repeat: Repeat | None = None
        self._trained, self._dtype = trained, norm_dtype(trained)
        self._squared: list[tuple[list[int], Tensor]] = []
        self._absolute: list[tuple[int, Tensor]] = []
        self._terms: dict[Part, PerExampleGrads] = {}
        self._affines: list[tuple[list[int], LinearPair]] = []
        self.choices: dict[int, StrategyChoice] = {}
        self._wanted, self._groups, self._room = wanted, groups, room
        # What is computed again in order not to be kept is not kept here, either.
        hooked = any(call.has_saved_tensor_hooks for call in calls) and groups is None and not wanted.materialise
        again = [call for call in calls if call.has_saved_tensor_hooks or call.rows] if hooked else []
        self._not_kept = {id(call.layer._parameters[name]) for call in again for name in call.parameters}
        self._planner = planner
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
        used = [(name, self._part(call, name)) for name in call.own]
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
            or call.shape[call.batch_dim] != self._examples
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
        self._squared.append((owners, together))
        self.choices.update(dict.fromkeys(owners, SOLE))
        if self._groups is not None:
            rows = torch.split_with_sizes(together, [len(parts) for parts, _ in waited])
            for (parts, affine), squared in zip(waited, rows, strict=True):
                self._groups.add(parts, squared, None, affine)
        elif self._wanted.keep is Keep.ALL:
            self._affines += [([owner for owner, _ in parts], affine) for parts, affine in waited]

    def _term(self, call: LayerCall, name: str, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        term = call.term(name, inputs, grad)
        count = row_count(call, self._examples, name)
        if count != 1:
            term = term.split_rows(count, self.row_orders[id(call)])
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
        self._squared.append(([part[0]], answer.squared_norms))
        # Materialised gradients are summed as they were measured.
        if not self._wanted.margin or answer.kept is not None:
            return None
        absolute = term.absolute() if answer.absolute is None else answer.absolute
        if absolute is not None:
            self._absolute.append((part[0], absolute))
        return absolute

    @torch.no_grad()
    def measure_exactly(self) -> None:
        """Squared norms of all parameters once more, from what is kept of them all, in no form that may cancel."""
        self._squared, self._absolute = [], []
        for part, term in self._terms.items():
            answer, choice = self._planner.answer(term, False, exact=True)
            self._note(part, term, answer, choice)
        self._squared += [(owners, squared_norms_of([affine])) for owners, affine in self._affines]

    def _add(self, part: Part, term: PerExampleGrads, layer_bytes: int, held: set[int]) -> None:
        """Takes the term of a parameter's last use.

        Args:
            part: the parameter, or its rows.
            term: of all its uses.
            layer_bytes: what the layer's pre-activation takes.
            held: addresses of tensors that kept terms of the same use hold on to; those of this one are added.
        """
        if self._wanted.materialise:
            self._terms[part] = Dense(term.per_example())
            return
        keep, room = self._may_keep(part, term, layer_bytes, held)
        answer, choice = self._planner.answer(term, keep, room, exact=self._wanted.exact)
        absolute = self._note(part, term, answer, choice)
        if keep and answer.kept is None:
            held.update(tensor.untyped_storage().data_ptr() for tensor in term.tensors)
        term = term if answer.kept is None else Dense(answer.kept)
        if self._groups is not None:
            self._groups.add([part], answer.squared_norms, absolute, term)
        elif keep and (self._wanted.keep is Keep.ALL or isinstance(term, Dense)):
            self._terms[part] = term
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

    @property
    def kept(self) -> frozenset[int]:
        """Ids of parameters whose clipped sums need no second backward."""
        together = [owner for owners, _ in self._affines for owner in owners]
        return frozenset((*together, *(owner for owner, _ in self._terms)))

    @property
    def keeps_all(self) -> bool:
        """Whether that holds for all of them."""
        return not self.unkept_calls(self.kept)

    def unkept_calls(self, kept: frozenset[int]) -> list[LayerCall]:
        """Uses of layers with parameters that are not among ``kept``."""
        return [call for call in self.calls if not kept.issuperset(owners_of(call))]

    def _root(self, squared: Sequence[Tensor]) -> Tensor:
        if not squared:
            return torch.zeros(self._examples, dtype=self._dtype, device=self._device)
        return self._unscaled(norms(squared, self._dtype))

    def _of_parameters(self) -> dict[int, list[Tensor]]:
        """Squared norms [B] by the id of the parameter."""
        found: dict[int, list[Tensor]] = {}
        for owners, squared in self._squared:
            for owner, row in zip(owners, squared if squared.dim() == 2 else [squared], strict=True):
                found.setdefault(owner, []).append(row)
        return found

    def norms(self) -> Tensor:
        """||g_i||, [B]."""
        return self._root([squared for _, squared in self._squared])

    def norms_and_bounds(self) -> tuple[Tensor, Tensor]:
        """||g_i|| [B] as measured, and with the rounding margin that weights are computed with.

        Where the margin is not finite, neither is the norm.
        """
        return self._with_margin(self.norms(), [each for _, each in self._absolute])

    def _with_margin(self, norms: Tensor, absolute: list[Tensor]) -> tuple[Tensor, Tensor]:
        if not absolute:
            return norms, norms
        margin = self._unscaled(rounding_margin(absolute)).to(norms.dtype)
        return norms + 0.0 * margin, norms + margin

    def norms_by_parameter(self) -> dict[str, Tensor]:
        """{parameter name: [B]}, zeros for parameters that took no part."""
        squared = self._of_parameters()
        return {name: self._root(squared.get(id(parameter), [])) for name, parameter in self._trained}

    def norms_by_group(self, partition: Mapping[str, str]) -> dict[str, Tensor]:
        """{group: [B]} for {parameter name: group}."""
        groups: dict[str, list[Tensor]] = {}
        found = self._of_parameters()
        for name, parameter in self._trained:
            groups.setdefault(partition[name], []).extend(found.get(id(parameter), []))
        return {group: self._root(squared) for group, squared in groups.items()}

    def norms_and_bounds_by_group(self, partition: Mapping[str, str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The same as measured, and with the rounding margin; as `norms_and_bounds`."""
        absolute: dict[str, list[Tensor]] = {}
        group_of = {id(parameter): partition[name] for name, parameter in self._trained}
        for owner, each in self._absolute:
            absolute.setdefault(group_of[owner], []).append(each)
        found = {
            group: self._with_margin(norms, absolute.get(group, []))
            for group, norms in self.norms_by_group(partition).items()
        }
        return {group: norms for group, (norms, _) in found.items()}, {group: b for group, (_, b) in found.items()}

    @torch.no_grad()
    def per_example_grads(self) -> dict[str, Tensor]:
        """{parameter name: [B, *shape]}, zeros for parameters that took no part."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._trained:
            parts = {part: term for part, term in self._terms.items() if part[0] == id(parameter)}
            if (whole := parts.get((id(parameter), None))) is not None and len(parts) == 1:
                found[name] = whole.per_example()
                continue
            full = to_float32(parameter.detach()).new_zeros(self._examples, *parameter.shape)
            for (_, rows), term in parts.items():
                full[:, slice(*rows) if rows else slice(None)] += term.per_example()
            found[name] = full
        return {name: self._unscaled(gradients) for name, gradients in found.items()}

    def weighted_sums(self, weights: Tensor, finite: Tensor | None) -> Iterator[tuple[Part, Tensor]]:
        """``sum_i weights[i] g_i`` of each part, letting go of the terms one after another.

        Args:
            weights: [B], zero for examples that are left out.
            finite: [B] bool, False where an example must not touch the sum (0 * inf would be NaN); None when all may.
        """
        terms = self._terms
        for part in list(terms):
            term = terms.pop(part)
            with torch.no_grad():
                amount = self._planner.weighted_sum(term if finite is None else term.keep_only(finite), weights)
            yield part, self._unscaled(amount)
        while self._affines:
            yield from self._of_several(weights, finite)

    @torch.no_grad()
    def _of_several(self, weights: Tensor, finite: Tensor | None) -> list[tuple[Part, Tensor]]:
        """The sums of the last linear layers that are held, of so many that they are small together."""
        taken: list[tuple[list[int], LinearPair]] = []
        left = POSTPONED_BYTES
        while self._affines and (left > 0 or not taken):
            taken.append(self._affines.pop())
            left -= taken[-1][1].nbytes
        affines = [affine if finite is None else affine.keep_only(finite) for _, affine in taken]
        found: list[tuple[Part, Tensor]] = []
        for (owners, _), amounts in zip(taken, weighted_sums_of(affines, [weights] * len(affines)), strict=True):
            found += [((owner, None), self._unscaled(each)) for owner, each in zip(owners, amounts, strict=True)]
        return found

    def _unscaled(self, found: Tensor) -> Tensor:
        return found if self._scale == 1.0 else found / self._scale
