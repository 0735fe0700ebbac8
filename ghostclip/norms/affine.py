"""Weight and bias of a linear layer that saw one position an example: both answers from one read of the gradient.

With dz [B, p] and x [B, d], dL_i/dW = dz[i] (x) x[i] and dL_i/db = dz[i], so that ||dL_i/dW|| = ||dz[i]|| ||x[i]||
(Goodfellow 2015), and clipped sums of both are made of the same scaled dz. Small layers cost what it takes to call an
operation, so several are answered for together, by one call of native/affine.c.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ghostclip.native.calls import function

from .dense import squared_norms
from .term import is_traced, to_float32, zero_examples

__all__ = ["LinearPair", "squared_norms_of", "weighted_sums_of"]

# Beyond so many bytes torch's operations, which share the work among threads, are as good.
MOST_BYTES = 8 << 20
# Up to so many multiplications, of a weight of so many numbers, C forms its sum without a scaled copy of the gradients:
# measured, in at most torch's time. Beyond, torch's threads are worth it. How many there are is not asked, so that no
# result depends on it.
MOST_WORK, MOST_NUMBERS = 1 << 21, 1 << 18
# Names as native/affine.c has them.
NAMES = {("weight",): 1, ("bias",): 2, ("weight", "bias"): 3}


@dataclass(eq=False, slots=True)
class LinearPair:
    """The per-example gradients of a linear layer's parameters, not multiplied out.

    Attributes:
        left: [B, p], gradients at the pre-activation.
        right: [B, d], inputs.
        names: which of "weight" and "bias" are asked for.
    """

    left: Tensor
    right: Tensor
    names: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the two tensors."""
        return self.left.nbytes + self.right.nbytes

    def squared_norms(self) -> Tensor:
        """[names, B], in float32 or wider."""
        left = squared_norms(self.left)
        return torch.stack([left if name == "bias" else left * squared_norms(self.right) for name in self.names])

    def weighted_sums(self, weights: Tensor) -> list[Tensor]:
        """``sum_i weights[i] * gradient[i]`` for each name, for weights [B]."""
        scaled = to_float32(self.left) * weights.to(to_float32(self.left).dtype).unsqueeze(1)
        return [
            torch.sum(scaled, 0) if name == "bias" else torch.mm(scaled.t(), to_float32(self.right))
            for name in self.names
        ]

    def keep_only(self, keep: Tensor) -> LinearPair:
        """The same with zeros for examples where ``keep`` [B] is False."""
        return LinearPair(zero_examples(self.left, keep), zero_examples(self.right, keep), self.names)

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether C can read it: plain tensors on the CPU, each row's numbers side by side."""
        left, right = self.left, self.right
        plain = type(left) is Tensor and type(right) is Tensor and left.is_cpu and right.is_cpu
        same = left.dtype is dtype and right.dtype is dtype
        return plain and same and left.stride(1) == 1 and right.stride(1) == 1 and self.names in NAMES

    def is_small(self) -> bool:
        """Whether C forms the weight's sum."""
        numbers = self.left.shape[1] * self.right.shape[1]
        return numbers <= MOST_NUMBERS and numbers * self.left.shape[0] <= MOST_WORK


def squared_norms_of(affines: Sequence[LinearPair]) -> Tensor:
    """Squared norms for each name of each layer in turn, of which there is at least one: [names, B], for the same B."""
    squares = _in_c("squared_norms", 4, affines)
    if squares is None:
        return torch.cat([affine.squared_norms() for affine in affines])
    first = affines[0].left
    layers = array("q")
    rows = 0
    for affine in affines:
        layers.extend((*_layer(affine), 0, 0, 0, 0))
        rows += len(affine.names)
    found = first.new_empty(rows, len(first))
    squares(layers.buffer_info()[0], len(affines), len(first), found.data_ptr())
    return found


def weighted_sums_of(affines: Sequence[LinearPair], weights: Sequence[Tensor]) -> list[list[Tensor]]:
    """``sum_i weights[i] * gradient[i]`` for each name of each, for as many weights [B]."""
    sums = _in_c("sums", 3, affines)
    if sums is None or any(w.dtype != affines[0].left.dtype or not w.is_contiguous() for w in weights):
        return [affine.weighted_sums(each) for affine, each in zip(affines, weights, strict=True)]
    layers, places = _to_sum(affines, [each.data_ptr() for each in weights])
    sums(layers.buffer_info()[0], len(affines), affines[0].left.shape[0])
    return _formed(affines, places)


def _to_sum(affines: Sequence[LinearPair], weights: Sequence[int]) -> tuple[array[int], list[dict[str, Tensor]]]:
    """What C needs to form weighted sums, for weights at these addresses.

    Returns:
        The layers, and for each the places of its sums: "weight" [p, d], or "scaled", the weighted left as columns
        [p, B] where torch is to multiply, and "bias" [p].
    """
    layers, places = array("q"), []
    for affine, weight in zip(affines, weights, strict=True):
        left, outputs = affine.left, affine.left.shape[1]
        place = {"bias": left.new_empty(outputs)} if "bias" in affine.names else {}
        if "weight" in affine.names and affine.is_small():
            place["weight"] = left.new_empty(outputs, affine.right.shape[1])
        elif "weight" in affine.names:
            place["scaled"] = left.new_empty(left.shape).t()
        asked = [place[name].data_ptr() if name in place else 0 for name in ("weight", "bias", "scaled")]
        layers.extend((*_layer(affine), weight, *asked))
        places.append(place)
    return layers, places


def _formed(affines: Sequence[LinearPair], places: Sequence[dict[str, Tensor]]) -> list[list[Tensor]]:
    """The weighted sums, for each name of each affine, from what C wrote."""
    return [
        [place[name] if name in place else torch.mm(place["scaled"], affine.right) for name in affine.names]
        for affine, place in zip(affines, places, strict=True)
    ]


def _layer(affine: LinearPair) -> tuple[int, ...]:
    """What native/affine.c wants to know of a layer."""
    left, right = affine.left, affine.right
    return (
        left.data_ptr(), left.stride(0), left.shape[1], right.data_ptr(), right.stride(0), right.shape[1],
        NAMES[affine.names],
    )  # fmt: skip


def _in_c(name: str, arguments: int, affines: Sequence[LinearPair]) -> Callable[..., int] | None:
    """The C function of that name, where it can and should be used for all of ``affines``."""
    dtype = affines[0].left.dtype
    found = function("affine", name, dtype, arguments)
    if found is None or is_traced() or not all(affine.fits(dtype) for affine in affines):
        return None
    return found if sum(affine.nbytes for affine in affines) <= MOST_BYTES else None
