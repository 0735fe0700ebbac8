"""Position tables that are as long as a batch, or a multiple of one, by chance.

A layer that reads position ids [T] gives [T, d]. Where T is a multiple of B it looks like a layer that saw the batch,
and then like one that mixes examples. What tells them apart is how its output is used: it is added to something that
has examples *and* those T entries, in a dimension each, and that came from elsewhere: from a layer that had several
entries of each example. Were the T entries examples, that something would hold every pair of examples, and the layer
would itself have failed its proof. What was only made so large, by repeating it (`h[:, None].expand(B, B, -1)`) or by a
product of matrices, says nothing. Where this can't be told, a batch of another size tells
(`ghostclip.graph.row_layout`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ghostclip.graph.nodes import Edge, from_below, inputs_of, saved_dimensions, shape_of
from ghostclip.graph.shared.boundary import ELEMENTWISE, EXPAND, REPEAT, broadcasts
from ghostclip.nn.base import LayerCall

__all__ = ["are_positions"]

# What leaves every entry what and where it is, but for the order of dimensions and ones among them.
RELAYING = {
    f"{name}Backward0"
    for name in ("Alias", "Clone", "NativeDropout", "Permute", "ReshapeAlias", "Squeeze", "T", "ToCopy",
                 "Transpose", "UnsafeView", "Unsqueeze", "View")
} | {f"SqueezeBackward{variant}" for variant in (1, 2)} | {"TransposeBackward1"}  # fmt: skip
# What does so, once for each example.
REPEATING = {EXPAND, REPEAT}
SELECT = "SelectBackward0"


def are_positions(losses: Tensor, calls: Sequence[LayerCall], rows: int | None = None) -> bool:
    """Whether each of ``calls``, whose rows are no examples' own, is used as a table of positions is.

    What it gives, or an entry of each of its rows, is then added to something of a batch and its own size. With
    ``rows``, a batch has so many.
    """
    rows = len(losses) if rows is None else rows
    if any(call.sources for call in calls):
        return False
    wanted = {id(call) for call in calls}
    consumers: dict[Any, list[Any]] = {}
    tainted: set[Any] = set()
    starts = []
    for node in from_below(losses.grad_fn):
        below = [edge[0] for edge in inputs_of(node) if edge[0] is not None]
        for each in below:
            consumers.setdefault(each, []).append(node)
        if id(getattr(node, "call", None)) in wanted:
            starts.append(node)
            tainted.add(node)
        elif any(each in tainted for each in below):
            tainted.add(node)

    def meets_a_batch(start: Any) -> bool:
        entries = [node for node in consumers.get(start, ()) if _leaves_rows(node, start.call)]
        met = [edge for each in (start, *entries) for edge in _met(each, consumers, tainted, rows)]
        return any(_has_both(edge, rows) for edge in met)

    return all(map(meets_a_batch, starts))


def _leaves_rows(node: Any, call: LayerCall) -> bool:
    """Whether an operation takes one of the entries of every row."""
    return node.name() == SELECT and call.batch_dim not in saved_dimensions(node, len(call.shape))


def _has_both(edge: Edge, examples: int) -> bool:
    """Whether a tensor has all of its entries, none of them repeated, from a layer that had several of each example."""
    seen, stack = set(), [edge]
    while stack:
        node, number = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        call = getattr(node, "call", None)
        if isinstance(call, LayerCall):
            if call.shape[call.batch_dim] > examples or len(call.shape) > 2:
                return True
        elif node.name() in RELAYING:
            stack += node.next_functions
        else:
            whole = _long_dimensions(shape_of((node, number)))
            stack += [below for below in node.next_functions if below[0] and _may_bring(below, whole, node.name())]
    return False


def _may_bring(below: Edge, whole: list[int], name: str) -> bool:
    """Whether what went into an operation can have had all entries of the result, which repeats none then.

    Of operations that aren't known, only if it had three dimensions: examples, entries and features.
    """
    own = _long_dimensions(shape_of(below))
    return own == whole if name in ELEMENTWISE | REPEATING else len(own) >= max(3, len(whole))


def _met(start: Any, consumers: dict[Any, list[Any]], tainted: set[Any], examples: int) -> Iterator[Edge]:
    """What has the size of a batch of what ``start`` gives, and is put together with it entry by entry."""
    table = _long_dimensions(shape_of((start, 0)))
    stack, seen = [(start, False)], set()
    while stack:
        below, broadcast = stack.pop()
        for node in consumers.get(below, ()):
            if node in seen or isinstance(getattr(node, "call", None), LayerCall):
                continue
            seen.add(node)
            if node.name() in RELAYING:
                stack.append((node, broadcast))
            elif node.name() in ELEMENTWISE | REPEATING:
                whole = shape_of((node, 0))
                own = [shape_of(edge) for edge in node.next_functions if edge[0] is below]
                if not broadcast and any(_long_dimensions(shape) != table for shape in own):
                    continue
                now = broadcast or any(_spread_over(shape, whole, examples) for shape in own)
                others = [edge for edge in node.next_functions if edge[0] is not None and edge[0] not in tainted]
                if now:
                    yield from (edge for edge in others if shape_of(edge) == whole)
                stack.append((node, now))


def _long_dimensions(shape: Any) -> list[int]:
    """The sizes of dimensions in any order, without those of one."""
    return sorted(size for size in shape if size != 1)


def _spread_over(shape: Any, whole: Any, examples: int) -> bool:
    """Whether a tensor was broadcast along a dimension of the size of a batch, or a multiple."""
    return any(size % examples == 0 and broadcasts(shape, whole, dim) for dim, size in enumerate(whole))
