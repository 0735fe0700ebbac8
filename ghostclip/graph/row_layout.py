"""Whose row is whose: what was proved of a model's layers on meeting them, and where a layer sees the examples.

By the proof of `ghostclip.graph.mixing_test` a layer's batch dimension is where it is said to be and in the order of
the losses; rows folded into the batch (positions, windows, heads) are grouped by example or by row. Layers that saw no
examples, and parameters used outside of layers, are followed to where they meet the examples
(`ghostclip.graph.shared.search`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ghostclip.errors import LossShapeError, UnsupportedModelError
from ghostclip.graph.layout_check import FirstGradients, LayoutCheck
from ghostclip.graph.mixing_test import Verdict, check_mixing
from ghostclip.graph.moved_rows import MovedRows
from ghostclip.graph.nodes import from_below
from ghostclip.graph.parameter_names import ParameterNames
from ghostclip.graph.picked_rows import PickedLayouts
from ghostclip.graph.reader import Uses
from ghostclip.graph.shared.positions import are_positions
from ghostclip.graph.shared.search import TOO_SMALL, DecisionCache, Search, not_a_batch
from ghostclip.graph.shared.subgraph import SharedSubgraph, parameters_of
from ghostclip.nn.base import LayerCall
from ghostclip.norms.ragged import RowIndex, RowOrder

__all__ = ["RowLayout", "RowLayouts", "without_boundaries"]


# The batches of a kind of graph on which its proofs are repeated.
REPEATED = frozenset(64 * 4**power for power in range(24))
# Where so many were tried, all is forgotten and proved anew: a forward that cuts its inputs at random makes new graphs
# for ever. They take about 40 MB.
REMEMBERED = 100_000
UNEQUAL = ". Where examples have unequal lengths, say which example each row is of (batch_index=)"
EARLIER = ". An earlier batch didn't show this; sums of batches since then may not be clipped as said"


@dataclass(frozen=True)
class RowLayout:
    """Whose the rows behind a vector of losses are.

    Attributes:
        calls: every use of a parameter.
        folded: {id(call): (rows of each example, their order)} of calls that have other than one row of each example,
            in the order of the losses; with an index, the first number means nothing.
        proved: whether all calls are proved.
        reorders: whether something may order the examples differently from batch to batch.
        check: what is left to be seen in the gradients of the pass itself; nothing is clipped before.
    """

    calls: list[LayerCall]
    folded: Mapping[int, tuple[int, RowOrder]]
    proved: bool
    reorders: bool = False
    check: LayoutCheck | None = None


class RowLayouts:
    """Remembers which uses of which layers have been proved to keep examples apart, and how their rows are grouped.

    Args:
        hold: called with Parameters whose values are needed after a backward, too.
    """

    def __init__(self, hold: Callable[[list[nn.Parameter]], None]) -> None:
        self._hold = hold
        self._proved: dict[tuple, str] = {}
        # Of how many examples the largest batch was on which it was tried; if it isn't proved, no gradient reached it,
        # or none that shows anything.
        self._tried: dict[tuple, int] = {}
        # Uses that were seen to read positions in a batch with as many examples.
        self._positions: set[tuple] = set()
        # Uses, and how many alike, of a shape that a batch of another size had too: as no multiple of it, so that they
        # saw no examples.
        self._constant: set[tuple] = set()
        self._places: dict[tuple[int, int], DecisionCache] = {}
        # How many batches had a graph of this structure.
        self._batches = Counter[int]()
        self._picked, self._moved = PickedLayouts(), MovedRows()

    @property
    def constants(self) -> int:
        """How many uses of layers, and tensors outside of layers, are known to see no examples by another batch."""
        return len(self._constant) + sum(len(places.shared) for places in self._places.values())

    def lay_out(
        self,
        losses: Tensor,
        uses: Uses,
        index: ParameterNames,
        rehearsal: bool = False,
        reached: bool = False,
    ) -> RowLayout:
        """Every use of a parameter behind ``losses`` [B], and how each call's rows are grouped.

        Runs extra backwards on first meeting a layer with so many rows an example in a graph of so many nodes, and when
        a gradient reaches one that isn't proved; and none otherwise, but for a graph that may order its examples
        differently every time.

        Args:
            losses, uses, index: what `read_graph` was given and found.
            rehearsal: the graph is that of other examples, met to see which layers see none.
            reached: this batch's gradient reached something that is open.

        Raises:
            UnsupportedModelError: rows of other examples move with one example's loss, or the grouping can't be told.
        """
        if len(self._tried) > REMEMBERED:
            self._forget()
        uses = _for_lengths(self._moved.known(losses, uses, reached))
        picked = self._picked.find(losses, uses, remember=not rehearsal)
        if picked is not None and picked.owners:
            size = picked.size, uses.size[1]
            uses = replace(uses, size=size, structure=picked.structure, moving=picked.moving, picked=picked)
            uses = _for_lengths(uses)
            uses = self._moved.known(losses, uses, reached)
        try:
            found = self._lay_out(losses, uses, index, rehearsal, reached)
        except (LossShapeError, UnsupportedModelError) as error:
            if picked is not None and (note := picked.note):
                raise UnsupportedModelError(f"{error}. {note}") from error
            raise
        left = uses if rehearsal else self._moved.learn(losses, uses)  # of a rehearsal, whose examples are copies
        return replace(found, reorders=bool(left.moving))

    def _forget(self) -> None:
        """Forgets proofs, and what was moved; what other sizes of batches showed of tensors that all share stays."""
        self._proved, self._tried, self._batches = {}, {}, Counter()
        for places in self._places.values():
            places.decisions.clear()
        self._picked, self._moved = PickedLayouts(), MovedRows()

    def _lay_out(self, losses: Tensor, uses: Uses, index: ParameterNames, rehearsal: bool, reached: bool) -> RowLayout:
        examples, odd, unsure = losses.shape[0], self._odd(uses, losses.shape[0]), False
        due = not (rehearsal or reached) and self._is_due(uses.structure)
        if reached and uses.size in self._places:
            self._places[uses.size].drop_open()
        picked = {} if uses.picked is None else uses.picked.calls
        if examples == 1:  # an expert that no token met
            picked = {
                c: RowIndex(torch.zeros(0, dtype=torch.int64, device=c.device), 1) for c in uses.calls if not _rows(c)
            }
        while True:
            region = self._region(losses, uses, odd, index, unsure, rehearsal) if odd or uses.leaves else None
            if odd and examples > 1:
                self._constant |= _alike([call for call in odd if _is_odd(call, examples)], uses).items()
            shared = set() if region is None else {id(call) for call in region.calls.values()}
            calls = [call for call in uses.calls if id(call) not in shared and call not in picked]
            if unfit := [call for call in calls if examples and (_is_odd(call, examples) or not _rows(call))]:
                raise not_a_batch(unfit[0], examples, index.layer(unfit[0]))
            keys = _numbered({call: (uses.size, uses.structure, *_key(call, uses, examples)) for call in calls})
            pending = self._pending(keys, examples, bool(uses.moving) or rehearsal or reached or due)
            found = check_mixing(losses, calls, pending) if pending else {}
            # Of layers that saw data, a row of zeros is nothing unusual, and its input may not be finite.
            lone = [call for call, v in found.items() if v.lone and not call.sources and call.layer.reads_indices]
            known = [call for call in calls if keys[call] in self._proved]
            tables = {*self._tables(losses, uses, found, index, known), *lone}
            if not tables:
                break
            odd, unsure = [*odd, *(call for call in calls if call in tables)], bool(lone)
        if not rehearsal:  # whose examples are copies, which may meet unseen
            self._proved |= {keys[call]: v.best.row_order for call, v in found.items() if v.best and v.sure}
            self._tried |= {keys[call]: max(examples, self._tried.get(keys[call], 0)) for call in pending}
        folded: dict[int, tuple[int, RowOrder]] = {
            id(call): (key[-1], self._row_order(call, key, found.get(call), index))
            for call, key in keys.items()
            if key[-1] != 1
        }
        left = [call for call in calls if keys[call] not in self._proved] if examples > 1 else []
        unreached = [call for call in left if call not in pending]
        folded |= {id(call): (1, rows) for call, rows in picked.items()}
        calls += [call for call in picked if id(call) not in shared]
        calls = calls if region is None else [*calls, *region.uses]
        boundaries = () if region is None else [each for each in region.boundaries if each.alternatives != ()]
        awaited = uses.awaited
        check = FirstGradients(unreached, region, index, awaited) if unreached or boundaries or awaited else None
        return RowLayout(calls, folded, not (left or boundaries or awaited), check=check)

    def _is_due(self, structure: int) -> bool:
        """Whether proofs are repeated on this batch: what was multiplied with zero so far may count by now."""
        self._batches[structure] += 1
        return self._batches[structure] in REPEATED

    def _odd(self, uses: Uses, examples: int) -> list[LayerCall]:
        """The calls that saw no examples, as far as is known."""
        known = self._constant.intersection(_alike(uses.calls, uses).items()) if self._constant else ()
        tables, numbers = {key for key, _ in known}, _numbers(uses) if self._positions else {}
        picked = () if uses.picked is None else uses.picked.calls
        return [
            call
            for call in uses.calls
            if call not in picked
            and (
                _is_odd(call, examples)
                or (examples and numbers.get(call) in self._positions)
                or (tables and _use(call, uses) in tables)
            )
        ]

    def _pending(self, keys: dict[LayerCall, tuple], examples: int, anew: bool) -> list[LayerCall]:
        """The calls to be proved now; all of them where a gradient came a new way, which may lead through others.

        A proof is repeated on a batch that is twice as large: of two examples, say, fewer meet than of twenty.
        """
        if examples <= 1:
            return []
        return [call for call, key in keys.items() if anew or examples >= 2 * self._tried.get(key, 0)]

    def _tables(
        self, losses: Tensor, uses: Uses, found: dict[LayerCall, Verdict], index: ParameterNames,
        known: Collection[LayerCall],
    ) -> list[LayerCall]:  # fmt: skip
        """The calls that are tables of positions as long as a batch; raises where examples mix in truth.

        ``known``: those that didn't mix them in an earlier batch.
        """
        # Of all examples, a table has a row that isn't finite where one example's is. As a tensor that all share,
        # examples' own rows have the same norms.
        dark = [call for call, verdict in found.items() if verdict.dark]
        dark = [call for call in dark if (found[call].spreads and not call.sources) or are_positions(losses, [call])]
        mixing = [call for call, verdict in found.items() if verdict.best is None]
        if not mixing:
            return dark
        if not are_positions(losses, mixing):
            call = next((call for call in mixing if call.sources), mixing[0])
            too_small = TOO_SMALL if call.dtype == torch.float16 else ""
            table = (
                f", or, if it gives {_rows(call)} rows for all examples together, begin with a batch of another size"
                if _may_be_a_table(call, len(losses))
                else ""
            )
            raise UnsupportedModelError(
                f"{index.layer(call)}: one example's loss depends on rows of this output that belong to others "
                f"({list(call.shape)}, examples in dimension {call.batch_dim}), so examples mix"
                f"{too_small}; compute each loss from its own example, or correct wrap(model, batch_dim={{...}})"
                f"{table}{UNEQUAL if uses.lengths else ''}{EARLIER if call in known else ''}",
                name=index.layer(call), place=call,
            )  # fmt: skip
        numbers = _numbers(uses)
        self._positions |= {numbers[call] for call in mixing}
        return [*mixing, *dark]

    def _region(
        self, losses: Tensor, uses: Uses, odd: list[LayerCall], index: ParameterNames, unsure: bool, rehearsal: bool
    ) -> SharedSubgraph:
        """What all examples share, and where they meet it; ``unsure``: one of the odd calls may have seen examples."""
        self._hold([node.variable for node in uses.leaves] + [p for each in odd for p in each.layer.parameters()])
        if len(losses) <= 1:
            return without_boundaries(losses, uses, odd)
        places = DecisionCache() if uses.moving else self._places.setdefault(uses.size, DecisionCache())
        places.rehearses = rehearsal
        search = Search(losses, odd, uses, index, places)
        try:
            return search.region()
        except (LossShapeError, UnsupportedModelError):
            if search.dark or unsure:
                # Nobody knows what one backward an example would not tell, and nothing is refused for what it is.
                return without_boundaries(losses, uses, list(search.calls.values()))
            raise

    def _row_order(self, call: LayerCall, key: tuple, verdict: Verdict | None, index: ParameterNames) -> RowOrder:
        """How the call's rows are grouped, as was proved or this batch shows."""
        # No verdict: all of its gradient is zero, or will be looked at when it isn't.
        if key not in self._proved and verdict is None:
            return "example"
        if key in self._proved:
            return self._proved[key]
        assert verdict is not None
        if verdict.best is None or not (verdict.shown or verdict.dark):
            raise UnsupportedModelError(
                f"{index.layer(call)}: {key[-1]} rows an example are folded into its batch dimension, and this batch "
                f"doesn't show how; give it inputs [B, positions, features] instead",
                name=index.layer(call), place=call,
            )  # fmt: skip
        return verdict.best.row_order


def _for_lengths(uses: Uses) -> Uses:
    """The uses with another structure for each of the lengths that proofs hold for."""
    return uses if uses.lengths is None else replace(uses, structure=hash((uses.structure, uses.lengths)))


def _rows(call: LayerCall) -> int:
    return call.shape[call.batch_dim]


def _is_odd(call: LayerCall, examples: int) -> bool:
    """Whether a layer's rows are no multiple of the examples."""
    rows = call.shape[call.batch_dim]
    return bool(rows % examples if examples else rows)


def _use(call: LayerCall, uses: Uses) -> tuple:
    """What a layer's use that sees no examples has in common in all batches."""
    return (uses.size, uses.layers[call], call.parameters, call.batch_dim, call.shape)


def _alike(calls: list[LayerCall], uses: Uses) -> dict[tuple, int]:
    """How many of the calls that read nothing autograd knows of are alike."""
    return Counter(_use(call, uses) for call in calls if not call.sources)


def _key(call: LayerCall, uses: Uses, examples: int) -> tuple:
    """What a layer's use with so many rows an example, the last of these, has in common in all batches."""
    count = _rows(call) // examples if examples else 1
    return (uses.layers[call], call.parameters, call.batch_dim, len(call.shape), count)


def _numbers(uses: Uses) -> dict[LayerCall, tuple]:
    """{call: which use of which layer it is in graphs of this structure}."""
    return _numbered({call: (uses.structure, uses.layers[call], call.parameters) for call in uses.calls})


def _numbered(keys: dict[LayerCall, tuple]) -> dict[LayerCall, tuple]:
    """The keys with the number of the use before the rows: rows of two uses of a layer may be grouped in two ways."""
    seen = Counter[tuple]()
    found = {}
    for call, key in keys.items():
        seen[key] += 1
        found[call] = (*key[:-1], seen[key], key[-1])
    return found


def without_boundaries(losses: Tensor, uses: Uses, shared: list[LayerCall]) -> SharedSubgraph:
    """All of the graph below which parameters are that are used by ``shared`` or outside of layers.

    Of one example, or none, all is its own; of several, it takes one backward for each.
    """
    leaves = {node: node.variable for node in uses.leaves}
    while True:
        parameters = set(map(id, leaves.values())).union(*map(parameters_of, shared))
        users = [call for call in uses.calls if not parameters.isdisjoint(parameters_of(call))]
        if len(users) == len(shared):
            break
        shared = users
    ids = set(map(id, users))
    calls = {node: node.call for node in from_below(losses.grad_fn) if id(getattr(node, "call", None)) in ids}
    return SharedSubgraph(len(losses), [], leaves, calls)


def _may_be_a_table(call: LayerCall, examples: int) -> bool:
    """Whether a layer may give the same rows for all examples together, as one that reads position ids [T] does."""
    return not call.sources and (call.layer.reads_indices or len(call.shape) == 2 or _rows(call) > examples)
