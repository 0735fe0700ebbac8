"""Operations that move rows by values: which example a row belongs to may be another one in the next batch.

Of most operations the graph's structure says all about where their rows go. An index, a product with a matrix of data,
a hook or a function of somebody's own say it by values. Where such an operation may move examples, ownership is
measured in every batch; where it is an index that can be looked at, in every batch in which it isn't the identity.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ghostclip.graph.nodes import ACCUMULATE, COPY_INTO_SLICES, Edge, inputs_of, saved_dimensions, shape_of
from ghostclip.graph.operations import (
    ALONG,
    ATTENTION,
    BY_VALUE,
    EMBEDDING,
    FIRST,
    HIDING_CONSTANTS,
    INDEXED,
    LAST,
    MASKED_SCATTER,
    OTHER_DIMENSIONS,
    POINTWISE,
    PRODUCTS,
    SHAPING,
    WORD,
)
from ghostclip.graph.owners import Owned, Rows
from ghostclip.graph.reader import Uses
from ghostclip.nn.base import LayerCall

__all__ = ["Movements", "hides_constants", "made_of_parameters", "movements"]


@dataclass(frozen=True)
class Movements:
    """What has to be looked at in each batch of a structure.

    Attributes:
        always: why ownership has to be measured in every batch; "" where it hasn't.
        indexed: (place of a node, the dimension along which its subject has the examples).
        views: (place of a node, rows of its input, rows of its output) of reshapes that leave the examples in place
            only where sizes agree.
    """

    always: str
    indexed: Sequence[tuple[int, int]] = ()
    views: Sequence[tuple[int, Rows, Rows]] = ()

    def moved(self, uses: Uses, examples: int) -> bool:
        """Whether some operation moves the examples in this batch."""
        return any(_moves(uses.nodes[place], dim, examples) for place, dim in self.indexed) or any(
            _unit(_shape(uses.nodes[place].next_functions[0]), before, examples)
            != _unit(_shape((uses.nodes[place], 0)), after, examples)
            for place, before, after in self.views
        )


def movements(uses: Uses, owned: Mapping[Edge, Owned], examples: int, shared: Collection[Any] = ()) -> Movements:
    """What moves rows in graphs like this one, of so many examples.

    Args:
        uses: of the graph.
        owned: what was measured of each of its tensors, that of a layer's output as (its node, 0).
        examples: B.
        shared: nodes that were shown to be the same whatever the examples are.
    """
    if uses.hooked:
        return Movements("a hook was registered during the forward")
    if packed := next((call for call in uses.calls if call.lengths and call.sources), None):
        return Movements(f"{type(packed.layer).__name__} takes rows by lengths")
    constant = made_of_parameters(uses) | set(shared)
    spread = next((node for (node, _), each in owned.items() if each.is_shared and node not in constant), None)
    if spread is not None:
        return Movements(f"{spread.name()} has the examples in several dimensions")
    indexed, views = list[tuple[int, int]](), list[tuple[int, Rows, Rows]]()
    for place, node in enumerate(uses.nodes):
        if node in constant or isinstance(getattr(node, "call", None), LayerCall) or type(node) is ACCUMULATE:
            continue
        word = _word(node)
        if word in INDEXED or node.name() == COPY_INTO_SLICES:
            edge = _subject(node, word)
            if edge[0] in constant:
                continue  # rows of a table: those of its result are the examples'
            subject = owned.get(edge)
            dim = -1 if subject is None or subject.zero or subject.rows is None else subject.rows.dim
            if dim >= 0 and hasattr(node, "_saved_dim") and saved_dimensions(node, len(_shape(edge))) != [dim]:
                continue
            if word in BY_VALUE or node.name() == COPY_INTO_SLICES:
                indexed.append((place, dim))
            elif _moves(node, dim, examples):
                return Movements(f"{node.name()} goes along the dimension that has the examples")
        elif reason := _static_reason(node, word, owned):
            return Movements(reason)
        elif word in ("View", "ReshapeAlias", "UnsafeView", "ReshapeCopy"):
            before, after = _regular(node.next_functions[0], owned), _regular((node, 0), owned)
            if before is not None and after is not None:
                views.append((place, before, after))
    return Movements("", indexed, views)


def _static_reason(node: Any, word: str, owned: Mapping[Edge, Owned]) -> str:
    """Why an operation that isn't indexed may move examples by values; "" where it can't."""
    name = node.name()
    if type(node).__module__ != "builtins":
        return "" if type(node).__module__.startswith("ghostclip") else f"{name} is a function of somebody's own"
    if word in PRODUCTS:
        return f"{name} sums over the examples' dimension" if _contracts(node, owned) else ""
    if ATTENTION.search(word):
        sides = [(edge, _dim(edge, owned)) for edge in node.next_functions[1:3]]
        crosses = any(dim is not None and dim == len(_shape(edge)) - 2 for edge, dim in sides)
        return f"{name} attends over the examples' dimension" if crosses else ""
    if word in POINTWISE:
        return f"{name} moves the examples to another dimension" if _shifts(node, owned) else ""
    if word in ALONG or word == "Cat":
        along = any(dim in _worked(node, word, edge) for edge, dim in _examples_dims(node, owned))
        return f"{name} goes along the dimension that has the examples" if along else ""
    return "" if word in SHAPING or name == "torch::autograd::CopyBackwards" else f"{name} isn't known"


def _examples_dims(node: Any, owned: Mapping[Edge, Owned]) -> list[tuple[Edge, int]]:
    """(tensor, the dimension that has the examples) of what an operation was given; of its output if of nothing."""
    edges = [edge for edge in node.next_functions if edge[0] is not None] or [(node, 0)]
    return [(edge, dim) for edge in edges if (dim := _dim(edge, owned)) is not None]


def _worked(node: Any, word: str, edge: Edge) -> set[int]:
    """Along which dimensions of a tensor that it is given an operation goes."""
    total = len(_shape(edge))
    if word in FIRST:
        return set(range(1, total))
    if (shape := getattr(node, "_saved_normalized_shape", None)) is not None:
        return set(range(total - len(shape), total))
    if word in LAST:
        return set(range(total - LAST[word], total))
    if word == "CtcLoss":
        return {0, 2} if total == 3 else set(range(total))
    return set(saved_dimensions(node, total)) or set(range(total))


def _word(node: Any) -> str:
    """The operation that a node of torch's own belongs to."""
    found = WORD.match(node.name())
    return found[1] if found else ""


def _shape(edge: Edge) -> torch.Size:
    """The shape of a tensor; a layer's output may be a view of what its node gave."""
    call = getattr(edge[0], "call", None)
    return torch.Size(call.shape) if isinstance(call, LayerCall) else shape_of(edge)


def _dim(edge: Edge, owned: Mapping[Edge, Owned]) -> int | None:
    """The dimension that has the examples; None where there is none, or it isn't known."""
    found = owned.get(edge)
    return None if found is None or found.rows is None or found.zero else found.rows.dim


def _regular(edge: Edge, owned: Mapping[Edge, Owned]) -> Rows | None:
    """How a tensor's rows lie; None where they are in no order, or where zeros didn't show it."""
    found = owned.get(edge)
    return found.rows if found is not None and found.is_regular and not found.zero else None


def _contracts(node: Any, owned: Mapping[Edge, Owned]) -> bool:
    """Whether a product sums over the examples' dimension of a factor; the other may be a matrix of parameters."""
    left, right = node.next_functions[-2:]
    dims = _dim(left, owned), _dim(right, owned)
    if dims[0] is not None and dims[0] == len(_shape(left)) - 1:
        return True
    return dims[1] is not None and dims[1] == max(len(_shape(right)) - 2, 0)


def _shifts(node: Any, owned: Mapping[Edge, Owned]) -> bool:
    """Whether broadcasting moves the examples to another dimension, counted from the last."""
    outputs = [(node, number) for number in range(len(node._input_metadata)) if (node, number) in owned]
    for edge in node.next_functions:
        if edge[0] is None or (dim := _dim(edge, owned)) is None:
            continue
        for output in outputs:
            other = _dim(output, owned)
            if other is not None and other - len(_shape(output)) != dim - len(_shape(edge)):
                return True
    return False


def made_of_parameters(uses: Uses) -> set[Any]:
    """The nodes to which nothing led but parameters: no constant, no index, no mask, and no layer."""
    found = set[Any]()
    leaves = set(uses.leaves)
    for node in reversed(_from_above(uses)):
        if node in leaves:
            found.add(node)
        elif type(node) is not ACCUMULATE and not constants_in(node):
            below = [each for each, _ in inputs_of(node)]
            if below and found.issuperset(below):
                found.add(node)
    return found


def constants_in(node: Any) -> bool:
    """Whether an operation was given something that isn't in the graph: data, a constant, an index, a mask."""
    if isinstance(getattr(node, "call", None), LayerCall) or type(node).__module__ != "builtins":
        return True
    return hides_constants(node) or any(below is None for below, _ in node.next_functions)


def hides_constants(node: Any) -> bool:
    """Whether an operation may have been given something that isn't among its inputs in the graph, as an index."""
    word = _word(node)
    known = word in POINTWISE or word in SHAPING or word in ALONG or word in PRODUCTS or word in INDEXED
    return not known or word in HIDING_CONSTANTS


def _from_above(uses: Uses) -> list[Any]:
    """The nodes, each before all of its inputs."""
    left = {node: len(each) for node, each in uses.consumers.items()}
    ready = [node for node, count in left.items() if not count]
    for node in ready:
        for below, _ in inputs_of(node):
            if below is not None:
                left[below] -= 1
                if not left[below]:
                    ready.append(below)
    return ready


def _unit(shape: torch.Size, rows: Rows, examples: int) -> int | None:
    """How many numbers in a row, as they lie in order, belong to one example; None where that can't be said."""
    if rows.dim >= len(shape) or shape[rows.dim] % examples:
        return None
    return shape[rows.dim + 1 :].numel() * (shape[rows.dim] // examples if rows.order == "example" else 1)


def _subject(node: Any, word: str) -> Edge:
    """A tensor that has the examples in the dimension where the operation's first input has them."""
    below = node.next_functions[0]
    return below if word in OTHER_DIMENSIONS and below[0] is not None else (node, 0)


def _moves(node: Any, dim: int, examples: int) -> bool:
    """Whether an indexing operation may move entries along the dimension ``dim`` of its subject, -1 if unknown."""
    if node.name() == COPY_INTO_SLICES:
        return not _copies_in_place(node, dim)
    moved = moved_dimensions(node, examples)
    return bool(moved) if dim < 0 else dim in moved


def moved_dimensions(node: Any, examples: int) -> set[int]:
    """Along which dimensions that may hold examples an indexing operation may move entries.

    They are those of its first input. The first dimension may hold rows of examples whatever its size is; any other, if
    it is at least that of a batch.
    """
    word = _word(node)
    shape = _shape(node.next_functions[0] if node.next_functions[0][0] is not None else (node, 0))
    moved = set(saved_dimensions(node, len(shape)))
    if isinstance(indices := getattr(node, "_saved_indices", None), tuple):
        moved = _indexed_dimensions(indices, shape)
    elif word == MASKED_SCATTER:
        moved = _scattered_dimensions(node._saved_mask.expand(shape), node.next_functions[1])
    elif word == "IndexSelect":
        (dim,) = moved or {0}
        moved = set() if _is_in_order(node._saved_index, shape[dim] if shape else 1) else {dim}
    elif not moved:
        moved = {0} if word == EMBEDDING else set(range(len(shape)))
    return {dim for dim in moved if dim == 0 or (examples and shape[dim] >= examples)}


def _copies_in_place(node: Any, dim: int) -> bool:
    """Whether a copy into a part of a tensor puts entries of each example to entries of this example.

    A copy doesn't say which part it writes; its backward, given the number of each entry's example, hands the sources
    the numbers of the examples to which their entries went. Sources have their examples in the dimension of that size.

    Args:
        node: a copy, with the tensor it writes into as its output.
        dim: of the output, the dimension that has the examples.
    """
    sources = [slot for slot, (below, _) in enumerate(node.next_functions) if slot and below is not None]
    if not sources or dim < 0:  # what is done to a part in place isn't known
        return False
    shape = _shape((node, 0))
    numbers = torch.arange(shape[dim], dtype=node._input_metadata[0].dtype, device=node._input_metadata[0].device)
    if not numbers.is_floating_point() or shape[dim] > 2 / torch.finfo(numbers.dtype).eps:
        return False
    spread = numbers.view([-1 if place == dim else 1 for place in range(len(shape))]).expand(shape)
    with torch.no_grad():
        handed = node(spread)
    return all(
        handed[slot] is not None
        and any(
            size == shape[dim] and bool((handed[slot].movedim(own, -1) == numbers).all())
            for own, size in enumerate(handed[slot].shape)
        )
        for slot in sources
    )


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
    whole = source[0] is None or _shape(source).numel() == int(counts.sum())
    rows_stay = whole and bool((counts == counts[:1]).all())
    return set(range(int(rows_stay), mask.dim()))


def _is_in_order(index: Tensor, size: int) -> bool:
    """Whether all entries along a dimension of that size stay in place, along the first that an index is broadcast to.

    h[torch.arange(B), lengths] is how a model picks a position of each example, and h[torch.arange(B)[:, None], places]
    is how it picks several.
    """
    if index.dtype != torch.int64 or index.dim() == 0 or not index.numel() == index.shape[0] == size:
        return False
    return torch.equal(index.flatten(), _numbers_to(size, index.device))


@functools.lru_cache(maxsize=64)
def _numbers_to(size: int, device: torch.device) -> Tensor:
    return torch.arange(size, device=device)
