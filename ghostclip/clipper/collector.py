"""What a first pass gathers as gradients arrive: squared norms and, where asked, the terms of a clipped sum."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.graph.marks import numbers
from ghostclip.graph.row_layout import RowLayout
from ghostclip.graph.rows import crossed_error, shows_all
from ghostclip.nn.base import LayerCall, Part, place_of
from ghostclip.nn.fallback import FallbackCall
from ghostclip.norms.affine import LinearPair
from ghostclip.norms.precision import full_precision
from ghostclip.norms.ragged import combined, regrouped
from ghostclip.norms.reduce import Parts, norms, rounding_margin
from ghostclip.norms.term import Dense, NormResult, PerExampleGrads, to_float32
from ghostclip.planner import SOLE, Planner, StrategyChoice, kept_bytes

__all__ = ["Keep", "Kept", "NormCollector", "TermReceiver", "norm_dtype"]

# Terms by the parts that they are of.
Kept = dict[tuple[Part, ...], PerExampleGrads | LinearPair]
# The id of a parameter, squared norms [B] of its gradients, and what their rounding margin follows from.
SquaredNorms = tuple[int, Tensor, Parts]


class Keep(enum.Enum):
    """Which per-example gradients are kept.

    NOTHING: none outlives its layer.
    SMALL: materialised ones that are smaller than their pre-activation gradient ("reweight").
    ALL: each parameter's: the pre-activation gradient with the layer's input, or materialised gradients that take no
        more bytes than both ("cached"). Of layers that checkpointing computes again: materialised ones if all of these
        take little, else none.
    CHOSEN: SMALL or ALL, by the clipper's ``second_pass`` and ``memory_budget``.
    MATERIALISED: each parameter's, materialised; no norms are found.
    """

    NOTHING = enum.auto()
    SMALL = enum.auto()
    ALL = enum.auto()
    CHOSEN = enum.auto()
    MATERIALISED = enum.auto()


class TermReceiver(ABC):
    """The sink of a backward to the pre-activations: makes terms of the gradients that arrive there.

    Args:
        layout: whose rows are whose; all uses are in it, so that it is known which is the last of a parameter.
        without: ids of parameters that no term is wanted of.
        whole: ids of parameters of which each part counts as the whole.

    Attributes:
        takes_pairs: whether one term may answer for a linear layer's weight and bias.
    """

    takes_pairs = True
    _shows = False

    def __init__(self, layout: RowLayout, without: Collection[int] = (), whole: Collection[int] = ()) -> None:
        self.layout, self.calls = layout, layout.calls
        # The parts that each call used, by the parameters' names in the layer; how many uses of each are still to come.
        self._parts: dict[int, dict[str, Part]] = {}
        self._uses_to_come = dict[Part, int]()
        # Parts that were used several times.
        self._several = set[Part]()
        for call in layout.calls:
            parts = self._parts[id(call)] = {}
            for name in call.own:
                owner = id(call.owners[name])
                if owner in without:
                    continue
                parts[name] = part = owner, None if owner in whole else call.rows.get(name)
                if part in self._uses_to_come:
                    self._several.add(part)
                self._uses_to_come[part] = self._uses_to_come.get(part, 0) + 1

    def show_rows(self) -> None:
        """From now on `look` is told of each use of a layer and each boundary."""
        self._shows = True
        if self.calls and isinstance(last := self.calls[-1], FallbackCall):
            last.region.watch = self.look

    @abstractmethod
    def look(self, subject: Any, grad: Tensor) -> None:
        """Sees the gradient of a subject, where rows are shown."""

    def receive(self, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> None:
        """Takes the gradient at one pre-activation; called by the layer's node in the graph."""
        if self._shows and not isinstance(call, FallbackCall):
            self.look(call, grad)
        # Saved inputs still know their history; what is held must not keep that part of the graph alive.
        inputs = tuple(map(Tensor.detach, inputs))
        rows = self.layout.rows.get(call)
        if rows is not None and rows.crossed and not shows_all(grad, rows, inputs):
            raise crossed_error(call, place_of(call.layer))
        parts, regrouping = self._parts[id(call)], self.layout.regrouping.get(id(call))
        with full_precision(grad.device):
            if regrouping is None and self.takes_pairs and self._may_pair(call, parts):
                pair = call.linear_pair(inputs, grad)
                if pair is not None:
                    self._take_pair(list(parts.values()), pair)
                    return
            # The largest parameter first: the tensors that its term keeps are there for the smaller ones. One term at a
            # time: what it made for itself is freed before the next.
            for _, name in sorted([(-call.owners[name].numel(), name) for name in parts]):
                term = call.term(name, inputs, grad)
                self._take(call, name, parts[name], term if regrouping is None else regrouped(term, *regrouping))

    def _may_pair(self, call: LayerCall, parts: Mapping[str, Part]) -> bool:
        """Whether all parameters of the call are wanted, whole, and have this one use: one term may answer for them."""
        return len(parts) == len(call.parameters) and not call.rows and self._several.isdisjoint(parts.values())

    @abstractmethod
    def _take_pair(self, parts: Sequence[Part], pair: LinearPair) -> None:
        """Takes a linear layer's terms, in one."""

    @abstractmethod
    def _take(self, call: LayerCall, name: str, part: Part, term: PerExampleGrads) -> None:
        """Takes the term of one use of a part; ``name`` is the parameter's in the layer."""


def norm_dtype(trained: Sequence[tuple[str, nn.Parameter]]) -> torch.dtype:
    """float64 as soon as one parameter is, else float32."""
    return torch.float64 if torch.float64 in [parameter.dtype for _, parameter in trained] else torch.float32


class NormCollector(TermReceiver):
    """Finds norms of a parameter's per-example gradients once the gradient of its last use has come; all, after a pass.

    Args:
        losses: [B].
        layout: whose rows are whose.
        planner: chooses the way to each squared norm.
        trained: the model's trained parameters by name.
        scale: what the losses were multiplied with, and norms and gradients are divided by: a number, or one of each
            example, [B].
        keep: which gradients are kept, not CHOSEN.
        room: bytes that `Keep.SMALL` may take, or materialised gradients of layers that are computed again.
        exact: use no form of a norm that may cancel, and wait for a GPU where that takes it.

    Attributes:
        losses, layout, calls, scale: as given, and the calls in the layout.
        marks: [B], what the pass started from; None for ones.
        seen: {subject: `numbers` of its rows}, for a second backward to check; None where none will.
        not_kept: ids of parameters of layers that are computed again, of which nothing is kept.
        kept: terms by the parts that they are of: what clipped sums are formed from without a second backward.
        choices: what the planner chose, by the id of the parameter.
        structure: of the graph.
        found_nonzero: of a traced pass, whether a gradient came where there were zeros before, bool []; else None.
        holds_graph: whether the graph is still there, though it may not have been asked for.
        random_states: before the pass, where it computes checkpointed blocks again; else None.
    """

    def __init__(
        self,
        losses: Tensor,
        layout: RowLayout,
        planner: Planner,
        trained: Sequence[tuple[str, nn.Parameter]],
        scale: float | Tensor,
        *,
        keep: Keep,
        room: int,
        exact: bool,
    ) -> None:
        self._padded = overlapping_parts(layout.calls)
        super().__init__(layout, whole=self._padded)
        self.losses = losses
        self.kept: Kept = {}
        self.choices: dict[int, StrategyChoice] = {}
        self.structure = 0
        self.marks: Tensor | None = None
        self.found_nonzero: Tensor | None = None
        self.seen: dict[Any, Any] | None = None
        self.holds_graph = True
        self.random_states: tuple[Any, ...] | None = None
        self._examples, self._device, self._dtype = len(losses), losses.device, norm_dtype(trained)
        self._planner, self._trained, self.scale = planner, trained, scale
        self._keep, self._room, self._exact = keep, room, exact
        self.takes_pairs = keep is not Keep.MATERIALISED
        self._squares: list[SquaredNorms] = []
        # Of layers under activation checkpointing no terms are kept, unless they take little: adapters of
        # rank 16 have small gradients of many examples, and a second backward would compute all blocks once more.
        self.not_kept = set[int]()
        self._materialised = set[int]()
        if keep is not Keep.MATERIALISED and any(map(attrgetter("has_saved_tensor_hooks"), layout.calls)):
            again = [call for call in layout.calls if call.has_saved_tensor_hooks or call.rows]
            self.not_kept = {owner for call in again for owner in owners_of(call)}
            if keep is Keep.ALL and self._bytes_of(self.not_kept) <= room:
                self.not_kept, self._materialised = set(), self.not_kept
        self._waiting: dict[Part, list[PerExampleGrads]] = {}
        # The use whose terms are coming, and the addresses of tensors that its kept terms hold on to.
        self._held: tuple[LayerCall | None, set[int]] = None, set()

    def _bytes_of(self, owners: Collection[int]) -> int:
        """Bytes of materialised gradients of these parameters."""
        return sum([4 * self._examples * each.numel() for _, each in self._trained if id(each) in owners])

    def note_rows(self) -> None:
        """From now on the numbers of rows are noted, of layers and of boundaries."""
        self.seen = {}
        self.show_rows()

    def look(self, subject: Any, grad: Tensor) -> None:
        """See `TermReceiver.look`."""
        assert self.seen is not None
        self.seen[subject] = numbers(grad, self.layout.rows[subject].dim)

    def _take_pair(self, parts: Sequence[Part], pair: LinearPair) -> None:
        for (owner, _), (squared, absolute) in zip(parts, pair.squared_norms(), strict=True):
            self._squares.append((owner, squared, absolute))
            self.choices[owner] = SOLE
        if self._keep is Keep.ALL and parts[0][0] not in self.not_kept:
            self.kept[tuple(parts)] = pair

    def _take(self, call: LayerCall, name: str, part: Part, term: PerExampleGrads) -> None:
        if part[0] in self._padded:
            term = _padded(call, name, term)
        if part in self._several:
            self._waiting.setdefault(part, []).append(term)
            self._uses_to_come[part] -= 1
            if self._uses_to_come[part]:
                return
            term = combined(self._waiting.pop(part))
        if self._held[0] is not call:
            self._held = call, set()
        self._measure(call, part, term, self._held[1])

    def _note(self, part: Part, answer: NormResult) -> None:
        """Takes a term's squared norms in."""
        absolute = () if answer.absolute is None else ((answer.absolute, 1.0),)
        self._squares.append((part[0], answer.squared_norms, absolute))

    def _measure(self, call: LayerCall, part: Part, term: PerExampleGrads, held: set[int]) -> None:
        """Measures the term of all uses of a part, and keeps what is to be kept of it.

        ``held`` has the addresses of tensors that kept terms of the same use hold on to; those of this one are added.
        """
        if self._keep is Keep.MATERIALISED:
            self.kept[part,] = Dense(term.per_example())
            return
        if part[0] in self._materialised:
            term = Dense(term.per_example())
        room, own = None, set[int]()
        if self._keep is Keep.SMALL:
            nbytes = kept_bytes(term)
            room = nbytes if part[1] is None and nbytes <= min(self._room, call.nbytes) else None
        elif self._keep is Keep.ALL and part[0] not in self.not_kept:
            # Materialised gradients may take no more than the tensors that are freed for them.
            room = 0
            for tensor in term.tensors:
                address = tensor.untyped_storage().data_ptr()
                room += 0 if address in held or address in own else tensor.nbytes
                own.add(address)
        answer, self.choices[part[0]] = self._planner.answer(term, room is not None, room, exact=self._exact)
        self._note(part, answer)
        if room is None:
            return
        if answer.kept is not None:
            term = Dense(answer.kept)
        else:
            held |= own
        if self._keep is Keep.ALL:
            self.kept[part,] = term
        elif isinstance(term, Dense):
            self.kept[part,] = term
            self._room -= term.nbytes

    @torch.no_grad()
    def measure_exactly(self) -> None:
        """Squared norms of all parameters once more, from what is kept of them all, in no form that may cancel."""
        self._squares = []
        with full_precision(self._device):
            for parts, term in self.kept.items():
                if isinstance(term, LinearPair):
                    self._take_pair(parts, term)
                else:
                    answer, self.choices[parts[0][0]] = self._planner.answer(term, False, exact=True)
                    self._note(parts[0], answer)

    @property
    def kept_owners(self) -> frozenset[int]:
        """Ids of parameters whose clipped sums need no second backward."""
        return frozenset([owner for parts in self.kept for owner, _ in parts])

    def unkept_calls(self) -> list[LayerCall]:
        """Uses of layers with parameters that are not among those."""
        kept = {part for parts in self.kept for part in parts}
        return [call for call in self.calls if not kept.issuperset(self._parts[id(call)].values())]

    def norms(self) -> Tensor:
        """||g_i||, [B]."""
        return self._unscaled(self._root([squared for _, squared, _ in self._squares]))[0]

    def norms_and_bounds(self) -> tuple[Tensor, Tensor]:
        """||g_i|| [B] as measured, and with the rounding margin that weights are computed with.

        Where the margin is not finite, neither is the norm.
        """
        return self._bounded(self._squares)

    def norms_by_group(self, group_of: Mapping[int, str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The same for each group of {id of a trained parameter: group}; zeros for one that took no part."""
        members: dict[str, list[SquaredNorms]] = {group: [] for group in group_of.values()}
        for each in self._squares:
            if each[0] in group_of:
                members[group_of[each[0]]].append(each)
        both = {group: self._bounded(own) for group, own in members.items()}
        return {group: norms for group, (norms, _) in both.items()}, {
            group: bounds for group, (_, bounds) in both.items()
        }

    def _root(self, squared: Sequence[Tensor]) -> Tensor:
        """[B], of the losses times their scale."""
        if not squared:
            return torch.zeros(self._examples, dtype=self._dtype, device=self._device)
        return norms(squared, self._dtype)

    def _unscaled(self, *found: Tensor) -> tuple[Tensor, ...]:
        """[B, ...] each, of the losses as they are: NaN where one isn't finite, though its rows may be nobody's."""
        if self.layout.drops_odd:
            finite = self.losses.detach().isfinite()
            found = tuple([each.where(finite.view(-1, *[1] * (each.dim() - 1)), torch.nan) for each in found])
        scale = self.scale
        if isinstance(scale, Tensor):
            scale = scale.to(found[0].dtype).view(-1, *[1] * (found[0].dim() - 1))
        elif scale == 1.0:
            return found
        return tuple([each / scale for each in found])

    def _bounded(self, measured: Sequence[SquaredNorms]) -> tuple[Tensor, Tensor]:
        """Norms and bounds [B] of some parameters together."""
        _, squared, parts = zip(*measured, strict=True) if measured else ((), (), ())
        numbers = sum([parameter.numel() for _, parameter in self._trained])
        margin = rounding_margin(squared, [*chain.from_iterable(parts)], numbers)
        found = self._root(squared)
        margin = torch.full_like(found, margin) if isinstance(margin, float) else margin.to(found.dtype)
        found, margin = self._unscaled(found, margin)
        return torch.add(found, margin, alpha=0.0), found + margin

    @torch.no_grad()
    def per_example_grads(self) -> dict[str, Tensor]:
        """{parameter name: [B, *shape]}, zeros for parameters that took no part."""
        found: dict[Part, Tensor] = {}
        for parts, term in self.kept.items():
            assert isinstance(term, Dense)
            found[parts[0]] = term.per_example()
        for _, parameter in self._trained:
            whole = (id(parameter), None)
            if whole not in found:
                found[whole] = to_float32(parameter.detach()).new_zeros(self._examples, *parameter.shape)
        for (owner, rows), gradients in found.items():
            if rows is not None:
                found[owner, None][:, slice(*rows)] += gradients
        every = {name: found[id(parameter), None] for name, parameter in self._trained}
        return {name: self._unscaled(each)[0] for name, each in every.items()}


def _padded(call: LayerCall, name: str, term: PerExampleGrads) -> Dense:
    """The gradients of a part of a parameter as those of the whole."""
    parameter, gradients = call.owners[name], term.per_example()
    start, stop = call.rows.get(name, (0, parameter.shape[0]))
    full = gradients.new_zeros(gradients.shape[0], *parameter.shape)
    full[:, start:stop] = gradients
    return Dense(full, term.absolute())


def owners_of(call: LayerCall) -> list[int]:
    """Ids of the model's parameters that a call used."""
    return [id(call.owners[name]) for name in call.own]


def overlapping_parts(calls: Sequence[LayerCall]) -> set[int]:
    """Ids of parameters that were used by parts which overlap without being the same."""
    used: dict[int, set[tuple[int, int] | None]] = {}
    if not any(map(attrgetter("rows"), calls)):
        return set()
    for call in calls:
        for name in call.parameters:
            used.setdefault(id(call.owners[name]), set()).add(call.rows.get(name))
    return {owner for owner, parts in used.items() if len(parts) > 1 and _overlap(parts)}


def _overlap(parts: set[tuple[int, int] | None]) -> bool:
    """Whether two of several parts (start, stop) have rows in common; None is the whole."""
    spans = sorted(part for part in parts if part is not None)
    return None in parts or any(left[1] > right[0] for left, right in pairwise(spans))
