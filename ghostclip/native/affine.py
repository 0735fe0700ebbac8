"""Linear layers on one position an example, all of a batch's in one call; norms of groups and weights: affine.c.

Small layers cost what it takes to call an operation. Each function returns None where C can't be used: the caller has
tensor operations for the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ghostclip.native.calls import function
from ghostclip.native.custom_ops import is_traced

__all__ = ["Pair", "all_finite", "bounded_weights", "group_norms", "squared_norms", "weighted_sums"]

# Beyond so many bytes torch's operations, which share the work among threads, are as good.
MOST_BYTES = 8 << 20
# Up to so many multiplications, of a weight of so many numbers, C forms its sum without a scaled copy of the gradients:
# measured, in at most torch's time. Beyond, torch's threads are worth it. How many there are is not asked, so that no
# result depends on it.
MOST_WORK, MOST_NUMBERS = 1 << 21, 1 << 18
# Names as affine.c has them.
NAMES = {("weight",): 1, ("bias",): 2, ("weight", "bias"): 3}


class Pair(Protocol):
    """Per-example gradients of a linear layer: gradients [B, p], inputs [B, d], and which parameters are asked for."""

    left: Tensor
    right: Tensor
    names: tuple[str, ...]


def squared_norms(pairs: Sequence[Pair]) -> Tensor | None:
    """Squared norms for each name of each layer in turn, of which there is at least one: [names, B]."""
    squares = _for_all("squared_norms", 4, pairs)
    if squares is None:
        return None
    first, layers, rows = pairs[0].left, array("q"), 0
    for pair in pairs:
        layers.extend((*_layer(pair), 0, 0, 0, 0))
        rows += len(pair.names)
    found = first.new_empty(rows, len(first))
    squares(layers.buffer_info()[0], len(pairs), len(first), found.data_ptr())
    return found


def weighted_sums(pairs: Sequence[Pair], weights: Sequence[Tensor]) -> list[list[Tensor]] | None:
    """``sum_i weights[i] * gradient[i]`` for each name of each, for as many weights [B]."""
    sums = _for_all("sums", 3, pairs)
    if sums is None or any(w.dtype != pairs[0].left.dtype or not w.is_contiguous() for w in weights):
        return None
    layers, places = array("q"), []
    for pair, weight in zip(pairs, weights, strict=True):
        place = _places(pair)
        asked = [place[name].data_ptr() if name in place else 0 for name in ("weight", "bias", "scaled")]
        layers.extend((*_layer(pair), weight.data_ptr(), *asked))
        places.append(place)
    sums(layers.buffer_info()[0], len(pairs), pairs[0].left.shape[0])
    return [
        [place[name] if name in place else torch.mm(place["scaled"], pair.right) for name in pair.names]
        for pair, place in zip(pairs, places, strict=True)
    ]


def _places(pair: Pair) -> dict[str, Tensor]:
    """Where C is to write "weight" [p, d] and "bias" [p].

    Of a large weight it is "scaled", the weighted left as columns [p, B], which torch is to multiply.
    """
    left, outputs, inputs = pair.left, pair.left.shape[1], pair.right.shape[1]
    place = {"bias": left.new_empty(outputs)} if "bias" in pair.names else {}
    if "weight" in pair.names:
        numbers = outputs * inputs
        if numbers <= MOST_NUMBERS and numbers * left.shape[0] <= MOST_WORK:
            place["weight"] = left.new_empty(outputs, inputs)
        else:
            place["scaled"] = left.new_empty(left.shape).t()
    return place


def _layer(pair: Pair) -> tuple[int, ...]:
    """What affine.c wants to know of a layer."""
    left, right = pair.left, pair.right
    return (
        left.data_ptr(), left.stride(0), left.shape[1], right.data_ptr(), right.stride(0), right.shape[1],
        NAMES[pair.names],
    )  # fmt: skip


def _for_all(name: str, arguments: int, pairs: Sequence[Pair]) -> Callable[..., int] | None:
    """The C function of that name, where it can and should be used for all of ``pairs``."""
    dtype = pairs[0].left.dtype
    found = function("affine", name, dtype, arguments)
    if found is None or is_traced() or not all(_fits(pair, dtype) for pair in pairs):
        return None
    return found if sum(pair.left.nbytes + pair.right.nbytes for pair in pairs) <= MOST_BYTES else None


def _fits(pair: Pair, dtype: torch.dtype) -> bool:
    """Whether C can read both sides: plain tensors on the CPU, each row's numbers side by side."""
    left, right = pair.left, pair.right
    plain = type(left) is Tensor and type(right) is Tensor and left.is_cpu and right.is_cpu
    same = left.dtype is dtype and right.dtype is dtype
    return plain and same and left.stride(1) == 1 and right.stride(1) == 1 and pair.names in NAMES


def group_norms(squared: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> Tensor | None:
    """Norms [groups, B] from the squared norms of each group's parts, [B] or [parts, B]."""
    add, parts = function("affine", "norms", dtype, 4), [part for group in squared for part in group]
    if add is None or is_traced() or not all(_is_plain(part, dtype) for part in parts):
        return None
    blocks = array("q")
    for group in squared:
        for part in group:
            blocks.extend((part.data_ptr(), 1 if part.dim() == 1 else part.shape[0], 0))
        blocks[-1] = 1
    found = parts[0].new_empty(len(squared), parts[0].shape[-1])
    add(blocks.buffer_info()[0], len(parts), found.shape[1], found.data_ptr())
    return found


def bounded_weights(norms: Tensor, limits: array[float]) -> Tensor | None:
    """``min(1, limit / norm)`` for norms [B] or [groups, B] and a limit for each group."""
    weigh = function("affine", "weights", norms.dtype, 5)
    if weigh is None or is_traced() or not _is_plain(norms, norms.dtype):
        return None
    found = torch.empty_like(norms)
    weigh(norms.data_ptr(), limits.buffer_info()[0], len(limits), norms.shape[-1], found.data_ptr())
    return found


def all_finite(vectors: Sequence[Tensor]) -> bool | None:
    """Whether all numbers of vectors of one shape are finite."""
    look: Any = function("affine", "finite", vectors[0].dtype, 2)
    if look is None or not all(_is_plain(vector, vectors[0].dtype) for vector in vectors):
        return None
    return all(look(vector.data_ptr(), vector.numel()) for vector in vectors)


def _is_plain(vector: Tensor, dtype: torch.dtype) -> bool:
    """Whether C can read it."""
    return type(vector) is Tensor and vector.is_cpu and vector.dtype == dtype and vector.is_contiguous()
