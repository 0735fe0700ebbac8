"""Whose row is whose where an index says so: that it does is shown by the factors that losses are given.

An index is as new as its batch, so each batch is tested. A layer, or an operation that brings a parameter to the rows,
met for the first time is tested as all others are (`ghostclip.graph.mixing_test`): any two examples are told apart.
After that the gradients of the pass itself are compared with those of one more backward, from losses with factors drawn
by chance: up to `LEVELS` examples have different ones, and a row that follows another example's loss is seen; of more
examples any two have the same one with probability 1 / LEVELS. What seems wrong there is tested again in full.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ghostclip.errors import LossShapeError, UnsupportedModelError
from ghostclip.graph.mixing_test import EXACT, NOISE, TOLERANCE, USUAL, Rounding, check_mixing, projected, row_orders
from ghostclip.graph.nodes import Edge, shape_of
from ghostclip.graph.parameter_names import ParameterNames, serial_number
from ghostclip.graph.ragged_rows import RaggedRows
from ghostclip.graph.reader import Uses, first_pass
from ghostclip.graph.row_layout import RowLayout, without_boundaries
from ghostclip.graph.shared.positions import are_positions
from ghostclip.graph.shared.search import Decision, DecisionCache, Search
from ghostclip.graph.shared.subgraph import SharedSubgraph
from ghostclip.nn.base import LayerCall, Sink
from ghostclip.nn.fallback import FallbackCall
from ghostclip.norms.ragged import RowIndex

__all__ = ["IndexCheck", "RaggedLayouts", "read_indices"]

# Powers of two that examples' losses are multiplied with; float16 holds few of them beside gradients.
LEVELS, LEVELS_OF_HALVES = 32, 4


def read_indices(batch_index: Any, losses: Tensor) -> list[RowIndex]:
    """The indices a user gave for losses [B]: one tensor, or a sequence of them, each [rows] of int64.

    Raises:
        TypeError: something else was given, or another type of number.
        ValueError: another shape, on another device than the losses, or a number that isn't an example's.
    """
    given = list(batch_index) if isinstance(batch_index, list | tuple) else [batch_index]
    for index in given:
        if not isinstance(index, Tensor):
            raise TypeError(
                "batch_index must be a tensor [rows] of int64 with the example of each row, or a list of such tensors; "
                f"got {type(index).__name__}"
            )
        if index.dtype != torch.int64:
            raise TypeError(f"batch_index must hold int64 numbers; got {index.dtype}; convert it by batch_index.long()")
        if index.dim() != 1:
            raise ValueError(
                f"batch_index must have shape [rows], one example for each row; got {list(index.shape)}; of lengths "
                "[B] it is torch.repeat_interleave(torch.arange(B), lengths)"
            )
        if index.device != losses.device:
            raise ValueError(
                f"batch_index is on {index.device}, and the losses are on {losses.device}; move it by "
                "batch_index.to(losses.device)"
            )
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(losses):
            raise ValueError(
                f"batch_index must hold numbers from 0 to {len(losses) - 1}, for {len(losses)} losses; got numbers "
                f"from {int(index.min())} to {int(index.max())}; give each example a loss, one without rows too"
            )
    return [RowIndex(index, len(losses)) for index in given]


class RaggedLayouts:
    """Lays out batches whose rows belong to examples by indices."""

    def __init__(self) -> None:
        # {what graphs of a kind have in common: how many hooks the process had registered by the last one's test}
        self._met: dict[tuple, int] = {}
        self._dice = random.Random()

    def lay_out(
        self,
        losses: Tensor,
        uses: Uses,
        names: ParameterNames,
        indices: Sequence[RowIndex],
        again: bool,
        rounding: Rounding = USUAL,
    ) -> RowLayout:
        """Every use of a parameter behind ``losses`` [B], and whose its rows are.

        Args:
            losses, uses, names: as `RowLayouts.lay_out` has them.
            indices: of this batch.
            again: whether the gradients of an earlier pass over this graph didn't follow the indices, or rows meet.
            rounding: what may be rounding in a test in full.

        Raises:
            UnsupportedModelError: a layer's rows aren't those of an index, or follow other examples' losses.
        """
        for call in uses.calls:
            _find_rows(call, losses, indices)
        odd = [call for call in uses.calls if not _orders(call, losses, indices)]
        # Parts are followed in each batch.
        key = (uses.size, len(indices), *(_key(call) for call in uses.calls))
        choice = any(len(_orders(call, losses, indices)) > 1 for call in uses.calls)
        in_full = len(losses) > 1 and (again or choice or key not in self._met)
        while True:
            region = (
                self._region(losses, uses, odd, names, indices, rounding if in_full else None)
                if odd or uses.leaves
                else None
            )
            shared = set() if region is None else {id(call) for call in region.calls.values()}
            calls = [call for call in uses.calls if id(call) not in shared]
            found = check_mixing(losses, calls, calls, indices, rounding) if in_full else {}
            mixing = [call for call, verdict in found.items() if verdict.best is None]
            if not mixing:
                break
            if not any(are_positions(losses, mixing, rows) for rows in {len(losses), *map(len, indices)}):
                raise _refusal(mixing[0], names)
            odd += mixing
        orders = {id(call): _orders(call, losses, indices)[0] for call in calls}
        orders |= {id(call): verdict.best.row_order for call, verdict in found.items() if verdict.best}
        check, hooks = None, RemovableHandle.next_id
        if len(losses) > 1 and not in_full:
            rows = None if any(call.has_saved_tensor_hooks for call in calls) else RaggedRows(losses, region, indices)
            followed = rows is not None and rows.follow([(call, orders[id(call)]) for call in calls])
            if rows is not None and (meeting := rows.meeting()):
                return self._meeting(losses, uses, names, indices, meeting)
            if not followed or self._met[key] != hooks:
                passed = functools.partial(self._met.__setitem__, key, hooks)
                check = IndexCheck(losses, calls, region, indices, self._factors(losses, calls), passed)
        elif in_full:
            self._met[key] = hooks
        folded = {each: (1, order) for each, order in orders.items() if order != "example"}
        return RowLayout(calls if region is None else [*calls, *region.uses], folded, True, check=check)

    def _meeting(
        self, losses: Tensor, uses: Uses, names: ParameterNames, indices: Sequence[RowIndex], meeting: tuple[Any, str]
    ) -> RowLayout:
        """The layout of a batch in whose graph rows of two examples meet, if no gradient shows it."""
        node, where = meeting
        try:
            return self.lay_out(losses, uses, names, indices, again=True, rounding=EXACT)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{error}. By the graph, {where}", name=error.name, place=node) from error

    def _region(
        self, losses: Tensor, uses: Uses, odd: list[LayerCall], names: ParameterNames, indices: Sequence[RowIndex],
        rounding: Rounding | None,
    ) -> SharedSubgraph:  # fmt: skip
        if len(losses) <= 1:
            return without_boundaries(losses, uses, odd)
        try:
            return _RaggedSearch(losses, odd, uses, names, indices, rounding).region()
        except (LossShapeError, UnsupportedModelError) as error:
            lengths = ", ".join(str(len(index)) for index in indices)
            raise UnsupportedModelError(
                f"{error}. By batch_index the rows of a layer are {lengths}, or one for each of the {len(losses)} "
                "losses: correct it, or add an index for rows of another kind"
            ) from error

    def _factors(self, losses: Tensor, calls: Sequence[LayerCall]) -> Tensor:
        """[B], powers of two by chance: by no random numbers of the user's, and by no data."""
        halves = any(call.dtype == torch.float16 for call in calls) or losses.dtype == torch.float16
        levels = LEVELS_OF_HALVES if halves else LEVELS
        exponents = self._dice.sample(range(levels), min(levels, len(losses)))
        exponents += self._dice.choices(range(levels), k=len(losses) - len(exponents))
        self._dice.shuffle(exponents)
        return torch.exp2(-torch.tensor(exponents, device=losses.device).to(losses.dtype))


class IndexCheck:
    """Compares the gradients of a first pass with those of losses with factors, row by row.

    Args:
        losses: [B].
        calls: uses of layers, each with rows of one kind.
        region: with the operations that bring parameters to rows; None where there are none.
        indices: of the batch.
        factors: [B].
        passed: called once nothing was found.
    """

    def __init__(
        self, losses: Tensor, calls: Sequence[LayerCall], region: SharedSubgraph | None, indices: Sequence[RowIndex],
        factors: Tensor, passed: Callable[[], None],
    ) -> None:  # fmt: skip
        self._losses, self._calls, self._indices, self._factors = losses, calls, indices, factors
        self._region, self._dtype, self._passed = region, losses.dtype, passed
        self._dims = {} if region is None else {boundary.edge: boundary.dim for boundary in region.boundaries}
        self._base: dict[Any, Tensor] = {}
        if region is not None:
            region.watch = self._see

    def watched(self, sink: Sink) -> Sink:
        """The sink, told the same, after the gradients were looked at."""

        def look(call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> None:
            if not isinstance(call, FallbackCall):
                self._base[call] = projected(grad, call.batch_dim)
            sink(call, inputs, grad)

        return look

    def _see(self, edge: Edge, grad: Tensor) -> None:
        self._base[edge] = projected(grad, self._dims[edge])

    def fails(self) -> bool:
        """Whether a row follows another factor than its example's; the graph must be there still.

        Also where numbers aren't finite, which is for a test in full to judge.
        """
        if self._region is not None:
            self._region.watch = None
        seen: dict[Any, Tensor] = {}
        calls, edges = (
            [each for each in self._base if isinstance(each, LayerCall) is wanted] for wanted in (True, False)
        )

        def look(call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> None:
            seen[call] = projected(grad, call.batch_dim)

        grads = first_pass(self._losses, calls, look, self._factors, retain_graph=True, edges=edges)
        for edge, grad in zip(edges, grads, strict=True):
            seen[edge] = projected(grad, self._dims[edge])
        own = [rows for rows in [None, *self._indices] if self._of(rows)]
        failed = bool(torch.stack([self._wrong(rows, seen) for rows in own]).any()) if own else False
        if not failed:
            self._passed()
        return failed

    def _of(self, rows: RowIndex | None) -> list[Any]:
        """What has rows by that index; None: one for each example."""
        count = len(self._losses) if rows is None else len(rows)
        return [subject for subject, base in self._base.items() if len(base) == count]

    @functools.cached_property
    def _scale(self) -> Tensor:
        """[B], the size of each example's largest row."""
        scale = torch.zeros(self._losses.shape, dtype=torch.float64, device=self._losses.device)
        for rows in [None, *self._indices]:
            for sizes in [self._base[subject].abs().amax(1).double() for subject in self._of(rows)]:
                same = sizes if rows is None else torch.zeros_like(scale).scatter_reduce(0, rows.index, sizes, "amax")
                scale = torch.maximum(scale, same)
        return scale

    def _wrong(self, rows: RowIndex | None, seen: Mapping[Any, Tensor]) -> Tensor:
        """Whether any row of these follows another factor, and is more than noise."""
        subjects = self._of(rows)
        before, after = (torch.stack([found[subject].double() for subject in subjects]) for found in (self._base, seen))
        factors, scale = (
            each.double() if rows is None else each[rows.index].double() for each in (self._factors, self._scale)
        )
        expected = before * factors.unsqueeze(1)
        fits = (after - expected).abs().amax(2) <= TOLERANCE * expected.abs().amax(2)
        noise = NOISE.get(self._dtype, NOISE[torch.float32]) * scale
        return ~(fits | (torch.maximum(before.abs().amax(2), after.abs().amax(2)) <= noise)).all()


class _RaggedSearch(Search):
    """A search among tensors whose rows belong to examples by indices.

    Args:
        losses, odd, uses, names: as `Search` has them.
        indices: of the batch.
        rounding: what may be rounding where an operation is tested; None: it is taken for what its size says, where
            that is one thing.
    """

    def __init__(
        self, losses: Tensor, odd: Sequence[LayerCall], uses: Uses, names: ParameterNames, indices: Sequence[RowIndex],
        rounding: Rounding | None,
    ) -> None:  # fmt: skip
        super().__init__(losses, odd, uses, names, DecisionCache())
        self._indices, self._in_full, self._rounding = indices, rounding is not None, rounding or USUAL

    def _multiples(self, edge: Edge) -> tuple[int, ...]:
        return tuple(len(row_orders(size, len(self._losses), self._indices)) for size in shape_of(edge))

    def _known(self, edge: Edge, dims: list[int]) -> Decision | None:
        orders = row_orders(shape_of(edge)[dims[0]], len(self._losses), self._indices)
        if self._in_full or len(dims) > 1 or len(orders) > 1:
            return self._decided.get(edge)
        return Decision(dims[0], 1, orders[0])


def _find_rows(call: LayerCall, losses: Tensor, indices: Sequence[RowIndex]) -> None:
    """Notes where the rows of a call are that had all of them in one sequence, [1, rows, ...]."""
    if call.shape[call.batch_dim] != 1 or not call.layer.row_by_row or _orders(call, losses, indices):
        return
    for dim, size in enumerate(call.shape[:-1]):
        if any(len(index) == size for index in indices):
            call.batch_dim = dim
            return


def _orders(call: LayerCall, losses: Tensor, indices: Sequence[RowIndex]) -> list[Any]:
    return row_orders(call.shape[call.batch_dim], len(losses), indices)


def _key(call: LayerCall) -> tuple:
    return serial_number(call.layer), call.parameters, call.batch_dim, len(call.shape)


def _refusal(call: LayerCall, names: ParameterNames) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{names.layer(call)}: its output {list(call.shape)} has rows that batch_index gives to one example, and the "
        "loss of another example depends on them; batch_index is wrong there, or something connects two examples (an "
        "edge between graphs, attention without a mask, a window over a border): correct the index, and let each row "
        "meet rows of its own example only"
    )
