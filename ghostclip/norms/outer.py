"""Gradients that are sums of outer products over positions: linear, recurrent, attention layers, and convolutions.

One layout: left factors (gradients of the loss at the pre-activation) [B, T, p], right factors (what the weight was
multiplied with) [B, T, d]; the gradient of example i is ``sum_t left[i, t] (x) right[i, t]``, of shape p x d (Lee &
Kifer 2020, equations 6, 8 and 12). Its squared norm has two forms:

    direct   || left[i]^T right[i] ||_F^2                                  2 B T p d flops, B p d numbers
    gram     sum_{s,t} (left[i,s] . left[i,t]) (right[i,s] . right[i,t])   2 B T^2 (p + d) flops, B T^2 numbers

Both run over chunks of examples, so that neither B p d nor B T^2 numbers ever stand in memory at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .dense import Dense, squared_norms
from .term import Answer, Candidate, Term, is_traced, split_examples, wide, zero_examples

__all__ = ["Outer", "chunks", "direct", "gram", "gram_is_reliable"]

# Chunks of about this many bytes stay in the processor's cache between the product and its reduction.
CHUNK_BYTES = 1 << 21
# Below this share of sum_t |left_t|^2 |right_t|^2, rounding in the Gram form may reach 1e-4 of the result in float32.
CANCELLATION = {torch.float32: 1e-2, torch.float64: 1e-5}


def chunks(examples: int, bytes_per_example: int) -> Iterator[slice]:
    """Consecutive slices of the batch whose temporaries take about CHUNK_BYTES each."""
    step = max(1, min(examples, CHUNK_BYTES // max(1, bytes_per_example)))
    for start in range(0, examples, step):
        yield slice(start, min(start + step, examples))


def gram(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norms by Gram matrices, for left [B, T, p] and right [B, T, d]; T x T is formed a chunk at a time.

    Returns:
        The squared norms [B], and ``sum_t |left_t|^2 |right_t|^2`` [B], against which `gram_is_reliable` holds them.
    """
    batch, positions = left.shape[:2]
    squared, scale = left.new_empty(batch), left.new_empty(batch)
    for part in chunks(batch, 2 * positions * positions * left.element_size()):
        pairs = torch.bmm(left[part], left[part].mT)
        pairs *= torch.bmm(right[part], right[part].mT)
        torch.sum(pairs, dim=(1, 2), out=squared[part])
        torch.sum(pairs.diagonal(dim1=1, dim2=2), dim=1, out=scale[part])
    return squared, scale


def gram_is_reliable(squared: Tensor, scale: Tensor) -> Tensor:
    """Bool []: no example of ``squared`` [B] lost its digits to cancellation between positions.

    Rounding leaves about eps * ``scale`` in the Gram form; where the result is far below that sum (near-constant inputs
    whose gradients cancel), only the direct form is exact. NaN and inf count as reliable: the direct form would be no
    better there.
    """
    return ~(squared < CANCELLATION[squared.dtype] * scale).any()


def direct(left: Tensor, right: Tensor, keep: bool) -> Answer:
    """Squared norms [B] from gradients formed a chunk of examples at a time; ``keep`` keeps them all, [B, p, d]."""
    batch, _, outputs = left.shape
    inputs = right.shape[2]
    kept = left.new_empty(batch, outputs, inputs) if keep else None
    out = left.new_empty(batch)
    for part in chunks(batch, outputs * inputs * left.element_size()):
        if kept is None:
            gradients = torch.bmm(left[part].mT, right[part])
        else:
            gradients = torch.bmm(left[part].mT, right[part], out=kept[part])
        out[part] = squared_norms(gradients)
    return Answer(out, kept)


@dataclass(eq=False)
class Outer(Term):
    """Sums of outer products over T positions; ``groups`` blocks of a grouped weight are folded into the batch.

    Attributes:
        left: [B * groups, T, p], gradients at the pre-activation.
        right: [B * groups, T, d], inputs.
        shape: of the parameter; its first axis holds the groups' p one after another, the others flatten to d.
        groups: 1 for all but grouped convolutions.
    """

    left: Tensor
    right: Tensor
    shape: torch.Size
    groups: int = 1

    @property
    def key(self) -> tuple:
        sizes = (*self.left.shape[1:], self.right.shape[2], self.groups)
        batch = 1 << (self.left.shape[0] - 1).bit_length()
        return ("outer", batch, sizes, self.left.dtype, self.left.device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.left, self.right)

    @property
    def examples(self) -> int:
        return self.left.shape[0] // self.groups

    def sole_answer(self, keep: bool) -> Answer | None:
        """One position: the norm of an outer product is the product of the norms (Goodfellow 2015)."""
        if self.left.shape[1] != 1:
            return None
        return Answer(self._by_example(squared_norms(self.left) * squared_norms(self.right)))

    def candidates(self) -> dict[str, Candidate]:
        rows, positions, outputs = self.left.shape
        inputs = self.right.shape[2]
        return {
            "gram": Candidate("gram", self._gram, 2.0 * rows * positions**2 * (outputs + inputs)),
            "direct": Candidate("direct", self._direct, 2.0 * rows * positions * outputs * inputs, keeps=True),
        }

    def by(self, family: str, keep: bool) -> Answer:
        """The answer by the "gram" or the "direct" form, whatever T is."""
        return self._gram(keep) if family == "gram" else self._direct(keep)

    def _by_example(self, squared: Tensor) -> Tensor:
        return squared if self.groups == 1 else squared.view(-1, self.groups).sum(1)

    def _gram(self, keep: bool) -> Answer:
        left, right = wide(self.left), wide(self.right)
        squared, scale = gram(left, right)
        if is_traced():
            # No branch can be written down: NaN norms send the whole batch to the eager step.
            squared = torch.where(squared < CANCELLATION[squared.dtype] * scale, math.nan, squared)
        elif not gram_is_reliable(squared, scale):
            squared = direct(left, right, keep=False).squared_norms
        return Answer(self._by_example(squared))

    def _direct(self, keep: bool) -> Answer:
        answer = direct(wide(self.left), wide(self.right), keep)
        kept = None if answer.kept is None else answer.kept.view(-1, *self.shape)
        return Answer(self._by_example(answer.squared_norms), kept)

    def per_example(self) -> Tensor:
        gradients = torch.bmm(wide(self.left).mT, wide(self.right))
        return gradients.reshape(-1, *self.shape)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.groups > 1:
            return self._weighted_sum_of_groups(weights)
        left, right = wide(self.left), wide(self.right)
        scale = weights.to(left.dtype).view(-1, 1, 1)
        if left.shape[1] == 1:
            return ((left * scale).squeeze(1).t() @ right.squeeze(1)).view(self.shape)
        if left.shape[2] <= right.shape[2]:
            left = left * scale
        else:
            right = right * scale
        if not left.is_contiguous() and left.transpose(0, 1).is_contiguous():
            left, right = left.transpose(0, 1), right.transpose(0, 1)
        left, right = left.flatten(0, 1), right.flatten(0, 1)
        # A far narrower right side is faster on the left of the product (measured: by half at 18 times, not yet at 3).
        product = left.mT @ right if left.shape[1] < 4 * right.shape[1] else (right.mT @ left).mT
        return product.reshape(self.shape)

    def _weighted_sum_of_groups(self, weights: Tensor) -> Tensor:
        left, right = wide(self.left), wide(self.right)
        left = (left * weights.to(left.dtype).repeat_interleave(self.groups).view(-1, 1, 1)).unflatten(
            0, (-1, self.groups)
        )
        right = right.unflatten(0, (-1, self.groups))
        return torch.einsum("bgtp,bgtd->gpd", left, right).reshape(self.shape)

    def keep_only(self, keep: Tensor) -> Outer:
        rows = keep.repeat_interleave(self.groups)
        return Outer(zero_examples(self.left, rows), zero_examples(self.right, rows), self.shape, self.groups)

    def regroup(self, count: int, major: str) -> Term:
        if self.groups > 1:
            return Dense(self.per_example()).regroup(count, major)
        left, right = (split_examples(side, count, major).flatten(1, 2) for side in (self.left, self.right))
        return Outer(left, right, self.shape)
