"""What a first pass gathers as gradients arrive: squared norms and, where asked, the terms of a clipped sum."""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.graph.row_layout import RowLayout, overlapping_parts, row_count
from ghostclip.nn.base import LayerCall, Repeat
from ghostclip.norms.affine import LinearPair, squared_norms_of, weighted_sums_of
from ghostclip.norms.ragged import RowIndex, RowOrder, combined, regrouped
from ghostclip.norms.reduce import norms, rounding_margin
from ghostclip.norms.term import Dense, NormResult, PerExampleGrads, to_float32
from ghostclip.planner import SOLE, Planner, StrategyChoice, kept_bytes

__all__ = ["Keep", "NormCollector", "PairQueue", "Part", "has_one_row", "norm_dtype", "sums_of_pairs", "term_of"]

# A trained parameter by its id, or the (start, stop) of its first axis: what one term is about.
Part = tuple[int, tuple[int, int] | None]
# Linear layers, each with the ids of the parameters that its pair is of.
Pairs = list[tuple[list[int], LinearPair]]

# Linear layers wait for each other until they take so many bytes: small operations cost what it takes to call them, and
# one serves all.
POSTPONED_BYTES = 1 << 20


class Keep(enum.Enum):
    """Which per-example gradients are kept.

    NOTHING: none outlives its layer.
    SMALL: materialised ones that are smaller than their pre-activation gradient ("reweight").
    ALL: each parameter's: the pre-activation gradient with the layer's input, or materialised gradients that take no
        more bytes than both ("cached").
    CHOSEN: SMALL or ALL, by the clipper's ``second_pass`` and ``memory_budget``.
    MATERIALISED: each parameter's, materialised; no norms are found.
    """

    NOTHING = enum.auto()
    SMALL = enum.auto()
    ALL = enum.auto()
    CHOSEN = enum.auto()
    MATERIALISED = enum.auto()


class PairQueue:
    """Linear layers that wait to be answered for together, until they take POSTPONED_BYTES."""

    def __init__(self, answer: Callable[[Pairs], None]) -> None:
        self._answer = answer
        self._waiting: Pairs = []
        self._bytes = 0

    def add(self, owners: list[int], pair: LinearPair) -> None:
        """Takes the pair of parameters with these ids."""
        self._waiting.append((owners, pair))
        self._bytes += pair.nbytes
        if self._bytes > POSTPONED_BYTES:
            self.flush()

    def flush(self) -> None:
        """Answers for what waits; to be called when the gradients of all calls have come."""
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        if waiting:
            self._answer(waiting)


@torch.no_grad()
def sums_of_pairs(waiting: Pairs, weights: Mapping[int, Tensor], finite: Tensor | None) -> list[tuple[Part, Tensor]]:
    """Clipped sums of linear layers, all at once; see `NormCollector.weighted_sums`."""
    # A weight and a bias in two groups have weights of their own.
    taken: Pairs = []
    for owners, pair in waiting:
        if all(weights[owner] is weights[owners[0]] for owner in owners):
            taken.append((owners, pair))
        else:
            taken += [([owner], replace(pair, names=(name,))) for owner, name in zip(owners, pair.names, strict=True)]
    pairs = [pair if finite is None else pair.keep_only(finite) for _, pair in taken]
    sums = weighted_sums_of(pairs, [weights[owners[0]] for owners, _ in taken])
    return [
        ((owner, None), amount)
        for (owners, _), amounts in zip(taken, sums, strict=True)
        for owner, amount in zip(owners, amounts, strict=True)
    ]


def term_of(
    call: LayerCall,
    name: str,
    inputs: tuple[Tensor, ...],
    grad: Tensor,
    examples: int,
    row_orders: Mapping[int, RowOrder],
) -> PerExampleGrads:
    """The gradients of one of the call's parameters, of each of ``examples`` examples."""
    term, order = call.term(name, inputs, grad), row_orders.get(id(call), "example")
    return regrouped(term, 1 if isinstance(order, RowIndex) else row_count(call, examples, name), order)


def has_one_row(call: LayerCall, examples: int, row_orders: Mapping[int, RowOrder]) -> bool:
    """Whether the call has one row for each example, in their order."""
    return call.shape[call.batch_dim] == examples and not isinstance(row_orders.get(id(call)), RowIndex)


def norm_dtype(trained: Sequence[tuple[str, nn.Parameter]]) -> torch.dtype:
    """float64 as soon as one parameter is, else float32."""
    double = any(parameter.dtype == torch.float64 for _, parameter in trained)
    return torch.float64 if double else torch.float32


class NormCollector:
    """Answers for a parameter as soon as the gradient of its last use has come, and knows the norms when all came.

    Args:
        losses: [B].
        layout: whose rows are whose; all uses are in it, so that it is known which is the last.
        planner: chooses the way to each squared norm.
        trained: the model's trained parameters by name.
        scale: what the losses were multiplied with, and norms and gradients are divided by.
        keep: which gradients are kept, not CHOSEN.
        room: bytes that `Keep.SMALL` may take.
        exact: use no form of a norm that may cancel, and wait for a GPU where that takes it.

    Attributes:
        calls, row_orders: those of the layout.
        examples: B.
        planner: as given.
        choices: what the planner chose, by the id of the parameter.
        holds_graph: whether the graph is still there, though it may not have been asked for.
        repeat: what a second backward over this graph repeats; None where none may follow.
    """

    def __init__(
        self,
        losses: Tensor,
        layout: RowLayout,
        planner: Planner,
        trained: Sequence[tuple[str, nn.Parameter]],
        scale: float,
        *,
        keep: Keep,
        room: int,
        exact: bool,
    ) -> None:
        self.calls, self.row_orders = layout.calls, layout.row_orders
        self.examples, self.planner = len(losses), planner
        self.choices: dict[int, StrategyChoice] = {}
        self.holds_graph = True
        self.repeat: Repeat | None = None
        self._device, self._dtype = losses.device, norm_dtype(trained)
        self._trained, self._scale = trained, scale
        self._keep, self._room, self._exact = keep, room, exact
        # Squared norms [B], or [parameters, B], and what rounding margins follow from, by the ids of the parameters.
        self._squared: list[tuple[list[int], Tensor]] = []
        self._absolute: list[tuple[int, Tensor]] = []
        self._terms: dict[Part, PerExampleGrads] = {}
        self._pairs: Pairs = []
        self._queue = PairQueue(self._add_pairs)
        # What is computed again in order not to be kept is not kept here, either.
        hooked = any(call.has_saved_tensor_hooks for call in self.calls) and keep is not Keep.MATERIALISED
        again = [call for call in self.calls if call.has_saved_tensor_hooks or call.rows] if hooked else []
        self._not_kept = {owner for call in again for owner in owners_of(call)}
        self._padded = overlapping_parts(self.calls)
        # What each call used of parameters that are ours.
        self._own = {id(call): self._used(call) for call in self.calls}
        self._left = Counter([part for used in self._own.values() for part in used.values()])
        self._waiting: dict[Part, list[PerExampleGrads]] = {}
        self._watched, self._arrived = set(map(id, layout.watched)), list[Tensor]()

    def _used(self, call: LayerCall) -> dict[str, Part]:
        """Parts by name, the largest first, the last to be worth keeping: what it holds is there for the others."""
        own: Mapping[str, Any] = call.owners
        names = sorted(call.own, key=lambda name: -own[name].numel())
        owners = {name: id(own[name]) for name in names}
        return {name: (owner, None if owner in self._padded else call.rows.get(name)) for name, owner in owners.items()}

    def receive(self, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> None:
        """Takes the gradient at one pre-activation; called by the layer's node in the graph."""
        if self._watched and id(call) in self._watched:
            self._arrived.append(grad.any())
        # Saved inputs still know their history; what is held must not keep that part of the graph alive.
        inputs = tuple([tensor.detach() if tensor.requires_grad else tensor for tensor in inputs])
        used = self._own[id(call)]
        if self._is_only_use(call, used) and (pair := call.linear_pair(inputs, grad)) is not None:
            self._left.subtract(used.values())
            self._queue.add([used[name][0] for name in pair.names], pair)
            return
        held: set[int] = set()
        for name, part in used.items():
            term = self._term(call, name, inputs, grad)
            self._left[part] -= 1
            if self._left[part] or part in self._waiting:
                self._waiting.setdefault(part, []).append(term)
                if self._left[part]:
                    continue
                term = combined(self._waiting.pop(part))
            self._add(part, term, call.nbytes, held)

    def reached(self) -> bool:
        """Whether a use that was to be watched was given a gradient that isn't zero."""
        return bool(self._arrived) and bool(torch.stack(self._arrived).any())

    def finish(self) -> None:
        """Answers for what waits; to be called when the gradients of all calls have come."""
        self._queue.flush()

    def _is_only_use(self, call: LayerCall, used: Mapping[str, Part]) -> bool:
        """Whether the layer may answer for all its parameters at once: each is ours, and has this one use."""
        if self._keep is Keep.MATERIALISED or not has_one_row(call, self.examples, self.row_orders):
            return False
        for part in used.values():
            if self._left[part] != 1 or part in self._waiting or part[0] in self._not_kept:
                return False
        return len(used) == len(call.parameters)

    def _add_pairs(self, waiting: Pairs) -> None:
        """Takes linear layers that waited for each other."""
        owners = [owner for own, _ in waiting for owner in own]
        self._squared.append((owners, squared_norms_of([pair for _, pair in waiting])))
        self.choices.update(dict.fromkeys(owners, SOLE))
        if self._keep is Keep.ALL:
            self._pairs += waiting

    def _term(self, call: LayerCall, name: str, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        term = term_of(call, name, inputs, grad, self.examples, self.row_orders)
        parameter: Any = call.owners[name]
        if id(parameter) in self._padded:
            gradients = term.per_example()
            start, stop = call.rows.get(name, (0, parameter.shape[0]))
            full = gradients.new_zeros(gradients.shape[0], *parameter.shape)
            full[:, start:stop] = gradients
            term = Dense(full, term.absolute())
        return term

    def _note(self, part: Part, term: PerExampleGrads, answer: NormResult, choice: StrategyChoice) -> None:
        """Takes the squared norms of a term, and what their rounding margin follows from."""
        self.choices[part[0]] = choice
        self._squared.append(([part[0]], answer.squared_norms))
        # Materialised gradients are summed as they were measured.
        if answer.kept is not None:
            return
        absolute = term.absolute() if answer.absolute is None else answer.absolute
        if absolute is not None:
            self._absolute.append((part[0], absolute))

    @torch.no_grad()
    def measure_exactly(self) -> None:
        """Squared norms of all parameters once more, from what is kept of them all, in no form that may cancel."""
        self._squared, self._absolute = [], []
        for part, term in self._terms.items():
            self._note(part, term, *self.planner.answer(term, False, exact=True))
        self._squared += [(owners, squared_norms_of([pair])) for owners, pair in self._pairs]

    def _add(self, part: Part, term: PerExampleGrads, layer_bytes: int, held: set[int]) -> None:
        """Takes the term of all uses of a parameter, or its rows, with the last of them.

        ``layer_bytes`` is what the layer's pre-activation takes, ``held`` has the addresses of tensors that kept terms
        of the same use hold on to; those of this one are added.
        """
        if self._keep is Keep.MATERIALISED:
            self._terms[part] = Dense(term.per_example())
            return
        room, own = None, dict[int, int]()
        if self._keep is Keep.SMALL:
            nbytes = kept_bytes(term)
            room = nbytes if part[1] is None and nbytes <= min(self._room, layer_bytes) else None
        elif self._keep is Keep.ALL and part[0] not in self._not_kept:
            # Materialised gradients may take no more than the tensors that they let go of.
            own = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in term.tensors}
            room = sum([nbytes for address, nbytes in own.items() if address not in held])
        answer, choice = self.planner.answer(term, room is not None, room, exact=self._exact)
        self._note(part, term, answer, choice)
        if room is None:
            return
        if answer.kept is not None:
            term = Dense(answer.kept)
        else:
            held.update(own)
        if self._keep is Keep.ALL:
            self._terms[part] = term
        elif isinstance(term, Dense):
            self._terms[part] = term
            self._room -= term.nbytes

    @property
    def kept(self) -> frozenset[int]:
        """Ids of parameters whose clipped sums need no second backward."""
        together = [owner for owners, _ in self._pairs for owner in owners]
        return frozenset((*together, *(owner for owner, _ in self._terms)))

    def unkept_calls(self) -> list[LayerCall]:
        """Uses of layers with parameters that are not among those."""
        kept = self.kept
        return [call for call in self.calls if not kept.issuperset(owners_of(call))]

    def norms(self) -> Tensor:
        """||g_i||, [B]."""
        return self._root([squared for _, squared in self._squared])

    def norms_and_bounds(self) -> tuple[Tensor, Tensor]:
        """||g_i|| [B] as measured, and with the rounding margin that weights are computed with.

        Where the margin is not finite, neither is the norm.
        """
        return self._with_margin(self.norms(), [each for _, each in self._absolute])

    def norms_by_group(self, group_of: Mapping[int, str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The same for each group of {id of a trained parameter: group}; zeros for one that took no part."""
        squared, absolute = defaultdict[int, list[Tensor]](list), defaultdict[int, list[Tensor]](list)
        for owners, rows in self._squared:
            for owner, row in zip(owners, rows if rows.dim() == 2 else [rows], strict=True):
                squared[owner].append(row)
        for owner, each in self._absolute:
            absolute[owner].append(each)
        members = defaultdict[str, list[int]](list)
        for owner, group in group_of.items():
            members[group].append(owner)
        norms, bounds = dict[str, Tensor](), dict[str, Tensor]()
        for group, own in members.items():
            whole = self._root([row for owner in own for row in squared[owner]])
            norms[group], bounds[group] = self._with_margin(whole, [each for owner in own for each in absolute[owner]])
        return norms, bounds

    def _root(self, squared: Sequence[Tensor]) -> Tensor:
        if not squared:
            return torch.zeros(self.examples, dtype=self._dtype, device=self._device)
        return self._unscaled(norms(squared, self._dtype))

    def _with_margin(self, norms: Tensor, absolute: list[Tensor]) -> tuple[Tensor, Tensor]:
        if not absolute:
            return norms, norms
        margin = self._unscaled(rounding_margin(absolute)).to(norms.dtype)
        return norms + 0.0 * margin, norms + margin

    def _unscaled(self, found: Tensor) -> Tensor:
        return found if self._scale == 1.0 else found / self._scale

    @torch.no_grad()
    def per_example_grads(self) -> dict[str, Tensor]:
        """{parameter name: [B, *shape]}, zeros for parameters that took no part."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._trained:
            parts = {rows: term.per_example() for (owner, rows), term in self._terms.items() if owner == id(parameter)}
            if list(parts) != [None]:
                full = to_float32(parameter.detach()).new_zeros(self.examples, *parameter.shape)
                for rows, gradients in parts.items():
                    full[:, slice(*rows) if rows else slice(None)] += gradients
                parts = {None: full}
            found[name] = self._unscaled(parts[None])
        return found

    def weighted_sums(self, weights: Mapping[int, Tensor], finite: Tensor | None) -> Iterator[tuple[Part, Tensor]]:
        """``sum_i weights[i] g_i`` of each part that is kept, letting go of the terms one after another.

        Args:
            weights: [B] by the id of the parameter, zero for examples that are left out.
            finite: [B] bool, False where an example must not touch the sum (0 * inf would be NaN); None when all may.
        """
        for part in list(self._terms):
            term = self._terms.pop(part)
            with torch.no_grad():
                term = term if finite is None else term.keep_only(finite)
                amount = term.weighted_sum(weights[part[0]])
            yield part, amount
        while self._pairs:
            taken, left = [self._pairs.pop()], POSTPONED_BYTES
            while self._pairs and (left := left - taken[-1][1].nbytes) > 0:
                taken.append(self._pairs.pop())
            yield from sums_of_pairs(taken, weights, finite)


def owners_of(call: LayerCall) -> list[int]:
    """Ids of the parameters a call used."""
    return [id(call.owners[name]) for name in call.parameters]
