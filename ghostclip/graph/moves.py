"""Operations that move rows by values: which example a row belongs to may be another one in the next batch.

Of most operations the graph's structure says all about where their rows go. An index, a product with a matrix of data,
a hook or a function of somebody's own say it by values. Where such an operation may move examples, ownership is
measured in every batch; where it can be looked at (an index, or the backward of a function), in every batch in which
it moves or mixes them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ghostclip.graph import operations as op
from ghostclip.graph.nodes import ACCUMULATE, Edge, is_own_function, saved_dimensions, shape_of
from ghostclip.graph.reader import Uses
from ghostclip.graph.rows import Owned, Rows, rows_in_order
from ghostclip.native.custom_ops import constant_values, is_traced
from ghostclip.nn.base import LayerCall
from ghostclip.norms.ragged import RowIndex

__all__ = ["Movements", "movements"]

# Types with room for powers of two around 1, and the largest of their exponents.
EXACT, EXPONENTS = (torch.float32, torch.float64, torch.bfloat16), 16
# The exponent of one example, beside which those of the others are small.
ODD_POWER = 60

# Not Python's own, which users seed.
_chance = random.Random()


@dataclass(frozen=True)
class Movements:
    """What has to be looked at in each batch of a structure, whose ownership is measured where rows moved.

    Attributes:
        indexed: (place of a node, how its subject's rows belong to the examples; None if that isn't known).
        views: (place of a node, rows of its input, rows of its output) of reshapes that leave the examples in place
            only where sizes agree.
    """

    indexed: Sequence[tuple[int, Rows | None]] = ()
    views: Sequence[tuple[int, Rows, Rows]] = ()

    def moved(self, uses: Uses, examples: int) -> bool:
        """Whether some operation moves the examples in this batch."""
        for place, before, after in self.views:
            node = uses.nodes[place]
            if _unit(node.next_functions[0], before, examples) != _unit((node, 0), after, examples):
                return True
        return any(_moves(uses.nodes[place], rows, examples) for place, rows in self.indexed)


def movements(uses: Uses, owned: Mapping[Edge, Owned], examples: int, shared: Collection[Any] = ()) -> Movements | None:
    """The operations to look at in every batch of this structure; None where one can't be looked at.

    Args:
        uses: of the graph.
        owned: what was measured of each of its tensors, that of a layer's output as (its node, 0).
        examples: B.
        shared: nodes that were shown to be the same whatever the examples are.
    """
    constant = uses.made_of_parameters | set(shared)
    # Checkpointing computes a block again for whatever is read of it, and keeps what it computed.
    recomputed = any(call.has_saved_tensor_hooks for call in uses.calls)
    by_lengths = any(call.lengths and call.sources for call in uses.calls)
    seen = {edge: each for edge, each in owned.items() if edge[0] not in constant and not each.zero}
    if uses.hooked or by_lengths or _is_unclear(uses, seen, examples):
        return None
    indexed, views = list[tuple[int, Rows | None]](), list[tuple[int, Rows, Rows]]()
    for place, node in enumerate(uses.nodes):
        if node in constant or type(node) is ACCUMULATE or isinstance(getattr(node, "call", None), LayerCall):
            continue
        if (word := op.word_of(node)) in op.INDEXED:
            edge = _subject(node, word)
            rows, along = _rows(edge, owned), saved_dimensions(node, len(_shape(edge)))
            # Lookups in a shared table are left out: the owners of rows of their outputs were measured.
            if edge[0] in constant or (rows is not None and along and rows.dim not in along):
                continue
            if word == op.AS_STRIDED and (node, 0) not in seen:  # zero: looked at as soon as it isn't
                continue
            if word in op.BY_VALUE:
                indexed.append((place, rows))
            elif _moves(node, rows, examples):
                return None
        elif is_own_function(node):
            if recomputed:
                return None
            indexed.append((place, _rows((node, 0), owned)))
        elif _may_mix(node, word, owned) or (word in op.REARRANGING and _may_rearrange(node, seen)):
            return None
        elif word in op.VIEWS:
            before, after = _regular(node.next_functions[0], owned), _regular((node, 0), owned)
            if before is not None and after is not None:
                views.append((place, before, after))
    return Movements(indexed, views)


def _may_rearrange(node: Any, seen: Mapping[Edge, Owned]) -> bool:
    """Whether a slice, a stack or the like may move rows that were zero, or whose order isn't known, to others."""
    edges = [*node.next_functions, *((node, number) for number in range(len(node._input_metadata)))]
    ends = [(len(_shape(edge)), seen[edge]) for edge in edges if edge in seen]
    rank = max([dims for dims, _ in ends], default=0)
    along = saved_dimensions(node, rank)
    moving = not along or any(dims == rank and each.rows is not None and each.rows.dim in along for dims, each in ends)
    return any(each.ambiguous or not each.is_regular or (moving and not each.whole) for _, each in ends)


def _is_unclear(uses: Uses, seen: Mapping[Edge, Owned], examples: int) -> bool:
    """Whether what is zero in this batch, as pairs of examples behind a mask are, may belong to several in the next.

    Rows in no regular order are clear where a reshape of a tensor whose rows are in order explains them: [2 B, T, d] of
    two texts for each example, flattened to [2 B T, d].
    """
    irregular = {edge: each for edge, each in seen.items() if not each.is_regular}
    explained = list[Tensor]()
    for node in uses.nodes if irregular else ():
        if op.word_of(node) in op.VIEWS:
            below, above = node.next_functions[0], (node, 0)
            for edge, other in ((below, above), (above, below)):
                if edge in irregular and other in seen:
                    explained += _reshaped(other, seen[other], edge, irregular[edge], examples)
    clear = [any(_fits(each, owner) for owner in explained) for each in irregular.values()]
    return not all(clear) or any(each.crossed for each in seen.values())


def _reshaped(edge: Edge, known: Owned, other: Edge, found: Owned, examples: int) -> list[Tensor]:
    """Whose the rows of ``other`` are, a reshape of ``edge``: one tensor [rows].

    [] where the rows of ``edge`` are in no order, or some row of ``other`` holds numbers of several examples.
    """
    if known.ambiguous or not known.is_regular or known.rows is None or found.rows is None:
        return []
    shape, reshaped, (dim, now) = list(_shape(edge)), list(_shape(other)), (known.rows.dim, found.rows.dim)
    while len(shape) > dim + 1 and len(reshaped) > now + 1 and shape[-1] == reshaped[-1]:
        del shape[-1], reshaped[-1]
    owner = known.rows.owners(shape[dim], examples, torch.device("cpu"))
    owner = owner.view([-1 if each == dim else 1 for each in range(len(shape))]).expand(shape).reshape(reshaped)
    owner = owner.movedim(now, 0).flatten(1) if owner.dim() > 1 else owner.unsqueeze(1)
    return [owner[:, 0]] if bool((owner == owner[:, :1]).all()) else []


def _fits(found: Owned, owner: Tensor) -> bool:
    """Whether all rows that were seen belong to those owners."""
    if found.rows is None or not isinstance(found.rows.order, RowIndex) or len(found.rows.order) != len(owner):
        return False
    index = found.rows.order
    fits = index.index == owner.to(index.index.device)
    return bool((fits if index.used is None else fits | ~index.used).all())


def _may_mix(node: Any, word: str, owned: Mapping[Edge, Owned]) -> bool:
    """Whether an operation that isn't indexed may bring examples together by its values."""
    if word in op.POINTWISE:
        return _shifts(node, owned)
    if word in op.SHAPING:
        return False
    if word not in op.KNOWN and not op.ATTENTION.search(word):
        return True
    dims = [(slot, edge, _dim(edge, owned)) for slot, edge in enumerate(node.next_functions)]
    return any(dim in _worked(node, word, slot, edge) for slot, edge, dim in dims if dim is not None)


def _worked(node: Any, word: str, slot: int, edge: Edge) -> Collection[int]:
    """The dimensions of an input that an operation reduces or mixes: of x in x @ w, slot -2, the last."""
    total = len(_shape(edge))
    if word in op.PRODUCTS:  # the last two are its factors
        return {-2: {total - 1}, -1: {max(total - 2, 0)}}.get(slot - len(node.next_functions), set())
    if op.ATTENTION.search(word):  # over keys and values
        return {total - 2} if slot in (1, 2) else set()
    if word in op.FIRST:
        return range(1, total)
    if word in op.BY_CHANNEL:  # F.instance_norm has the examples among the channels, of a batch of one
        return {0, *range(2, total)} if slot == 0 and node._saved_training else ()
    if (shape := getattr(node, "_saved_normalized_shape", None)) is not None:
        return range(total - len(shape), total)
    if word in op.LAST:
        return range(total - op.LAST[word], total)
    if word == "CtcLoss":
        return {0, 2} if total == 3 else range(total)
    return saved_dimensions(node, total) or range(total)


def _shape(edge: Edge) -> torch.Size:
    """The shape of a tensor; a layer's output may be a view of what its node gave."""
    call = getattr(edge[0], "call", None)
    return torch.Size(call.shape) if isinstance(call, LayerCall) else shape_of(edge)


def _rows(edge: Edge, owned: Mapping[Edge, Owned]) -> Rows | None:
    """How rows belong to the examples; None where they don't, or it isn't known."""
    found = owned.get(edge)
    return None if found is None or found.zero else found.rows


def _dim(edge: Edge, owned: Mapping[Edge, Owned]) -> int | None:
    """The dimension that has the examples; None where there is none, or it isn't known."""
    rows = _rows(edge, owned)
    return None if rows is None else rows.dim


def _regular(edge: Edge, owned: Mapping[Edge, Owned]) -> Rows | None:
    """How a tensor's rows lie; None where they are in no order, or where zeros didn't show it."""
    found = owned.get(edge)
    return found.rows if found is not None and found.is_regular and not found.zero else None


def _shifts(node: Any, owned: Mapping[Edge, Owned]) -> bool:
    """Whether broadcasting moves the examples to another dimension, counted from the last."""
    after = _dims_from_last(((node, number) for number in range(len(node._input_metadata))), owned)
    return bool(after) and not _dims_from_last(node.next_functions, owned) <= after


def _dims_from_last(edges: Iterable[Edge], owned: Mapping[Edge, Owned]) -> set[int]:
    """Where some tensors have the examples, counted from the last dimension."""
    return {dim - len(_shape(edge)) for edge in edges if (dim := _dim(edge, owned)) is not None}


def _unit(edge: Edge, rows: Rows, examples: int) -> int | None:
    """How many numbers in a row, as they lie in order, belong to one example; None where that can't be said."""
    node, number = edge  # looked at as `_shape` does, in every batch
    call = getattr(node, "call", None)
    shape = call.shape if isinstance(call, LayerCall) else node._input_metadata[number].shape
    if rows.dim >= len(shape) or shape[rows.dim] % examples:
        return None
    return math.prod(shape[rows.dim + 1 :]) * (shape[rows.dim] // examples if rows.order == "example" else 1)


def _subject(node: Any, word: str) -> Edge:
    """A tensor that has the examples in the dimension where the operation's first input has them."""
    below = node.next_functions[0]
    return below if word in op.OTHER_DIMENSIONS and below[0] is not None else (node, 0)


def _moves(node: Any, rows: Rows | None, examples: int) -> bool:
    """Whether an indexing operation may move entries along the dimension of its subject that has the examples.

    Where that isn't known, it may be the first, or any that has at least as many entries.
    """
    word = op.word_of(node)
    if is_own_function(node):
        return rows is None or not _keeps_apart(node, rows, examples)
    if word in (op.COPY_INTO_SLICES, op.AS_STRIDED):
        return rows is None or not _copies_in_place(node, rows, examples)
    shape = _shape(node.next_functions[0] if node.next_functions[0][0] is not None else (node, 0))
    moved = _moved_dimensions(node, word, shape)
    return any(each == 0 or shape[each] >= examples for each in moved) if rows is None else rows.dim in moved


def _moved_dimensions(node: Any, word: str, shape: torch.Size) -> Collection[int]:
    """Along which dimensions of its first input, of that shape, an indexing operation may move entries."""
    saved = saved_dimensions(node, len(shape))
    if isinstance(indices := getattr(node, "_saved_indices", None), tuple):
        return _indexed_dimensions(indices, shape)
    if word == op.MASKED_SCATTER:
        return _scattered_dimensions(node._saved_mask.expand(shape), node.next_functions[1])
    if word == "IndexSelect":
        (dim,) = saved or [0]
        return [] if _is_in_order(node._saved_index, shape[dim] if shape else 1) else [dim]
    return saved or ([0] if word == op.EMBEDDING else range(len(shape)))


def _copies_in_place(node: Any, rows: Rows, examples: int) -> bool:
    """Whether what is done to a part of a tensor in place, or as it lies in memory, leaves each example its entries.

    The node doesn't say what is done, and to which part. Its backward does: given 1, 2, ... as the numbers of examples
    in place of ones, it gives each input as many times as much as the example's number says.

    Args:
        node: with the whole tensor as its output, and, in place, as its first input.
        rows: of the output.
        examples: B.
    """
    output, shape = node._input_metadata[0], _shape((node, 0))
    # While a graph is written down, nothing can be looked at.
    if is_traced() or not output.dtype.is_floating_point or not _in_order(rows, shape, examples):
        return False
    whole = 0 if op.word_of(node) == op.COPY_INTO_SLICES else None
    ones = torch.ones(shape, dtype=output.dtype, device=output.device)
    numbers = ones * _numbered(ones, rows, examples)
    with torch.no_grad():
        plain, marked = (found if isinstance(found, tuple) else (found,) for found in (node(ones), node(numbers)))
    return all(
        each is not None
        and _follows(each, marked[slot], [rows] if slot == whole else _in_any_dimension(each, examples), examples)
        for slot, (each, (below, _)) in enumerate(zip(plain, node.next_functions, strict=False))
        if below is not None
    )


def _keeps_apart(node: Any, rows: Rows, examples: int) -> bool:
    """Whether the backward of a function of somebody's own leaves each example's gradient to this example.

    It is run three times more: on numbers, on these times a power of two for each example, drawn anew in each batch,
    and on these with one example that isn't finite. Such products are exact, so each input gets as many times the first
    result, to the last bit, unless rows are moved or mixed. One example has a far larger power than the others, and
    what isn't finite changes no row of theirs: a function may drop all rows, or rescale them, for the sake of one.

    Args:
        node: of the function, with one output.
        rows: of the output, and of each input.
        examples: B.
    """
    shape, (output, *others) = _shape((node, 0)), node._input_metadata
    if is_traced() or others or output.dtype not in EXACT or not _in_order(rows, shape, examples):
        return False
    odd = _chance.randrange(examples)
    exponents = [each % (2 * EXPONENTS + 1) - EXPONENTS for each in range(examples)]
    _chance.shuffle(exponents)
    exponents[odd] = ODD_POWER
    owner = rows.owners(shape[rows.dim], examples, output.device).view(
        [-1 if dim == rows.dim else 1 for dim in range(len(shape))]
    )
    marks = torch.exp2(torch.tensor(exponents, dtype=output.dtype, device=output.device))[owner]
    numbers = torch.arange(shape[-1], device=output.device).cos().to(output.dtype).expand(shape).contiguous()
    try:
        with torch.no_grad():
            not_finite = numbers.log() * math.inf  # of cosines: NaN and infinite numbers
            given = numbers, numbers * marks, numbers.where(owner != odd, not_finite)
            plain, marked, broken = (tree_leaves(node.apply(each)) for each in given)
            # What a frozen weight would get goes nowhere.
            return all(
                _equal(one * marks, other) and _equal(one.where(owner != odd, 0), last.where(owner != odd, 0))
                for one, other, last, wanted in zip(plain, marked, broken, node.needs_input_grad, strict=True)
                if wanted and one is not None
            )
    except Exception:  # of any kind, of the user's code: the batch is measured
        return False


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same entries; NaN is equal to NaN."""
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _in_order(rows: Rows, shape: torch.Size, examples: int) -> bool:
    """Whether a tensor of that shape has equally many rows of each example, in one of the known orders."""
    return not isinstance(rows.order, RowIndex) and rows.dim < len(shape) and shape[rows.dim] % examples == 0


def _in_any_dimension(tensor: Tensor, examples: int) -> Iterable[Rows]:
    """How rows of a tensor may belong to the examples."""
    return (Rows(dim, order) for dim, size in enumerate(tensor.shape) for order in rows_in_order(size, examples))


def _numbered(tensor: Tensor, rows: Rows, examples: int) -> Tensor:
    """The number of each row's example, from 1, to be broadcast to the tensor."""
    numbers = 1 + rows.owners(tensor.shape[rows.dim], examples, tensor.device)
    return numbers.to(tensor.dtype).view([-1 if dim == rows.dim else 1 for dim in range(tensor.dim())])


def _follows(ones: Tensor, marked: Tensor, candidates: Iterable[Rows], examples: int) -> bool:
    """Whether one is the other times the numbers of examples, up to rounding, by some order of rows."""
    expected = (ones * _numbered(ones, rows, examples) for rows in candidates)
    return any(bool(((marked - each).abs() <= each.abs() / (4 * examples)).all()) for each in expected)


def _indexed_dimensions(indices: tuple[Tensor | None, ...], shape: torch.Size) -> set[int]:
    """Along which dimensions of a tensor of that shape entries come from other places than their own."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for _, index in given):
        return set(range(given[0][0], len(shape)))  # a mask may have several dimensions
    most = max([index.dim() for _, index in given])
    return {dim for dim, index in given if index.dim() != most or not _is_in_order(index, shape[dim])}


def _scattered_dimensions(mask: Tensor, source: Edge) -> Collection[int]:
    """Along which dimensions entries may come from other places than their own.

    Entries are taken one after another; where as many go to each row along the first dimension, and none are left over,
    rows stay in place.
    """
    if is_traced():
        return range(mask.dim())
    counts = mask.flatten(1).sum(1) if mask.dim() > 1 else mask.long()
    whole = source[0] is None or _shape(source).numel() == int(counts.sum())
    rows_stay = whole and bool((counts == counts[:1]).all())
    return set(range(int(rows_stay), mask.dim()))


def _is_in_order(index: Tensor, size: int) -> bool:
    """Whether an index is 0, 1, ..., size - 1, of shape [size] or [size, 1, ...], so that entries stay in place.

    h[torch.arange(B), lengths] is how a model picks a position of each example, and h[torch.arange(B)[:, None], places]
    is how it picks several.
    """
    if index.dtype != torch.int64 or index.dim() == 0 or not index.numel() == index.shape[0] == size:
        return False
    if is_traced():
        return constant_values(index.flatten()) == list(range(size))
    return torch.equal(index.flatten(), torch.arange(size, device=index.device))
