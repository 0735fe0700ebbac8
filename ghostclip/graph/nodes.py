"""The nodes of an autograd graph: their inputs and order, and what each says of how it moves entries."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from ghostclip.graph.operations import POINTWISE, ROW_BY_ROW, WORD, word_of
from ghostclip.nn.base import LayerCall

__all__ = [
    "ACCUMULATE",
    "Edge",
    "inputs_first",
    "inputs_of",
    "is_own_function",
    "number_of",
    "ones_of",
    "saved_dimensions",
    "shape_of",
    "signature_of",
    "signed",
]

# (node, number of its output): a tensor of the graph.
Edge = tuple[Any, int]
ACCUMULATE = type(torch.zeros((), device="cpu", requires_grad=True).expand(1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]

# Saved numbers that each entry is multiplied with, added to or compared with. They move no entry, and are floats.
FACTORS = {
    f"_saved_{name}"
    for name in ("alpha", "beta", "correction", "delta", "dropout", "dropout_p", "eps", "epsilon", "exponent",
                 "grad_factor", "initial", "input_scale", "lambd", "lower", "margin", "max", "max_val", "maxnorm",
                 "min", "min_val", "negative_slope", "ord", "other", "p", "scalar", "scalars", "scale", "scales",
                 "scales_d", "scales_h", "scales_w", "self", "threshold", "value", "weight")
}  # fmt: skip
# Saved sizes that grow with the batch or with its texts, beside those with ``_sym_`` in their names.
SIZES = {
    f"_saved_{name}"
    for name in ("H", "HxW", "N", "W", "batch_sizes", "input_lengths", "max_k", "max_q", "max_seqlen_batch_k",
                 "max_seqlen_batch_q", "target_lengths")
}  # fmt: skip


def is_own_function(node: Any) -> bool:
    """Whether a node is of a `torch.autograd.Function` that belongs to no layer of ours, and isn't known (ROW_BY_ROW).

    Such a function is known where its first input alone, which has the examples, gets a gradient.
    """
    if not isinstance(node, BackwardCFunction) or isinstance(getattr(node, "call", None), LayerCall):
        return False
    return word_of(node) not in ROW_BY_ROW or any(below is not None for below, _ in node.next_functions[1:])


@functools.lru_cache(1 << 16)
def number_of(signature: Any) -> int:
    """A number of its own for each signature. Torch saves -4 as 2**64 - 4, whose hash in Python is that of 4."""
    return next(NUMBERS)


@functools.cache
def signature_of(kind: type) -> Callable[[Any], Any] | None:
    """A function that reads what a node of this type saved but for tensors, factors and sizes; None: it saves nothing.

    ``rot90`` by 1 and by 3 have two signatures. ``h[:, :-1]`` has one at every length of ``h``. A tensor isn't read,
    since that would unpack it.
    """
    name = kind.__name__.removesuffix("_copy")
    if name in SIGNATURES or name.startswith("Upsample"):
        return SIGNATURES.get(name, _resized)
    names = [name for name in dir(kind) if name.startswith("_saved_") and not hasattr(kind, f"_raw{name}")]
    names = [name for name in names if "_sym_" not in name and name not in FACTORS | SIZES]
    reads = operator.attrgetter(*names) if names else None
    # Data that it is broadcast with has no node, which could say of how many dimensions it is.
    if (word := WORD.match(name)) is None or word[1] not in POINTWISE:
        return reads
    return _ones if reads is None else lambda node: (_ones(node), reads(node))


def _ones(node: Any) -> Any:
    """How many dimensions a node's output has, and which of them have one entry: along these it is broadcast later."""
    return ones_of(node._input_metadata[0].shape)


def ones_of(shape: Sequence[int]) -> Any:
    """How many dimensions a shape has, and which of them have one entry."""
    return len(shape), 1 in shape and tuple([dim for dim, size in enumerate(shape) if size == 1])


def _expanded(node: Any) -> Any:
    return tuple([size == 1 for size in node._saved_self_sym_sizes])


def _repeated(node: Any) -> Any:
    return tuple([times == 1 for times in node._saved_repeats])


def _split(node: Any) -> Any:
    """Along which dimension, and into how many parts, of which the last may be a smaller one."""
    dim, size = node._saved_dim, node._saved_split_size
    return dim, -(-node._saved_self_sym_sizes[signed(dim)] // max(1, size))


def _slice(node: Any) -> Any:
    """Along which dimension a slice goes, and from where to where; of a parameter, the dimension alone."""
    if type(node.next_functions[0][0]) is ACCUMULATE:
        return node._saved_dim
    return _range(node, node._saved_self_sym_sizes, node._saved_start or 0, node._saved_end, node._saved_step)


def _slice_scatter(node: Any) -> Any:
    return _range(node, shape_of((node, 0)), node._saved_start or 0, node._saved_end, node._saved_step)


def _narrow_copy(node: Any) -> Any:
    sizes, start = node._saved_self_sym_sizes, signed(node._saved_start)
    start += sizes[signed(node._saved_dim)] if start < 0 else 0
    return _range(node, sizes, start, start + node._saved_length, 1)


def _range(node: Any, sizes: Sequence[int], start: int, end: int | None, step: int) -> Any:
    """The dimension, begin, end and step of a part of a tensor of these sizes."""
    size = sizes[signed(node._saved_dim)]
    return node._saved_dim, _from_nearer_end(start, size), _from_nearer_end(end, size), step


def _from_nearer_end(place: int | None, size: int) -> int | None:
    """A place, counted from the nearer end: 2 of 9 is 2, 7 of 9 is -2, and 9 of 9 and all beyond is None.

    So ``h[:, : T - 1]`` is the same slice at every T, as ``h[:, :-1]`` is, which torch saves as it was given.
    """
    if place is None or (place := signed(place)) >= size:
        return None
    return place - size if 2 * place > size else place


def _strided(node: Any) -> Any:
    """What `_ones` says if all entries stay in their order; else sizes, strides, offset and the shape of the input.

    ``h.view(B, heads, T, d).transpose(1, 2).mul_(2)`` has such a node. Its first dimension divides the input into equal
    parts, so that B is left out, and of the input's first dimension there is how much of it goes to each part.
    """
    size, stride, offset = node._saved_size, node._saved_stride, node._saved_storage_offset
    edge = node.next_functions[0]
    shape = shape_of(edge) if edge[0] is not None else torch.Size()
    in_order = [math.prod(size[dim:]) for dim in range(len(size) + 1)]
    if not offset and (in_order[0], *stride) == (shape.numel(), *in_order[1:]):
        return _ones(node)
    if size and shape and shape[0] % max(1, size[0]) == 0 and size[0] * stride[0] == shape.numel():
        return size[1:], stride, offset, shape[0] // max(1, size[0]), shape[1:]
    return size, stride, offset, None, shape


def _resized(node: Any) -> Any:
    """By how much an image or a sequence is enlarged; its size where that is no whole number."""
    sizes = zip(node._saved_output_size, node._saved_self_sym_sizes[2:], strict=True)
    by = [(new // old, 0) if new % old == 0 else (new, old) for new, old in sizes]
    return tuple(by), getattr(node, "_saved_align_corners", None)


# Operations whose saved numbers may grow with the batch, or that save too little, with what their signature is.
SIGNATURES: dict[str, Callable[[Any], Any]] = {
    "AffineGridGeneratorBackward0": lambda node: (node._saved_size[1:], node._saved_align_corners),
    "AsStridedBackward0": _strided,
    "AsStridedBackward1": _strided,
    "AsStridedScatterBackward0": _strided,
    "ExpandBackward0": _expanded,
    "NarrowCopyBackward0": _narrow_copy,
    "RepeatBackward0": _repeated,
    "SliceBackward0": _slice,
    "SliceScatterBackward0": _slice_scatter,
    "SplitBackward0": _split,
    "UnsafeSplitBackward0": _split,
    "EmbeddingBackward0": lambda node: (node._saved_padding_idx, node._saved_scale_grad_by_freq, *_ones(node)),
    **{
        f"{name}Backward0": _ones
        for name in ("Index", "UnsafeIndex", "Take", "ReshapeAlias", "ReshapeCopy", "Squeeze", "UnsafeView", "View")
    },
}
NUMBERS = itertools.count()


def shape_of(edge: Edge) -> torch.Size:
    """The shape of a tensor of the graph."""
    node, number = edge
    return torch.Size(tuple(node._input_metadata[number].shape))


def saved_dimensions(node: Any, total: int) -> list[int]:
    """Along which of so many dimensions an operation went, counted from the front; [] where it doesn't say."""
    saved = getattr(node, "_saved_dims", None) or getattr(node, "_saved_dim", None)
    saved = [saved] if isinstance(saved, int) else saved or []
    return [signed(dim) % max(1, total) for dim in saved]


def signed(number: int) -> int:
    """A number that was saved as one of 64 bits without a sign, around which negative ones wrap."""
    return number - (1 << 64) if number >= 1 << 63 else number


def inputs_of(node: Any) -> Sequence[Edge]:
    """What a node was given, over the inside of layers."""
    call = getattr(node, "call", None)
    if isinstance(call, LayerCall):
        return [(get_gradient_edge(s).node if isinstance(s, Tensor) else s, number) for s, number in call.sources]
    return node.next_functions


def inputs_first(*starts: Any) -> list[Any]:
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
