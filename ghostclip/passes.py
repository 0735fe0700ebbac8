"""What a first pass gathers: squared norms as gradients arrive and, where asked, the terms of a clipped sum."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ghostclip.aside import Aside
from ghostclip.groupwise import POSTPONED_BYTES, GroupSums, Part
from ghostclip.index import ModelIndex
from ghostclip.nn.base import Call
from ghostclip.norms.affine import Affine, squared_norms_of
from ghostclip.norms.combine import combine
from ghostclip.norms.dense import Dense
from ghostclip.norms.looks import without_looks
from ghostclip.norms.term import Answer, Term
from ghostclip.planner import SOLE, Choice, Planner, kept_bytes
from ghostclip.regroup import row_count

__all__ = ["Collector"]

# Per-example gradients that are kept may take this share of the pre-activations' bytes beyond what they replace.
SPARE = 0.5
# The same of a group's, which are let go of with it, before the next one's come.
SPARE_OF_GROUP = 0.1
# Bytes of what is set aside that are always there: an eighth of what waits for company in any case.
ASIDE_LEAST = POSTPONED_BYTES // 8


def overlapping_parts(calls: Iterable[Call]) -> set[int]:
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


class Collector:
    """The sink of a first pass: answers for a parameter as soon as the gradient of its last use has come.

    Args:
        losses: [B].
        calls: all uses in the graph, so that it is known which is the last.
        majors: how each call's rows are grouped, by id(call).
        planner: chooses the way to each squared norm.
        index: of the model; parameters of another model, in a layer that shares one with ours, are passed over.
        keep: hold terms for a clipped sum to come; otherwise nothing outlives its layer.
        partly: of what is to be held, leave out the uses of layers whose inputs are computed again, and parameters of
            which parts are used.
        materialise: form and hold every per-example gradient, and no norms.
        aside: hold the terms of single parameters where they are small beside the activations, so small.
        budget: bytes that may be held; once passed, everything held is dropped and ``over_budget`` is set.
        groups: takes all terms, to clip them group by group; nothing is held here then.
        margin: gather what the rounding margin of the norms follows from (`ghostclip.norms.rounding`).
        postponed: norms that need a look at values become NaN, and can be had from what is held by `measure_again`.
        below: further uses, of which collectors of some of the examples are told (`of_part`, `join`).
        watched: uses of which `reached` says whether a gradient other than zero came.
    """

    def __init__(
        self,
        losses: Tensor,
        calls: Sequence[Call],
        majors: Mapping[int, str],
        planner: Planner,
        index: ModelIndex,
        *,
        keep: bool,
        partly: bool = False,
        materialise: bool = False,
        aside: Aside | None = None,
        budget: int | None = None,
        groups: GroupSums | None = None,
        margin: bool = False,
        postponed: bool = False,
        below: Sequence[Call] = (),
        watched: Sequence[Call] = (),
    ) -> None:
        self.examples, self.device = losses.shape[0], losses.device
        self.squared: list[tuple[list[int], Tensor]] = []
        self.absolute: list[tuple[int, Tensor]] = []
        self.terms: dict[Part, Term] = {}
        self.affines: list[tuple[list[int], Affine]] = []
        self.choices: dict[int, Choice] = {}
        self.held_bytes, self.over_budget = 0, False
        self._keep, self._materialise, self._aside, self._budget = keep, materialise, aside, budget
        self.partly = partly
        packed = [call for call in calls if call.packed or call.rows] if partly else []
        self._not_held = {id(call.layer._parameters[name]) for call in packed for name in call.parameters}
        self._majors, self._planner, self._index = majors, planner, index
        self._padded = overlapping_parts(calls)
        # What each call used of parameters that are ours: in its own order, and by their names in that of `receive`.
        self._own = {id(call): self._used(call, groups is not None) for call in calls}
        self._left = Counter([part for parts, _ in self._own.values() for part in parts])
        self._waiting: dict[Part, list[Term]] = {}
        self._unanswered: list[tuple[list[Part], Affine]] = []
        self._unanswered_bytes = 0
        # Calls that were answered at once, and the bytes of their answers.
        self.joined, self.joined_bytes = 0, 0
        self._calls = [*calls, *below]
        self._prepared = False
        # Whether gradients that are kept may be dropped later, and their sum formed from the layer's inputs.
        self._may_drop = keep and budget is not None
        self._groups, self._margin, self._postponed = groups, margin, postponed
        self._watched, self._arrived = set(map(id, watched)), list[Tensor]()
        if groups is not None:
            groups.expect(self._left)

    @functools.cached_property
    def _produced(self) -> int:
        """Bytes of all pre-activations."""
        return sum([call.nbytes for call in self._calls])

    @functools.cached_property
    def _whole_room(self) -> int:
        """Bytes that may be kept beyond what is replaced, in all or of one group."""
        return int((SPARE if self._groups is None else SPARE_OF_GROUP) * self._produced)

    @functools.cached_property
    def _room(self) -> int:
        """What is left of it."""
        return self._whole_room

    def _prepare_aside(self, aside: Aside) -> None:
        """Sets how much may be set aside, once."""
        if self._prepared:
            return
        self._prepared = True
        parameters = sum([parameter.nbytes for _, parameter in self._index.trained()])
        room = max(int(aside.of_all * self._produced + aside.of_parameters * parameters), ASIDE_LEAST)
        self._room = room if self._budget is None else min(room, self._budget)

    def of_part(self, losses: Tensor, calls: Sequence[Call], groups: GroupSums | None) -> Collector:
        """A collector of some of the examples, to `join` this: their losses [b], uses and groups."""
        found = Collector(
            losses, calls, {}, self._planner, self._index,
            keep=False, aside=self._aside, groups=groups, margin=self._margin, postponed=self._postponed,
        )  # fmt: skip
        found._may_drop = True
        if self._aside is not None:
            self._prepare_aside(self._aside)
            found._prepared, found._room = True, self._room * len(losses) // self.examples
        return found

    def join(self, parts: Sequence[Collector]) -> None:
        """Takes what collectors of all examples, in their order, found of the uses that they were told of."""
        self.choices.update(parts[0].choices)
        if self._groups is not None:
            return
        rows: dict[int, list[Tensor]] = {}
        for owners, squared in [each for part in parts for each in part.squared]:
            for owner, row in zip(owners, squared if squared.dim() == 2 else [squared], strict=True):
                rows.setdefault(owner, []).append(row)
        self.squared += [([owner], torch.cat(found)) for owner, found in rows.items()]
        margins: dict[int, list[Tensor]] = {}
        for owner, row in [each for part in parts for each in part.absolute]:
            margins.setdefault(owner, []).append(row)
        self.absolute += [(owner, torch.cat(found)) for owner, found in margins.items()]
        for key in list(parts[0].terms):
            if all(key in part.terms for part in parts):
                self.terms[key] = Dense(torch.cat([part.terms.pop(key).per_example() for part in parts]))
                self._room -= self.terms[key].nbytes

    def _used(self, call: Call, in_groups: bool) -> tuple[list[Part], list[tuple[str, Part]]]:
        own: Mapping[str, Any] = call.layer._parameters
        used = [(name, self._part(call, name)) for name in self._index.own_parameters(call)]
        # The largest first, which are the last to be worth keeping: what they hold is there for the others. Of a weight
        # and a bias in groups the weight comes last, so that its group may be complete with it.
        ordered = sorted(used, key=lambda each: -own[each[0]].numel())
        return [part for _, part in used], ordered[::-1] if in_groups and len(used) == 2 else ordered

    def _part(self, call: Call, name: str) -> Part:
        owner = id(call.layer._parameters[name])
        return (owner, None) if owner in self._padded else (owner, call.rows.get(name))

    def receive(self, call: Call, inputs: tuple[Tensor, ...], grad: Tensor) -> None:
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
            if self._aside is not None:
                self._answer_aside(part, term, int(self._aside.of_layer * call.nbytes), self._aside)
            else:
                self._answer(part, term, held)

    def reached(self) -> bool:
        """Whether a watched use was given a gradient that isn't zero."""
        return bool(self._arrived) and bool(torch.stack(self._arrived).any())

    def _answer_at_once(self, call: Call, parts: list[Part], inputs: tuple[Tensor, ...], grad: Tensor) -> bool:
        """The layer's own joint answer for all its parameters, where it has one and this is their only use."""
        if self._materialise or call.shape[call.batch_dim] != self.examples or len(parts) != len(call.parameters):
            return False
        for part in parts:
            if self._left[part] != 1 or part in self._waiting or part[0] in self._not_held:
                return False
        if self._groups is not None and not self._groups.are_one_group(parts):
            return False
        affine = call.layer.joint(call, inputs, grad)
        if affine is None:
            return False
        for part in parts:
            self._left[part] = 0
        self._unanswered.append((parts, affine))
        self._unanswered_bytes += affine.nbytes
        self.joined, self.joined_bytes = self.joined + 1, self.joined_bytes + affine.nbytes
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
        elif self._keep and not self.over_budget:
            for parts, affine in waited:
                self.affines.append(([owner for owner, _ in parts], affine))
                self._count(affine.nbytes)
        elif self._aside is not None:
            self._set_aside(waited, self._aside)

    def _set_aside(self, waited: list[tuple[list[Part], Affine]], aside: Aside) -> None:
        """Leaves linear layers that fit in out of the second backward; their inputs stand in the graph anyway."""
        self._prepare_aside(aside)
        bytes_ = sum([affine.left.nbytes for _, affine in waited])
        if bytes_ <= self._room:
            self._room -= bytes_
            self.affines += [([owner for owner, _ in parts], affine) for parts, affine in waited]

    def _term(self, call: Call, name: str, inputs: tuple[Tensor, ...], grad: Tensor) -> Term:
        term = call.term(name, inputs, grad)
        count = row_count(call, self.examples, name)
        if count != 1:
            term = term.regroup(count, self._majors[id(call)])
        parameter = call.layer._parameters[name]
        assert parameter is not None
        if id(parameter) in self._padded:
            gradients = term.per_example()
            start, stop = call.rows.get(name, (0, parameter.shape[0]))
            full = gradients.new_zeros(gradients.shape[0], *parameter.shape)
            full[:, start:stop] = gradients
            term = Dense(full, term.absolute())
        return term

    def _note(self, part: Part, term: Term, answer: Answer, choice: Choice) -> Tensor | None:
        """Takes the squared norms of a term; returns what their rounding margin follows from, [B], or None."""
        self.choices[part[0]] = choice
        absolute = self._absolute(term, answer)
        self.squared.append(([part[0]], answer.squared_norms))
        if absolute is not None:
            self.absolute.append((part[0], absolute))
        return absolute

    def _absolute(self, term: Term, answer: Answer) -> Tensor | None:
        """`Term.absolute` where a margin is asked for, and the gradients aren't summed as they were measured."""
        if not self._margin or (answer.kept is not None and not self._may_drop):
            return None
        return term.absolute() if answer.absolute is None else answer.absolute

    @torch.no_grad()
    def measure_again(self) -> None:
        """Squared norms of all parameters once more, from what is held of them all, with the looks they need."""
        self.squared, self.absolute = [], []
        for (owner, _), term in self.terms.items():
            squared, absolute = self.measured(term)
            self.squared.append(([owner], squared))
            if absolute is not None:
                self.absolute.append((owner, absolute))
        self.squared += [(owners, self.measured(affine)[0]) for owners, affine in self.affines]

    def weighted_sum(self, term: Term, weights: Tensor) -> Tensor:
        """The clipped sum [*shape] of a term that was held, for weights [B]."""
        return self._planner.weighted_sum(term, weights)

    def measured(self, held: Term | Affine) -> tuple[Tensor, Tensor | None]:
        """Squared norms of what is held, [B], or [names, B] of a linear layer's parameters; and `Term.absolute`."""
        if isinstance(held, Affine):
            return held.squared_norms(), None
        answer, _ = self._planner.answer(held, False)
        return answer.squared_norms, self._absolute(held, answer)

    def _answer(self, part: Part, term: Term, held: set[int]) -> None:
        """Takes the term; ``held`` are addresses of what terms of the same call hold on to."""
        if self._materialise:
            self.terms[part] = Dense(term.per_example())
            return
        if self._groups is not None and self._clip_in_passing(part, term, self._groups):
            return
        keep = self._groups is not None or (self._keep and not self.over_budget and part[0] not in self._not_held)
        answer, choice, replaced = term.sole_answer(keep), SOLE, 0
        if answer is None:
            tensors = {tensor.untyped_storage().data_ptr(): tensor for tensor in term.tensors} if keep else {}
            replaced = sum([tensor.nbytes for address, tensor in tensors.items() if address not in held])
            answer, choice = self._ask(term, keep, replaced + self._room)
            if answer.kept is None:
                held.update(tensors)
        absolute = self._note(part, term, answer, choice)
        if answer.kept is not None:
            self._room -= max(0, answer.kept.nbytes - replaced)
            term = Dense(answer.kept)
        if self._groups is not None:
            self._groups.take([part], answer.squared_norms, absolute, term)
            if self._groups.empty:
                self._room = self._whole_room
        elif keep:
            self.terms[part] = term
            if self._budget is not None:
                self._count(term.nbytes)

    def _clip_in_passing(self, part: Part, term: Term, groups: GroupSums) -> bool:
        """Clips a group with its last term where that is the fastest; says whether it did."""
        weigh = groups.weigher(part)
        found = None if weigh is None else self._planner.clip(term, weigh)
        if found is None:
            return False
        clipped, self.choices[part[0]] = found
        groups.take_clipped(part, clipped)
        return True

    def _ask(self, term: Term, keep: bool, room: int) -> tuple[Answer, Choice]:
        """The planner's answer, with the looks at values that it may need or without."""
        if not self._postponed:
            return self._planner.answer(term, keep, room)
        with without_looks():
            return self._planner.answer(term, keep, room)

    def _answer_aside(self, part: Part, term: Term, most: int, aside: Aside) -> None:
        """The same where a second backward follows: a parameter whose gradients fit in is left out of that."""
        self._prepare_aside(aside)
        bytes_ = kept_bytes(term)
        fits = part[1] is None and bytes_ <= min(self._room, most)
        answer, choice = self._ask(term, fits, bytes_)
        self._note(part, term, answer, choice)
        if fits and (answer.kept is not None or isinstance(term, Dense)):
            self.terms[part] = term if answer.kept is None else Dense(answer.kept)
            self._room -= bytes_

    def _count(self, nbytes: int) -> None:
        self.held_bytes += nbytes
        if self._budget is not None and self.held_bytes > self._budget:
            self.over_budget = True
            self.terms.clear()
            self.affines.clear()
