"""Operations that move rows by values: which example a row belongs to may be another one in the next batch.

Of most operations the graph's structure says all about where their rows go. An index, a product with a matrix of data,
a hook or a function of somebody's own say it by values. Where such an operation may move examples, ownership is
measured in every batch; where it can be looked at (an index, or the backward of a function), in every batch in which
it moves or mixes them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ghostclip.graph import operations as op
from ghostclip.graph.dimensions import dim_after, worked
from ghostclip.graph.nodes import ACCUMULATE, Edge, is_own_function, saved_dimensions, shape_of
from ghostclip.graph.reader import Uses
from ghostclip.graph.rows import Owned, Rows, same_order
from ghostclip.native.custom_ops import constant_values, is_traced
from ghostclip.nn.base import LayerCall
from ghostclip.norms.ragged import RowIndex

__all__ = ["Movements", "movements"]

# Types with room for powers of two around 1, and the largest of their exponents.
EXACT, EXPONENTS = (torch.float32, torch.float64, torch.bfloat16), 16
# The exponent of one example, beside which those of the others are small.
ODD_POWER = 60
# Stands for the rows of an input whose gradient was zero throughout when it was measured.
ZERO = Rows(0, "zero")

# Not Python's own, which users seed.
_chance = random.Random()


@dataclass(frozen=True)
class Movements:
    """What has to be looked at in each batch of a structure, whose ownership is measured where rows moved.

    Attributes:
        indexed: (place of a node, how its subject's rows belong to the examples, and those of its inputs that have a
            gradient; None if that isn't known).
        views: (place of a node, rows of its input, rows of its output) of reshapes that leave the examples in place
            only where sizes agree.
    """

    indexed: Sequence[tuple[int, Rows | None, Sequence[Rows | None]]] = ()
    views: Sequence[tuple[int, Rows, Rows]] = ()

    def moved(self, uses: Uses, examples: int) -> bool:
        """Whether some operation moves the examples in this batch."""
        for place, before, after in self.views:
            node = uses.nodes[place]
            if _unit(node.next_functions[0], before, examples) != _unit((node, 0), after, examples):
                return True
        return any(_moves(uses.nodes[place], rows, below, examples) for place, rows, below in self.indexed)


def movements(uses: Uses, owned: Mapping[Edge, Owned], examples: int, shared: Collection[Any] = ()) -> Movements | None:
    """The operations to look at in every batch of this structure; None where one can't be looked at.

    Args:
        uses: of the graph.
        owned: what was measured of each of its tensors, that of a layer's output as (its node, 0).
        examples: B.
        shared: nodes that were shown to be the same whatever the examples are.
    """
    constant = uses.made_of_parameters | set(shared)
    owned = {edge: each for edge, each in owned.items() if edge[0] not in constant}  # beside NaN these fit anything
    # Checkpointing computes a block again for whatever is read of it, and keeps what it computed.
    recomputed = any(call.has_saved_tensor_hooks for call in uses.calls)
    # Of packed sequences; rows of an EmbeddingBag are bags, and what it looked up is in the graph.
    by_lengths = any(call.lengths and (call.sources or not call.layer.reads_indices) for call in uses.calls)
    seen = {edge: each for edge, each in owned.items() if not each.zero}
    if uses.hooked or by_lengths or _is_unclear(uses, seen, examples):
        return None
    indexed, views = list[tuple[int, Rows | None, Sequence[Rows | None]]](), list[tuple[int, Rows, Rows]]()
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
                indexed.append((place, rows, _rows_below(node, owned)))
            elif _moves(node, rows, (), examples):
                return None
        elif is_own_function(node):
            if recomputed:
                return None
            indexed.append((place, _rows((node, 0), owned), _rows_below(node, owned)))
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
    return not all(clear) or any(each.crossed or each.unread for each in seen.values())


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
    if found.rows is None or not isinstance(found.rows.order, RowIndex):
        return False
    return same_order(found.rows.order, RowIndex(owner.to(found.rows.order.index.device), int(owner.max()) + 1))


def _may_mix(node: Any, word: str, owned: Mapping[Edge, Owned]) -> bool:
    """Whether an operation that isn't indexed may bring examples together by its values.

    It works along the dimension that has the examples, or leaves them in another place than where its result has them:
    a mask may have hidden the others.
    """
    if word in op.SHAPING:
        return False
    if word not in op.KNOWN and not op.ATTENTION.search(word):
        return True
    results = [(node, number) for number in range(len(node._input_metadata))]
    for slot, edge in enumerate(node.next_functions):
        if (rows := _rows(edge, owned)) is None:
            continue
        total = len(_shape(edge))
        along = worked(node, word, slot, total)
        if rows.dim in along:
            return True
        for result in results:
            dim = dim_after(node, word, slot, rows.dim, len(_shape(result)) - total, along)
            if (after := _rows(result, owned)) is not None and (
                after.dim != dim or not same_order(after.order, rows.order)
            ):
                return True
    return False


def _shape(edge: Edge) -> torch.Size:
    """The shape of a tensor; a layer's output may be a view of what its node gave."""
    call = getattr(edge[0], "call", None)
    return torch.Size(call.shape) if isinstance(call, LayerCall) and not edge[1] else shape_of(edge)


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


def _rows_below(node: Any, owned: Mapping[Edge, Owned]) -> Sequence[Rows | None]:
    """How the rows of each input belong to the examples that has a gradient; ZERO where all of it was zero.

    Such a gradient is looked at in each batch: nothing is taken for known once it isn't zero.
    """
    given = [edge for edge in node.next_functions if edge[0] is not None]
    return [ZERO if edge in owned and owned[edge].zero else _rows(edge, owned) for edge in given]


def _unit(edge: Edge, rows: Rows, examples: int) -> int | None:
    """How many numbers in a row, as they lie in order, belong to one example; None where that can't be said."""
    node, number = edge  # looked at as `_shape` does, in every batch
    call = getattr(node, "call", None)
    shape = call.shape if isinstance(call, LayerCall) and not number else node._input_metadata[number].shape
    if rows.dim >= len(shape) or shape[rows.dim] % examples:
        return None
    return math.prod(shape[rows.dim + 1 :]) * (shape[rows.dim] // examples if rows.order == "example" else 1)


def _subject(node: Any, word: str) -> Edge:
    """A tensor that has the examples in the dimension where the operation's first input has them."""
    below = node.next_functions[0]
    return below if word in op.OTHER_DIMENSIONS and below[0] is not None else (node, 0)


def _moves(node: Any, rows: Rows | None, below: Sequence[Rows | None], examples: int) -> bool:
    """Whether an indexing operation may move entries along the dimension of its subject that has the examples.

    Where that isn't known, it may be the first, or any that has at least as many entries.
    """
    word = op.word_of(node)
    if is_own_function(node) or word in (op.COPY_INTO_SLICES, op.AS_STRIDED):  # which don't say what is done
        return rows is None or not _keeps_apart(node, rows, below, examples)
    if word == op.MASKED_SCATTER and rows is not None and rows.order != "example":
        return True  # its source's rows come in another order where there are more for each row
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


def _keeps_apart(node: Any, rows: Rows, below: Sequence[Rows | None], examples: int) -> bool:
    """Whether the backward of an operation leaves each example's gradient to this example.

    It is run on numbers, and on these times a power of two for each example, drawn anew in each batch. Such products
    are exact, so each input gets as many times the first result, to the last bit, unless rows are moved or mixed. One
    example has a far larger power than the others. A function of somebody's own may drop all rows, or rescale them, for
    the sake of one: it is run once more with one that isn't finite, which may change no row of the others.

    Args:
        node: with one output.
        rows: of the output.
        below: of the inputs that have a gradient.
        examples: B.
    """
    shape, (output, *others), own = _shape((node, 0)), node._input_metadata, is_own_function(node)
    if is_traced() or others or output.dtype not in EXACT or not _in_order(rows, shape, examples):
        return False
    odd = _chance.randrange(examples)
    exponents = [each % (2 * EXPONENTS + 1) - EXPONENTS for each in range(examples)]
    _chance.shuffle(exponents)
    exponents[odd] = ODD_POWER
    powers = torch.exp2(torch.tensor(exponents, dtype=output.dtype, device=output.device))
    numbers = torch.arange(math.prod(shape), device=output.device).cos().to(output.dtype).view(shape)
    owner = _owner(rows, numbers, examples)
    given = [numbers, numbers * powers[owner]]
    if own:
        given.append(numbers.where(owner != odd, numbers.log() * math.inf))  # of cosines: NaN and infinite numbers
    try:
        with torch.no_grad():
            found = [_gradients(node, each) for each in given]
        return all(_follows(each, gradients, powers, odd) for each, *gradients in zip(below, *found, strict=True))
    except Exception:  # of any kind, of the user's code: the batch is measured
        return False


def _follows(rows: Rows | None, gradients: Sequence[Tensor], powers: Tensor, odd: int) -> bool:
    """Whether an input's rows got what the powers of their examples say, and others nothing of the odd example."""
    plain, marked, *broken = gradients
    if rows is ZERO or rows is None:
        return rows is ZERO
    if not _in_order(rows, plain.shape, len(powers)):
        return False
    owner = _owner(rows, plain, len(powers))
    others = [_equal(plain.where(owner != odd, 0), each.where(owner != odd, 0)) for each in broken]
    return _equal(plain * powers[owner], marked) and all(others)


def _gradients(node: Any, gradient: Tensor) -> list[Tensor]:
    """What the inputs of an operation get that have a gradient; what a frozen weight would get goes nowhere."""
    if not is_own_function(node):
        given = node(gradient)
        given = given if isinstance(given, tuple) else (given,)
        return [each for each, (below, _) in zip(given, node.next_functions, strict=False) if below is not None]
    return [
        each for each, wanted in zip(tree_leaves(node.apply(gradient)), node.needs_input_grad, strict=True) if wanted
    ]


def _owner(rows: Rows, tensor: Tensor, examples: int) -> Tensor:
    """The example of each row, to be broadcast to the tensor."""
    owner = rows.owners(tensor.shape[rows.dim], examples, tensor.device)
    return owner.view([-1 if dim == rows.dim else 1 for dim in range(tensor.dim())])


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same entries; NaN is equal to NaN."""
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _in_order(rows: Rows, shape: torch.Size, examples: int) -> bool:
    """Whether a tensor of that shape has equally many rows of each example, in one of the known orders."""
    return not isinstance(rows.order, RowIndex) and rows.dim < len(shape) and shape[rows.dim] % examples == 0


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
