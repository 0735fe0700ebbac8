"""The nodes of an autograd graph: their inputs and order, and what each says of how it moves entries."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ghostclip.nn.base import LayerCall

__all__ = [
    "ACCUMULATE",
    "COPY_INTO_SLICES",
    "REORDERING",
    "Edge",
    "from_below",
    "inputs_of",
    "said_by",
    "saved_dimensions",
    "shape_of",
    "signed",
]

# (node, number of its output): a tensor of the graph.
Edge = tuple[Any, int]
ACCUMULATE = type(torch.zeros((), device="cpu", requires_grad=True).expand(1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]

# Operations that may put the examples of a batch into another order, differently for every batch.
REORDERING = {
    f"{name}Backward0"
    for name in ("Embedding", "EmbeddingBag", "Flip", "Gather", "GridSampler2D", "GridSampler3D", "Index", "IndexAdd",
                 "IndexCopy", "IndexPut", "IndexReduce", "IndexSelect", "MaskedScatter", "MaskedSelect", "MaxUnpool2D",
                 "MaxUnpool3D", "Put", "Roll", "Scatter", "ScatterAdd", "ScatterReduce", "SegmentReduce", "Sort",
                 "Take", "Topk", "UnsafeIndex", "UnsafeIndexPut")
} | {"CopySlices"}  # fmt: skip
# What nodes say of how they move, join or cut off entries. It depends on how many examples there are only where
# the parts themselves do.
SAID = ("dim", "dims", "dim0", "dim1", "dim2", "dimension", "keepdim", "start", "end", "step", "split_sizes", "pad",
        "offset", "diagonal", "normalized_shape", "kernel_size", "stride", "padding", "dilation", "groups")  # fmt: skip
SAID_BY = {
    "AsStridedBackward0": ("size", "storage_offset"),
    "SelectBackward0": ("index",),
    "SelectScatterBackward0": ("index",),
}
# What gives a tensor other dimensions says which of these have one entry: along them it is broadcast later.
RESHAPING = {f"{name}Backward0" for name in ("ReshapeAlias", "Squeeze", "UnsafeView", "View")}

# An operation in place on a part of a tensor; its first input is the whole tensor before. It doesn't say which part.
COPY_INTO_SLICES = "torch::autograd::CopySlices"


def said_by(node: Any) -> Any:
    """What an operation says, beside its kind, of how it moves, joins or cuts off entries; None where it says nothing.

    Sizes are left out, since they change with the batch. Of tensors that are broadcast, where they have ones stays.
    """
    kind: Any = type(node)
    if (getter := _getter(kind)) is not None:
        return getter(node)
    if (name := kind.__name__) in RESHAPING:
        shape = shape_of((node, 0))
        return len(shape), 1 in shape and tuple([dim for dim, size in enumerate(shape) if size == 1])
    if name == "ExpandBackward0":
        return tuple([size == 1 for size in node._saved_self_sym_sizes])
    if name == "RepeatBackward0":
        return tuple([times == 1 for times in node._saved_repeats])
    if name == "SliceBackward0":
        return node._saved_dim, _range_of_slice(node)
    if name == "SplitBackward0":
        return node._saved_dim, len(node._input_metadata)
    return None


def _range_of_slice(node: Any) -> Any:
    """From where to where a slice goes; None of a parameter, none of whose rows is an example's."""
    if type(node.next_functions[0][0]) is ACCUMULATE:
        return None
    size = node._saved_self_sym_sizes[signed(node._saved_dim)]
    # A whole text may be cut off where it ends, or not.
    return node._saved_start, None if signed(node._saved_end) >= size else node._saved_end, node._saved_step


@functools.cache
def _getter(kind: type) -> Callable[[Any], Any] | None:
    """What gives all that nodes of a type say; None where they say nothing, or nothing but sizes."""
    if kind.__name__ in ("RepeatBackward0", "SliceBackward0", "SplitBackward0"):
        return None
    saved = [f"_saved_{name}" for name in (*SAID, *SAID_BY.get(kind.__name__, ()))]
    saved = [name for name in saved if hasattr(kind, name)]
    return operator.attrgetter(*saved) if saved else None


def shape_of(edge: Edge) -> torch.Size:
    """The shape of a tensor of the graph; a layer's output may be a view of what its node gave."""
    node, number = edge
    if isinstance(call := getattr(node, "call", None), LayerCall):
        return torch.Size(call.shape)
    return torch.Size(tuple(node._input_metadata[number].shape))


def saved_dimensions(node: Any, total: int) -> list[int]:
    """Along which of so many dimensions an operation went, counted from the front; [] where it doesn't say."""
    saved = getattr(node, "_saved_dims", None)
    saved = [node._saved_dim] if saved is None and hasattr(node, "_saved_dim") else saved or []
    return [signed(dim) % max(1, total) for dim in saved]


def signed(number: int) -> int:
    """A number that was saved as one of 64 bits without a sign, around which negative ones wrap."""
    return number - (1 << 64) if number >= 1 << 63 else number


def inputs_of(node: Any) -> Sequence[Edge]:
    """What a node was given, over the inside of layers; for a layer, without the numbers of outputs."""
    call = getattr(node, "call", None)
    if isinstance(call, LayerCall):
        return [(get_gradient_edge(s).node if isinstance(s, Tensor) else s, 0) for s in call.sources]
    return node.next_functions


def from_below(*starts: Any) -> list[Any]:
    """The nodes ``starts`` and all behind them, over the inside of layers, each after all of its inputs."""
    ordered: list[Any] = []
    seen: set[Any] = set()
    stack: list[tuple[Any, bool]] = [(node, False) for node in starts]
    while stack:
        node, done = stack.pop()
        if done:
            ordered.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(below, False) for below, _ in inputs_of(node)]
    return ordered
