"""Operations that move entries by indices: whether they leave each example where it is.

Indices are as new as their batch, and an operation that moves entries along the dimension of the examples may order
these differently every time. Along which dimension a tensor has the examples is the same in all batches of a kind of
graph. It is proved once (`ghostclip.graph.mixing_test`); after that the dimensions along which an operation moves
entries are compared with it in each batch, and no other backward is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ghostclip.graph.mixing_test import verdicts
from ghostclip.graph.nodes import ACCUMULATE, COPY_INTO_SLICES, Edge, from_below, inputs_of, saved_dimensions, shape_of
from ghostclip.graph.reader import Uses
from ghostclip.graph.shared.search import CREATORS
from ghostclip.native.custom_ops import is_traced
from ghostclip.nn.base import LayerCall

__all__ = ["MovedRows", "moved_dimensions"]

EMBEDDING, MASKED_SCATTER = "EmbeddingBackward0", "MaskedScatterBackward0"
# Operations whose results may have other dimensions than their first inputs.
OTHER_DIMENSIONS = {EMBEDDING, "IndexBackward0", "TakeBackward0"}


class MovedRows:
    """Remembers along which dimension the tensors that such operations read or write have the examples."""

    def __init__(self) -> None:
        self._dims: dict[tuple, int] = {}
        # Of how many examples the largest batch was on which this was tried.
        self._tried: dict[tuple, int] = {}
        # What no gradient had reached.
        self._unreached: set[tuple] = set()

    def known(self, losses: Tensor, uses: Uses, reached: bool = False) -> Uses:
        """The uses without moving operations that are known to leave the examples of ``losses`` [B] in place.

        ``reached``: this batch's gradients reached something that none had reached before.
        """
        examples, moving = len(losses), uses.moving
        if examples < 2:
            return replace(uses, moving=[])
        if is_traced():  # no index of a table is looked at
            moving = _of_examples(losses, moving)
        moving = [(number, node) for number, node in moving if self._moves(uses, number, node, examples, reached)]
        awaited = (
            [] if reached else [(node, slots) for n, node in uses.moving if (slots := self._awaited(uses, n, node))]
        )
        return replace(uses, moving=_of_examples(losses, moving), awaited=awaited)

    def learn(self, losses: Tensor, uses: Uses) -> Uses:
        """Proves where the examples of ``losses`` [B] are, and returns what `known` does then.

        Args:
            losses: [B], of a batch of which it was tested that examples don't mix. In another one a dimension of the
                same size, along which nothing moves, can look like that of the examples.
            uses: what `known` left.
        """
        examples, subjects = len(losses), dict[tuple, Edge]()
        for number, node in uses.moving:
            own = _key(uses, number, node)
            for key in [own, *((*own, slot) for slot in _sources(node))]:
                if key not in self._dims and examples >= 2 * self._tried.get(key, 0):
                    subjects[key] = _subject(node) if key == own else node.next_functions[key[-1]]
                    self._tried[key] = examples
        if not subjects or is_traced():
            return uses
        dims = {
            edge: [d for d, size in enumerate(shape_of(edge)) if size % examples == 0] for edge in subjects.values()
        }
        calls = [call for call in uses.calls if call.shape[call.batch_dim] == examples]
        found = verdicts(losses, calls, {edge: each for edge, each in dims.items() if each})
        for key, edge in subjects.items():
            verdict = found.get(edge)
            if verdict is not None and verdict.best is not None and verdict.sure:
                self._dims[key] = verdict.best.dim
                self._unreached.discard(key)
            elif verdict is not None and verdict.alternatives is None:
                del self._tried[key]
                self._unreached.add(key)
        return self.known(losses, uses)

    def _awaited(self, uses: Uses, number: int, node: Any) -> list[int]:
        """Which sources of a copy no gradient has reached so far."""
        key = _key(uses, number, node)
        return [slot for slot in _sources(node) if (*key, slot) in self._unreached]

    def _moves(self, uses: Uses, number: int, node: Any, examples: int, reached: bool) -> bool:
        """Whether an operation may move entries along the dimension that has the examples, where that is known."""
        key = _key(uses, number, node)
        known = self._dims.get(key)
        if known is not None and node.name() == COPY_INTO_SLICES:
            awaited = [] if reached else self._awaited(uses, number, node)
            sources = {slot: self._dims.get((*key, slot)) for slot in _sources(node) if slot not in awaited}
            return is_traced() or not _copies_in_place(node, known, sources)
        moved = moved_dimensions(node, examples)
        return bool(moved) if known is None else known in moved


def _key(uses: Uses, number: int, node: Any) -> tuple:
    """What the same operation has in every batch's graph; beside rows that are picked it has another number."""
    below = node.next_functions[0][0]
    names = (node.name(), "" if below is None else below.name())
    return uses.size, uses.structure, uses.picked is None, number, names, len(shape_of(_subject(node)))


def _sources(node: Any) -> list[int]:
    """Which of its inputs a copy into a part of a tensor writes there; [] for other operations."""
    if node.name() != COPY_INTO_SLICES:
        return []
    return [slot for slot, (below, _) in enumerate(node.next_functions) if slot and below is not None]


def _copies_in_place(node: Any, dim: int, sources: Mapping[int, int | None]) -> bool:
    """Whether a copy into a part of a tensor puts entries of each example to entries of this example.

    A copy doesn't say which part it writes; its backward, given the number of each entry's example, hands the sources
    the numbers of the examples to which their entries went.

    Args:
        node: of kind `COPY_INTO_SLICES`, with the tensor it writes into as its output.
        dim: of the output, the dimension that has the examples.
        sources: {which input: its dimension that has the examples, if that is known}.
    """
    if not sources:
        return True
    shape = shape_of((node, 0))
    numbers = torch.arange(shape[dim], dtype=node._input_metadata[0].dtype, device=node._input_metadata[0].device)
    if not numbers.is_floating_point() or shape[dim] > 2 / torch.finfo(numbers.dtype).eps:
        return False
    spread = numbers.view([-1 if place == dim else 1 for place in range(len(shape))]).expand(shape)
    with torch.no_grad():
        handed = node(spread)
    found = []
    for slot, own in sources.items():
        if own is None or handed[slot] is None or handed[slot].shape[own] != shape[dim]:
            return False
        found.append((handed[slot].movedim(own, -1) == numbers).all())
    return bool(torch.stack(found).all())


def _subject(node: Any) -> Edge:
    """A tensor that has the examples in the dimension where the operation's first input has them."""
    return node.next_functions[0] if node.name() in OTHER_DIMENSIONS else (node, 0)


def moved_dimensions(node: Any, examples: int) -> set[int]:
    """Along which dimensions that may hold examples an operation of a `REORDERING` kind may move entries.

    They are those of its first input. The first dimension may hold rows of examples whatever its size is; any other, if
    it is at least that of a batch.
    """
    shape = shape_of(node.next_functions[0] if node.next_functions[0][0] is not None else (node, 0))
    moved = set(saved_dimensions(node, len(shape)))
    if isinstance(indices := getattr(node, "_saved_indices", None), tuple):
        moved = _indexed_dimensions(indices, shape)
    elif node.name() == MASKED_SCATTER:
        moved = _scattered_dimensions(node._saved_mask.expand(shape), node.next_functions[1])
    elif not moved:
        moved = {0} if node.name() == EMBEDDING else set(range(len(shape)))
    return {dim for dim in moved if dim == 0 or (examples and shape[dim] >= examples)}


def _indexed_dimensions(indices: tuple[Tensor | None, ...], shape: torch.Size) -> set[int]:
    """Along which dimensions of a tensor of that shape entries come from other places than their own."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for _, index in given):
        return set(range(given[0][0], len(shape)))  # a mask may have several dimensions
    most = max([index.dim() for _, index in given])
    return {dim for dim, index in given if index.dim() != most or not _is_in_order(index, shape[dim])}


def _scattered_dimensions(mask: Tensor, source: Edge) -> set[int]:
    """Along which dimensions entries may come from other places than their own.

    Entries are taken one after another; where as many go to each row along the first dimension, and none are left over,
    rows stay in place.
    """
    counts = mask.flatten(1).sum(1) if mask.dim() > 1 else mask.long()
    whole = source[0] is None or shape_of(source).numel() == int(0 if is_traced() else counts.sum())
    rows_stay = not is_traced() and whole and bool((counts == counts[:1]).all())
    return set(range(int(rows_stay), mask.dim()))


def _is_in_order(index: Tensor, size: int) -> bool:
    """Whether all entries along a dimension of that size stay in place, along the first that an index is broadcast to.

    h[torch.arange(B), lengths] is how a model picks a position of each example, and h[torch.arange(B)[:, None], places]
    is how it picks several.
    """
    if index.dtype != torch.int64 or index.dim() == 0 or not index.numel() == index.shape[0] == size:
        return False
    return torch.equal(index.flatten(), torch.arange(size, device=index.device))


def _of_examples(losses: Tensor, moving: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """Those of the operations that read more than tables: parameters, and what was made of these alone."""
    moving = [(number, node) for number, node in moving if not _are_parameters(node.next_functions)]
    if not moving:
        return []
    shared = _tables(losses) | {None}
    return [(number, node) for number, node in moving if not shared.issuperset(e[0] for e in node.next_functions)]


def _are_parameters(edges: Sequence[Edge]) -> bool:
    return all(below is None or type(below) is ACCUMULATE for below, _ in edges)


def _tables(losses: Tensor) -> set[Any]:
    """The nodes to which parameters led alone, and layers whose rows are no multiple of the batch."""
    tables, examples = set[Any](), len(losses)
    for node in from_below(losses.grad_fn):
        below, call = [each for each, _ in inputs_of(node)], getattr(node, "call", None)
        if isinstance(call, LayerCall):
            own = call.shape[call.batch_dim] % examples != 0
        else:
            # What is picked of a parameter, by a batch's indices say, has rows of examples.
            own = type(node) is ACCUMULATE or (None not in below and node.name() not in CREATORS)
        if own and tables.issuperset(below):
            tables.add(node)
    return tables
