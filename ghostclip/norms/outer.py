"""Gradients that are sums of outer products over positions: linear, recurrent, attention layers, and convolutions.

One layout: left factors belong to the weight's first axis, [B, T, p], right factors to its others, [B, T, d]. For
torch's weights [p, d] they are gradients of the loss at the pre-activation and what the weight was multiplied with, for
weights [d, p] the other way round. The gradient of example i is ``sum_t left[i, t] (x) right[i, t]``, of shape p x d
(Lee & Kifer 2020, equations 6, 8 and 12). Its squared norm has two forms:

    direct   || left[i]^T right[i] ||_F^2                                  2 B T p d flops, B p d numbers
    gram     sum_{s,t} (left[i,s] . left[i,t]) (right[i,s] . right[i,t])   2 B T^2 (p + d) flops, B T^2 numbers

Both run over chunks of examples, so that neither B p d nor B T^2 numbers ever stand in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ghostclip.native.gram import gram_is_there, half_gram

from .reduce import Sizes, hidden_in_pairs, hidden_in_product
from .term import (
    Dense,
    NormResult,
    PerExampleGrads,
    Strategy,
    may_sync,
    split_examples,
    squared_norms,
    squared_sizes,
    summed_products,
    to_float32,
)

__all__ = ["OuterProduct", "chunks", "direct", "gram", "gram_is_reliable", "reliable"]

# Chunks of about this many bytes stay in the processor's cache between the product and its reduction.
CHUNK_BYTES = 1 << 21
# Rows of a Gram matrix formed at a time. Smaller blocks leave out more of the upper half and are slower (measured).
BLOCK_ROWS = 256
# Below this share of sum_t |left_t|^2 |right_t|^2, rounding in the Gram form may reach 1e-4 of the result in float32.
CANCELLATION = {torch.float32: 1e-2, torch.float64: 1e-5}


def chunks(examples: int, bytes_per_example: int, bytes_: int = CHUNK_BYTES) -> Iterator[slice]:
    """Consecutive slices of the batch whose temporaries take about so many bytes each."""
    step = max(1, min(examples, bytes_ // max(1, bytes_per_example)))
    for start in range(0, examples, step):
        yield slice(start, min(start + step, examples))


def gram(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Squared norms by Gram matrices, for left [B, T, p] and right [B, T, d].

    T x T is formed a chunk of examples and a block of rows at a time; of longer sequences the lower triangle of blocks
    only, since its mirror image sums to the same. (Within a block all pairs are formed: one larger product is faster
    than several smaller ones that leave a half out.)

    Returns:
        The squared norms [B]; ``sum_t |left_t|^2 |right_t|^2`` [B], against which `gram_is_reliable` holds them; and
        ``sum_t |left_t|^2`` and ``sum_t |right_t|^2``, [2, B].
    """
    batch, positions = left.shape[:2]
    squared, scale, sizes = left.new_zeros(batch), left.new_zeros(batch), left.new_zeros(2, batch)
    rows = max(1, min(positions, BLOCK_ROWS))
    for part in chunks(batch, 2 * rows * positions * left.element_size()):
        for start in range(0, positions, rows):
            stop = start + rows
            pairs = torch.bmm(left[part, start:stop], left[part, :stop].mT)
            sizes[0, part] += _traces(pairs[:, :, start:])
            others = torch.bmm(right[part, start:stop], right[part, :stop].mT)
            sizes[1, part] += _traces(others[:, :, start:])
            pairs *= others
            own = pairs[:, :, start:]
            squared[part] += own.sum(dim=(1, 2))
            scale[part] += _traces(own)
            if start:
                squared[part] += 2 * pairs[:, :, :start].sum(dim=(1, 2))
            # Its memory is the next block's.
            del pairs, others, own
    return squared, scale, sizes


def _traces(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=1, dim2=2).sum(dim=1)


def gram_is_reliable(squared: Tensor, scale: Tensor) -> Tensor:
    """Bool [B]: False for an example of ``squared`` [B] that lost its digits to cancellation between positions.

    Rounding leaves about eps * ``scale`` in the Gram form; where the result is far below that sum (near-constant inputs
    whose gradients cancel), only the direct form is exact. NaN and inf count as reliable: the direct form would be no
    better there.
    """
    return ~(squared < CANCELLATION[squared.dtype] * scale)


def reliable(squared: Tensor, scale: Tensor, otherwise: Callable[[], Tensor]) -> Tensor:
    """``squared`` [B] of a Gram form, or ``otherwise()`` where one of them is not `gram_is_reliable`.

    On a GPU, and in a compiled graph, an unreliable norm becomes NaN: whoever reads all norms of the batch at once
    finds it, and has them measured exactly.
    """
    trusted = gram_is_reliable(squared, scale)
    if not may_sync(squared.device):
        return torch.where(trusted, squared, torch.nan)
    return squared if trusted.all() else otherwise()


def direct(left: Tensor, right: Tensor, kept: Tensor | None = None) -> Tensor:
    """Squared norms [B] from gradients formed a chunk of examples at a time; ``kept`` [B, p, d] is filled with them."""
    squared = left.new_empty(left.shape[0])
    for part in chunks(left.shape[0], left.shape[2] * right.shape[2] * left.element_size()):
        gradients = torch.bmm(left[part].mT, right[part], out=None if kept is None else kept[part])
        squared[part] = squared_norms(gradients)
    return squared


@dataclass(eq=False)
class OuterProduct(PerExampleGrads):
    """Sums of outer products over T positions; ``groups`` blocks of a grouped weight are folded into the batch.

    Attributes:
        left: [B * groups, T, p], gradients at the pre-activation for a weight [p, d].
        right: [B * groups, T, d], inputs for a weight [p, d].
        shape: of the parameter; its axes flatten to groups, p and d in this order.
        groups: blocks of the weight with inputs of their own, as groups of a convolution or places of a local layer.
        several: whether positions are of several uses of the layer. Where gradients are differentiated again, left
            factors of one use grow with the loss, and right factors of another.
    """

    TENSORS = ("left", "right")
    left: Tensor
    right: Tensor
    shape: torch.Size
    groups: int = 1
    several: bool = False

    @property
    def examples(self) -> int:
        return self.left.shape[0] // self.groups

    def closed_form(self, keep: bool) -> NormResult | None:
        """One position: the norm of an outer product is the product of the norms (Goodfellow 2015)."""
        if self.left.shape[1] != 1:
            return None
        left, right = squared_norms(self.left), squared_norms(self.right)
        lost = hidden_in_product(left, self.left.shape[2], right, self.right.shape[2])
        return NormResult(self._by_example(left * right), absolute=self._by_example(lost))

    def candidates(self) -> dict[str, Strategy]:
        batch, positions, outputs = self.left.shape
        inputs = self.right.shape[2]
        pairs, products = positions * (outputs + inputs), outputs * inputs
        found = {
            "gram": Strategy("gram", OuterProduct.by_gram, 2.0 * batch * positions * pairs),
            "direct": Strategy("direct", OuterProduct.by_direct, 2.0 * batch * positions * products, keeps=True),
        }
        if gram_is_there(self.left):
            found["half gram"] = Strategy("gram", OuterProduct.by_half_gram, batch * positions * pairs)
        return found

    def _by_example(self, squared: Tensor) -> Tensor:
        return squared if self.groups == 1 else squared.view(-1, self.groups).sum(1)

    def by_gram(self, keep: bool = False) -> NormResult:
        """The Gram form; the direct one where it can't be relied on."""
        return self._by_reliable(gram)

    def by_half_gram(self, keep: bool = False) -> NormResult:
        """The same by compiled C."""
        return self._by_reliable(half_gram)

    def _by_reliable(self, form: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]) -> NormResult:
        left, right = to_float32(self.left), to_float32(self.right)
        squared, scale, sizes = form(left, right)
        squared = reliable(squared, scale, lambda: direct(left, right))
        absolute = self._by_example(scale) * left.shape[1] + self.hidden(sizes)
        return NormResult(self._by_example(squared), absolute=absolute, sizes=sizes)

    def by_direct(self, keep: bool = False) -> NormResult:
        """The direct form; ``keep`` keeps the gradients."""
        left, right = to_float32(self.left), to_float32(self.right)
        kept = left.new_empty(left.shape[0], left.shape[2], right.shape[2]) if keep else None
        squared = self._by_example(direct(left, right, kept))
        return NormResult(squared, None if kept is None else kept.view(self.examples, *self.shape))

    def absolute(self) -> Tensor | None:
        return self.hidden(self.sizes()) if self.left.shape[1] == 1 else self._by_example(self.squared_sizes())

    def sizes(self) -> tuple[Tensor, Tensor]:
        """``sum_t |left_t|^2`` and ``sum_t |right_t|^2``, [B * groups]."""
        return squared_sizes(self.left), squared_sizes(self.right)

    def hidden(self, sizes: Sizes) -> Tensor:
        """What underflow may hide of squared norms [B] in Gram form; ``sizes`` as `sizes` finds them."""
        widths, positions = (self.left.shape[2], self.right.shape[2]), self.left.shape[1]
        return self._by_example(hidden_in_pairs(sizes, widths, positions))

    def squared_sizes(self, sizes: Sizes | None = None) -> Tensor:
        """[B * groups]: ``(sum_t |left_t| |right_t|)^2`` of several uses, and at least that of one.

        Args:
            sizes: as `sizes` finds them, where they are known.
        """
        if not self.several:
            left, right = self.sizes() if sizes is None else sizes
            return left * right
        lengths = [torch.linalg.vector_norm(to_float32(side), dim=2) for side in (self.left, self.right)]
        return torch.linalg.vecdot(*lengths).square()

    def per_example(self) -> Tensor:
        gradients = torch.bmm(to_float32(self.left).mT, to_float32(self.right))
        return gradients.reshape(self.examples, *self.shape)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        left, right = to_float32(self.left), to_float32(self.right)
        scale = weights.to(left.dtype).repeat_interleave(self.groups).view(-1, 1, 1)
        left, right = (left * scale, right) if left.shape[2] <= right.shape[2] else (left, right * scale)
        if self.groups > 1:
            left, right = (side.unflatten(0, (-1, self.groups)) for side in (left, right))
            if 1 in (left.shape[3], right.shape[3]):
                products = torch.einsum("bgtp,bgtd->bgpd", left, right)
                return products.sum(0, dtype=torch.float64).to(left.dtype).reshape(self.shape)
            return torch.einsum("bgtp,bgtd->gpd", left, right).reshape(self.shape)
        if not left.is_contiguous() and left.transpose(0, 1).is_contiguous():
            left, right = left.transpose(0, 1), right.transpose(0, 1)
        return summed_products(left.flatten(0, 1), right.flatten(0, 1)).view(self.shape)

    def replaced(self, function: Callable[[Tensor], Tensor]) -> OuterProduct:
        if self.groups == 1:
            return super().replaced(function)
        return super().replaced(lambda side: function(side.unflatten(0, (-1, self.groups))).flatten(0, 1))

    def split_rows(self, count: int, row_order: str) -> PerExampleGrads:
        if self.groups > 1:
            return Dense(self.per_example()).split_rows(count, row_order)
        return self.replaced(lambda side: split_examples(side, count, row_order).flatten(1, 2))
