"""Per-example gradients of convolution weights, in one to three dimensions.

A convolution is a linear layer over patches (im2col), so its gradient is the sum of outer products of `outer`
(Lee & Kifer 2020, section 5.2, algorithm 3). Which way is cheapest depends on the shape, so several are offered:

    patches   im2col and bmm, a chunk of examples at a time
    shifts    the same products from the images as they lie; compiled
    gram      im2col and Gram matrices; compiled, the half of them
    windows   Gram matrices of the raw images, summed over shifted windows (stride 1); compiled, the half of them
    grouped   the native weight gradient, the batch folded into groups
    native    the native weight gradient, one call an example
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ghostclip.native.gram import half_gram_is_there, half_windows, half_windows_are_there
from ghostclip.native.shifts import shifted_products, shifts_are_there

from .im2col import Geometry, patches, rows_of_patches
from .memory import FRESH, Memory
from .outer import OuterProduct, chunks, reliable
from .rounding import product_of_sizes
from .term import (
    Dense,
    NormResult,
    PerExampleGrads,
    Strategy,
    StrategyRun,
    size_class,
    squared_norms,
    to_float32,
    zero_examples,
)
from .windows import windowed_gram

__all__ = ["ConvGrads", "Geometry", "weight_gradient"]

# Positions of an example up to which the weighted sum may be a product with patches. Where there are few, torch's
# kernel is slower (measured: 3.5 times at 2 x 2, the same at 8 x 8); where there are many, patches cost more than it.
MOST_POSITIONS = 144
# Patches of so many bytes are multiplied at a time, or as many as the weight has, which is read and written each time.
SUM_BYTES = 1 << 20


def weight_gradient(images: Tensor, grads: Tensor, shape: torch.Size, geometry: Geometry) -> Tensor:
    """The batch's weight gradient [*shape] by torch's own kernel, for images [B, C, *S] and grads [B, P, *O]."""
    zeros = [0] * len(geometry.stride)
    # Only the shape of the weight is read. One without memory of its own would be copied, which takes as long as the
    # product itself where images are small.
    weight = images.new_empty(shape)
    return torch.ops.aten.convolution_backward(
        grads, images, weight, None, geometry.stride, geometry.padding, geometry.dilation, False, zeros,
        geometry.groups, [False, True, False],
    )[1]  # fmt: skip


def _side_by_side(maps: Tensor) -> Tensor:
    """[B, C, *S] as [1, B * C, *S]. Of maps of one pixel, channels last, torch's kernel refuses the strides."""
    return maps.reshape(-1).view(1, -1, *maps.shape[2:])


@dataclass(eq=False)
class ConvGrads(PerExampleGrads):
    """The weight of a convolution.

    Attributes:
        images: [B, C, *S], padded already where the padding is not symmetric zeros.
        grads: [B, P, *O], gradients at the pre-activation.
        shape: of the weight, [P, C / groups, *kernel].
        geometry: stride, padding, dilation, groups.
    """

    images: Tensor
    grads: Tensor
    shape: torch.Size
    geometry: Geometry

    @property
    def key(self) -> tuple:
        batch = size_class(self.images.shape[0])
        sizes = (*self.images.shape[1:], *self.grads.shape[1:], *self.shape)
        return ("convolution", batch, sizes, self.geometry, self.images.dtype, self.images.device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.grads, self.images)

    def outer(self, part: slice = slice(None), memory: Memory = FRESH) -> OuterProduct:
        """The examples of ``part`` as outer products over positions; groups folded into the batch."""
        images, grads = to_float32(self.images[part]), to_float32(self.grads[part])
        columns = patches(images, self.shape[2:], self.grads.shape[2:], self.geometry, memory)
        left, right = self._folded(grads.flatten(2)), self._folded(columns)
        return OuterProduct(left.mT, right.mT, self.shape, self.geometry.groups)

    def _folded(self, maps: Tensor) -> Tensor:
        """[B, channels, ...] as [B * groups, channels / groups, ...]."""
        groups = self.geometry.groups
        return maps if groups == 1 else maps.unflatten(1, (groups, -1)).flatten(0, 1)

    def candidates(self) -> dict[str, Strategy]:
        batch, positions = self.grads.shape[0], math.prod(self.grads.shape[2:])
        outputs, inputs = self.shape[0], math.prod(self.shape[1:])
        product = 2.0 * batch * positions * outputs * inputs
        squares = 2.0 * batch * positions**2
        pairs = squares * (outputs + inputs * self.geometry.groups)
        found = {}
        if shifts_are_there(self.images):
            found["shifts"] = Strategy("direct", ConvGrads._shifts, product, keeps=True)
        found |= {
            "patches": Strategy("direct", ConvGrads._by_patches, product, keeps=True),
            "gram": Strategy("gram", ConvGrads._by_gram, pairs),
            "grouped": Strategy("direct", ConvGrads._grouped, 1.5 * product, keeps=True),
            "native": Strategy("direct", ConvGrads._native, 2.0 * product, keeps=True),
        }
        if half_gram_is_there(self.images):
            found["half gram"] = Strategy("gram", ConvGrads._by_half_gram, pairs / 2)
        if all(step == 1 for step in self.geometry.stride) and math.prod(self.shape[2:]) > 1:
            # An addition to a window was measured to cost as much as some hundred operations of a product.
            pixels = 2.0 * batch * math.prod(self.images.shape[2:]) ** 2
            sums = pixels * (self.images.shape[1] + 50 * sum(self.shape[2:]) * self.geometry.groups)
            found["windows"] = Strategy("gram", ConvGrads._windows, squares * outputs + sums)
            if half_windows_are_there(self.images):
                half = (squares * outputs + pixels * self.images.shape[1]) / 2 + sums / 10
                found["half windows"] = Strategy("gram", ConvGrads._half_windows, half)
        return found

    def head(self, count: int) -> ConvGrads:
        return replace(self, images=self.images[:count], grads=self.grads[:count])

    def _empty(self, memory: Memory, keep: bool) -> tuple[Tensor, Tensor | None]:
        """Room for the squared norms and, where asked, for the gradients."""
        like = to_float32(self.grads[:0])
        batch = self.grads.shape[0]
        return like.new_empty(batch), (memory.to_keep(like, batch, *self.shape) if keep else None)

    def _column_bytes(self) -> int:
        """Of one example's patches."""
        return 4 * math.prod(self.shape[1:]) * self.geometry.groups * math.prod(self.grads.shape[2:])

    def _by_patches(self, keep: bool = False, memory: Memory = FRESH) -> NormResult:
        squared, kept = self._empty(memory, keep)
        for part in chunks(self.grads.shape[0], self._column_bytes()):
            into = None if kept is None else kept[part]
            squared[part] = self.outer(part, memory).by_direct(memory=memory, kept=into).squared_norms
        return NormResult(squared, kept)

    def _shifts(self, keep: bool = False, memory: Memory = FRESH) -> NormResult:
        images, grads = self._folded(to_float32(self.images)), self._folded(to_float32(self.grads))
        geometry = self.geometry
        axes = self.shape[2:], geometry.stride, geometry.padding, geometry.dilation
        squared, *kept = shifted_products(images, grads, *axes, keep, empty=memory.to_keep)
        squared = squared.view(-1, geometry.groups).sum(1)
        return NormResult(squared, kept[0].view(-1, *self.shape) if keep else None)

    def _by_gram(self, keep: bool = False, memory: Memory = FRESH) -> NormResult:
        return self._by_pairs(OuterProduct.by_gram, memory)

    def _by_half_gram(self, keep: bool = False, memory: Memory = FRESH) -> NormResult:
        return self._by_pairs(OuterProduct.by_half_gram, memory)

    def _by_pairs(self, way: StrategyRun, memory: Memory) -> NormResult:
        squared, _ = self._empty(memory, False)
        absolute = torch.empty_like(squared)
        for part in chunks(self.grads.shape[0], self._column_bytes()):
            answer = way(self._by_positions(part, memory), memory=memory)
            assert answer.absolute is not None
            squared[part], absolute[part] = answer.squared_norms, answer.absolute
        return NormResult(squared, absolute=absolute)

    def _by_positions(self, part: slice, memory: Memory) -> OuterProduct:
        """As `outer`, with positions first and channels last, which copies whole runs where outputs are small."""
        images, grads = self._folded(to_float32(self.images[part])), self._folded(to_float32(self.grads[part]))
        rows = rows_of_patches(images, self.shape[2:], self.grads.shape[2:], self.geometry, memory)
        return OuterProduct(grads.flatten(2).mT, rows, self.shape, self.geometry.groups)

    def _windows(self, keep: bool = False, memory: Memory = FRESH) -> NormResult:
        images, grads = self._folded(to_float32(self.images)), self._folded(to_float32(self.grads))
        geometry = self.geometry
        return self._by_windows(
            windowed_gram(images, grads, self.shape[2:], geometry.padding, geometry.dilation, memory), memory
        )

    def _half_windows(self, keep: bool = False, memory: Memory = FRESH) -> NormResult:
        images, grads = self._folded(to_float32(self.images)), self._folded(to_float32(self.grads))
        geometry = self.geometry
        found = half_windows(images, grads, self.shape[2:], geometry.padding, geometry.dilation)
        return self._by_windows(found, memory)

    def _by_windows(self, found: tuple[Tensor, Tensor], memory: Memory) -> NormResult:
        squared, scale = (each.view(-1, self.geometry.groups).sum(1) for each in found)
        positions = math.prod(self.grads.shape[2:])
        squared = reliable(squared, scale, lambda: self._by_patches(memory=memory).squared_norms)
        return NormResult(squared, absolute=scale * positions)

    def _grouped(self, keep: bool = False, memory: Memory = FRESH) -> NormResult:
        images, grads = to_float32(self.images), to_float32(self.grads)
        squared, kept = self._empty(memory, keep)
        # The kernel copies images and gradients into a layout of its own.
        copied = math.prod(images.shape[1:]) + math.prod(grads.shape[1:])
        for part in chunks(grads.shape[0], 4 * (math.prod(self.shape) + copied)):
            count = images[part].shape[0]
            gradients = weight_gradient(
                _side_by_side(images[part]),
                _side_by_side(grads[part]),
                torch.Size((count * self.shape[0], *self.shape[1:])),
                replace(self.geometry, groups=count * self.geometry.groups),
            ).unflatten(0, (count, -1))
            squared[part] = squared_norms(gradients)
            if kept is not None:
                kept[part] = gradients
        return NormResult(squared, kept)

    def _native(self, keep: bool = False, memory: Memory = FRESH) -> NormResult:
        images, grads = to_float32(self.images), to_float32(self.grads)
        squared, kept = self._empty(memory, keep)
        for example in range(grads.shape[0]):
            part = slice(example, example + 1)
            gradient = weight_gradient(images[part], grads[part], self.shape, self.geometry)
            squared[part] = squared_norms(gradient.unsqueeze(0))
            if kept is not None:
                kept[example] = gradient
        return NormResult(squared, kept)

    def absolute(self) -> Tensor | None:
        if math.prod(self.grads.shape[2:]) == 1:
            return None
        geometry = self.geometry
        axes = zip(self.shape[2:], geometry.stride, geometry.dilation, strict=True)
        # No pixel is in more patches than this.
        patches_of_one = math.prod(-(-size * math.gcd(step, dilation) // step) for size, step, dilation in axes)
        return product_of_sizes(self.grads, self.images) * patches_of_one

    def per_example(self) -> Tensor:
        return self.outer().per_example()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.examples == 0:
            return to_float32(self.grads).new_zeros(self.shape)
        return weight_gradient(*self._scaled(weights), self.shape, self.geometry)

    def sums(self) -> dict[str, Callable[[Tensor], Tensor]]:
        positions, taps = math.prod(self.grads.shape[2:]), math.prod(self.shape[2:])
        if self.geometry.groups > 1 or positions > MOST_POSITIONS or self.examples == 0:
            return {}
        found: dict[str, Callable[[Tensor], Tensor]] = {"native": self.weighted_sum}
        found["rows"] = partial(self._sum_by_rows, turned=False)
        if taps > 1:
            found["turned rows"] = partial(self._sum_by_rows, turned=True)
        return found

    def _sum_by_rows(self, weights: Tensor, turned: bool) -> Tensor:
        """A product with patches as rows, channels last; or ``turned`` to the weight's own order, not the result."""
        images, grads = self._scaled(weights)
        outputs, inputs, *kernel = self.shape
        total: Tensor | None = None
        for part in chunks(self.examples, self._column_bytes(), max(SUM_BYTES, 4 * math.prod(self.shape))):
            rows = rows_of_patches(images[part], self.shape[2:], self.grads.shape[2:], self.geometry)
            if turned:
                rows = rows.unflatten(2, (-1, inputs)).mT
            left = grads[part].flatten(2).transpose(0, 1).reshape(outputs, -1)
            right = rows.reshape(left.shape[1], -1)
            total = left @ right if total is None else total.addmm_(left, right)
        assert total is not None
        # Of one channel or one tap both orders are the same, and nothing would be copied, or its strides put right.
        if turned or min(inputs, math.prod(kernel)) == 1:
            return total.view(self.shape)
        return total.view(outputs, *kernel, inputs).movedim(-1, 1).contiguous()

    def _scaled(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Images and gradients, one of them times the weights: linear in both, the smaller one is copied."""
        images, grads = to_float32(self.images), to_float32(self.grads)
        scale = weights.to(grads.dtype).view(-1, *[1] * (grads.dim() - 1))
        return (images * scale, grads) if images.numel() < grads.numel() else (images, grads * scale)

    def keep_only(self, keep: Tensor) -> ConvGrads:
        return replace(self, images=zero_examples(self.images, keep), grads=zero_examples(self.grads, keep))

    def split_rows(self, count: int, row_order: str) -> PerExampleGrads:
        if self.geometry.groups > 1:
            return Dense(self.per_example()).split_rows(count, row_order)
        return self.outer().split_rows(count, row_order)
