"""Per-example gradients of convolution weights, in one to three dimensions.

A convolution is a linear layer over patches (im2col; Chellapilla et al. 2006), so its gradient is the sum of outer
products of `outer` (Lee & Kifer 2020, section 5.2, algorithm 3). Which way is cheapest depends on the shape, so several
are offered:

    patches   im2col and the direct form
    shifts    the same products from the images as they lie; compiled
    gram      im2col and Gram matrices
    windows   Gram matrices of the raw images, summed over shifted windows (stride 1)

With stride 1, the patch at output position s holds the image's positions s + k for the kernel's offsets k, so that
<patch_s, patch_t> = sum_k <image_{s+k}, image_{t+k}>: the Gram matrix of the raw image, summed over windows shifted
along both of its axes. Its product costs 1 / prod(kernel) of the one over patches; the sums go dimension by dimension,
sum(kernel) additions instead of prod(kernel).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ghostclip.native.shifts import shifted_products, shifts_are_there

from .outer import OuterProduct, chunks, direct, reliable
from .reduce import hidden, hidden_in_product
from .term import (
    NormResult,
    PerExampleGrads,
    Strategy,
    product_of_sizes,
    split_examples,
    squared_sizes,
    to_float32,
)

__all__ = ["ConvGrads", "Geometry", "weight_gradient", "windowed_gram"]


@dataclass(frozen=True)
class Geometry:
    """What a convolution does besides multiplying: all tuples have one entry a spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


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


def patches(images: Tensor, kernel: tuple[int, ...], output: tuple[int, ...], geometry: Geometry) -> Tensor:
    """im2col: images [B, C, *S] to [B, C * prod(kernel), prod(output)], by one strided view and one copy."""
    padding = [side for amount in reversed(geometry.padding) for side in (amount, amount)]
    images = (torch.nn.functional.pad(images, padding) if any(padding) else images).contiguous()
    example, channel, *steps = images.stride()
    within = [step * each for step, each in zip(steps, geometry.dilation, strict=True)]
    between = [step * each for step, each in zip(steps, geometry.stride, strict=True)]
    view = images.as_strided((*images.shape[:2], *kernel, *output), (example, channel, *within, *between))
    return view.reshape(images.shape[0], images.shape[1] * math.prod(kernel), math.prod(output))


def windowed_gram(
    images: Tensor, grads: Tensor, kernel: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Squared norms of a convolution's weight gradients (stride 1), and their scale, as `outer.gram` returns them.

    Args:
        images: [B, C, *S].
        grads: [B, P, *O], gradients at the pre-activation.
        kernel, padding, dilation: of the convolution, one entry a spatial dimension; padding with zeros.
    """
    batch, inputs, outputs = images.shape[0], images.shape[2:], grads.shape[2:]
    squared, scale = grads.new_empty(batch), grads.new_empty(batch)
    numbers = math.prod(inputs) ** 2 + 2 * math.prod(outputs) ** 2
    for part in chunks(batch, numbers * grads.element_size()):
        pairs = _inner_products(images[part]).view(-1, *inputs, *inputs)
        for dim, size in enumerate(outputs):
            shifts = [k * dilation[dim] - padding[dim] for k in range(kernel[dim])]
            pairs = _summed_windows(pairs, 1 + dim, size, shifts)
        products = _inner_products(grads[part])
        products *= pairs.view(products.shape)
        squared[part] = products.sum(dim=(1, 2))
        scale[part] = products.diagonal(dim1=1, dim2=2).sum(dim=1)
    return squared, scale


def _inner_products(maps: Tensor) -> Tensor:
    """Of positions over channels, [B, positions, positions]."""
    flat = maps.flatten(2)
    return torch.bmm(flat.mT, flat)


def _summed_windows(pairs: Tensor, axis: int, size: int, shifts: list[int]) -> Tensor:
    """``sum_k pairs[..., s + k, ..., t + k, ...]`` for 0 <= s, t < size at ``axis`` and its mirror; zeros outside."""
    mirror, length = axis + (pairs.dim() - 1) // 2, pairs.shape[axis]
    if shifts == [0] and size == length:
        return pairs
    shape = list(pairs.shape)
    shape[axis] = shape[mirror] = size
    total = pairs.new_zeros(shape)
    for shift in shifts:
        first, last = max(0, -shift), min(size, length - shift)
        if first < last:
            window, count = first + shift, last - first
            total.narrow(axis, first, count).narrow(mirror, first, count).add_(
                pairs.narrow(axis, window, count).narrow(mirror, window, count)
            )
    return total


@dataclass(eq=False)
class ConvGrads(PerExampleGrads):
    """The weight of a convolution.

    Attributes:
        images: [B, C, *S], padded already where the padding is not symmetric zeros.
        grads: [B, P, *O], gradients at the pre-activation.
        shape: of the weight, [P, C / groups, *kernel].
        geometry: stride, padding, dilation, groups.
    """

    TENSORS = ("grads", "images")
    images: Tensor
    grads: Tensor
    shape: torch.Size
    geometry: Geometry

    @property
    def key(self) -> tuple:
        return (*super().key, self.geometry)

    def outer(self) -> OuterProduct:
        """The same as outer products over positions; groups folded into the batch."""
        images, grads = to_float32(self.images), to_float32(self.grads)
        columns = patches(images, self.shape[2:], self.grads.shape[2:], self.geometry)
        left, right = self._folded(grads.flatten(2)), self._folded(columns)
        return OuterProduct(left.mT, right.mT, self.shape, self.geometry.groups)

    def _folded(self, maps: Tensor) -> Tensor:
        """[B, channels, ...] as [B * groups, channels / groups, ...]."""
        groups = self.geometry.groups
        return maps if groups == 1 else maps.unflatten(1, (groups, -1)).flatten(0, 1)

    @property
    def _positions(self) -> int:
        return math.prod(self.grads.shape[2:])

    def _column_bytes(self) -> int:
        """Of one example's patches."""
        return 4 * math.prod(self.shape[1:]) * self.geometry.groups * self._positions

    def candidates(self) -> dict[str, Strategy]:
        batch, groups = self.grads.shape[0], self.geometry.groups
        outputs, inputs = self.shape[0], math.prod(self.shape[1:])
        squares = 2.0 * batch * self._positions**2
        products = 2.0 * batch * self._positions * outputs * inputs
        found = {}
        if shifts_are_there(self.images):
            found["shifts"] = Strategy("direct", ConvGrads._by_shifts, products, keeps=True)
        found |= {
            "patches": Strategy("direct", ConvGrads._by_patches, products, keeps=True),
            "gram": Strategy("gram", ConvGrads._by_gram, squares * (outputs + inputs * groups)),
        }
        if all(step == 1 for step in self.geometry.stride) and math.prod(self.shape[2:]) > 1:
            # An addition to a window was measured to cost as much as some hundred operations of a product.
            pixels = 2.0 * batch * math.prod(self.images.shape[2:]) ** 2
            sums = pixels * (self.images.shape[1] + 50 * sum(self.shape[2:]) * groups)
            found["windows"] = Strategy("gram", ConvGrads._by_windows, squares * outputs + sums)
        return found

    def _by_patches(self, keep: bool = False) -> NormResult:
        groups, like = self.geometry.groups, to_float32(self.grads[:0])
        rows = self.examples * groups
        squared = like.new_empty(rows)
        kept = like.new_empty(rows, self.shape[0] // groups, math.prod(self.shape[1:])) if keep else None
        for part in chunks(self.examples, self._column_bytes()):
            term, of_groups = self.pick(part).outer(), slice(part.start * groups, part.stop * groups)
            squared[of_groups] = direct(term.left, term.right, None if kept is None else kept[of_groups])
        squared = squared.view(-1, groups).sum(1)
        return NormResult(squared, None if kept is None else kept.view(-1, *self.shape))

    def _by_shifts(self, keep: bool = False) -> NormResult:
        images, grads = self._folded(to_float32(self.images)), self._folded(to_float32(self.grads))
        geometry = self.geometry
        axes = self.shape[2:], geometry.stride, geometry.padding, geometry.dilation
        squared, *kept = shifted_products(images, grads, *axes, keep)
        return NormResult(squared.view(-1, geometry.groups).sum(1), kept[0].view(-1, *self.shape) if keep else None)

    def _by_gram(self, keep: bool = False) -> NormResult:
        squared, absolute = to_float32(self.grads[:0]).new_empty(2, self.examples)
        for part in chunks(self.examples, self._column_bytes()):
            answer = self.pick(part).outer().by_gram()
            assert answer.absolute is not None
            squared[part], absolute[part] = answer.squared_norms, answer.absolute
        return NormResult(squared, absolute=absolute)

    def _by_windows(self, keep: bool = False) -> NormResult:
        images, grads = self._folded(to_float32(self.images)), self._folded(to_float32(self.grads))
        found = windowed_gram(images, grads, self.shape[2:], self.geometry.padding, self.geometry.dilation)
        squared, scale = (each.view(-1, self.geometry.groups).sum(1) for each in found)
        squared = reliable(squared, scale, lambda: self._by_patches().squared_norms)
        taps = math.prod(self.shape[2:])
        sizes = squared_sizes(self.grads), squared_sizes(self.images) * taps
        lost = hidden_in_product(sizes[0], self.grads.shape[1], sizes[1], self.images.shape[1] * taps)
        lost += self._positions * hidden(lost.dtype)
        return NormResult(squared, absolute=(scale + lost) * self._positions)

    def absolute(self) -> Tensor | None:
        if self._positions == 1:
            return None
        axes = zip(self.shape[2:], self.geometry.stride, self.geometry.dilation, strict=True)
        # No pixel is in more patches than this.
        patches_of_one = math.prod(-(-size * math.gcd(step, dilation) // step) for size, step, dilation in axes)
        return product_of_sizes(self.grads, self.images) * patches_of_one

    def per_example(self) -> Tensor:
        kept = self._by_shifts(True).kept if self.examples and shifts_are_there(self.images) else None
        return self.outer().per_example() if kept is None else kept

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.examples == 0:
            return to_float32(self.grads).new_zeros(self.shape)
        images, grads = to_float32(self.images), to_float32(self.grads)
        scale = weights.to(grads.dtype).view(-1, *[1] * (grads.dim() - 1))
        # Linear in both: the smaller one is copied.
        images, grads = (images * scale, grads) if images.numel() < grads.numel() else (images, grads * scale)
        return weight_gradient(images, grads, self.shape, self.geometry)

    def split_rows(self, count: int, row_order: str) -> ConvGrads:
        """The rows of an example as one image, one below the other, each with its padding above it.

        What is above a row pads the one before it, too; no gradient is where a patch would hold parts of two.
        """
        images, grads = (split_examples(each, count, row_order).transpose(1, 2) for each in (self.images, self.grads))
        step, above = self.geometry.stride[0], self.geometry.padding[0]
        reach = self.geometry.dilation[0] * (self.shape[2] - 1) + 1
        places = max(-(-(images.shape[3] + above) // step), grads.shape[3])
        tall = images.new_zeros(*images.shape[:2], count * places * step + max(0, reach - step), *images.shape[4:])
        apart = grads.new_zeros(*grads.shape[:3], places, *grads.shape[4:])
        below = tall[:, :, : count * places * step].unflatten(2, (count, -1))
        below[:, :, :, above : above + images.shape[3]] = images
        apart[:, :, :, : grads.shape[3]] = grads
        geometry = replace(self.geometry, padding=(0, *self.geometry.padding[1:]))
        return ConvGrads(tall, apart.flatten(2, 3), self.shape, geometry)
