"""Along which dimensions of its inputs an operation of torch works, and where its result has the others.

``h.sum(1)`` of [T, B, d] leaves d in dimension 1 of its result, and T in dimension 0. A test holds these rules against
Jacobians of operations (tests/laws/test_law_of_dimensions.py).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ghostclip.graph import operations as op
from ghostclip.graph.nodes import saved_dimensions

__all__ = ["dim_after", "worked"]


def dim_after(node: Any, word: str, slot: int, dim: int, more: int, along: Collection[int]) -> int:
    """The dimension of the result that has what an input has in ``dim``.

    Args:
        node, word: the operation.
        slot: of the input.
        dim: along which it doesn't work.
        more: how many dimensions more the result has than the input; fewer, if negative.
        along: those along which it works, as `worked` says.
    """
    if word in op.BY_CHANNEL and slot:  # weights [channels]
        return dim + 1
    # Of addbmm's factors the first dimension is added up: it becomes -1, which no result has.
    if word in op.POINTWISE or word == "Addbmm" or (word in op.PRODUCTS and slot < len(node.next_functions) - 2):
        return dim + more  # counted from the last, as in broadcasting
    return dim - sum(each < dim for each in along) if more < 0 else dim


def worked(node: Any, word: str, slot: int, total: int) -> Collection[int]:
    """Which of an input's ``total`` dimensions an operation reduces or mixes: of x in x @ w, the last.

    All of them where it can't be said, so that the batch is measured.
    """
    if getattr(node, "_saved_reduction", 0):  # a loss over all numbers
        return range(total)
    if word in op.POINTWISE:
        return ()
    if word in op.PRODUCTS:  # the last two are its factors
        place = slot - len(node.next_functions)
        if word == "GroupedMm" and place == -1 and total == 3:  # whose rows meet which of the matrices?
            return range(total)
        return {-2: {total - 1}, -1: {max(total - 2, 0)}}.get(place, set())
    if op.ATTENTION.search(word):  # queries, keys, values, and what is added to scores
        return {1: {total - 2, total - 1}, 2: {total - 2}}.get(slot, {total - 1})
    if word in op.FIRST:
        return range(1 if slot == 0 or word in op.CELLS else 0, total)
    if word in op.BY_CHANNEL and slot:
        return ()
    if word in op.BY_CHANNEL:  # F.instance_norm has the examples among the channels, of a batch of one
        return {0, *range(2, total)} if node._saved_training else ()
    if word == "Cdist" and slot:  # whose rows are columns of the result
        return {total - 2, total - 1}
    if (shape := getattr(node, "_saved_normalized_shape", None)) is not None:
        return range(total - len(shape), total)
    if word in op.LAST:
        return range(total - op.LAST[word], total)
    if word == "CtcLoss":
        return {0, 2} if total == 3 else range(total)
    if word == "WeightNormInterface":
        return set(range(total)) - set(saved_dimensions(node, total))
    return saved_dimensions(node, total) or range(total)
