"""Gram matrices of patches without patches: im2col inner products are sums of those of the images' own positions.

With stride 1, the patch at output position s holds the image's positions s + k for the kernel's offsets k, so that
<patch_s, patch_t> = sum_k <image_{s+k}, image_{t+k}>: the Gram matrix of the raw image, summed over windows shifted
along both of its axes. Its product costs 1 / prod(kernel) of the one over patches; the sums go dimension by dimension,
sum(kernel) additions instead of prod(kernel).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .memory import FRESH, Memory
from .outer import chunks

__all__ = ["windowed_gram"]


def windowed_gram(
    images: Tensor,
    grads: Tensor,
    kernel: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    memory: Memory = FRESH,
) -> tuple[Tensor, Tensor]:
    """Squared norms of a convolution's weight gradients (stride 1), and their scale, as `outer.gram` returns them.

    Args:
        images: [B, C, *S].
        grads: [B, P, *O], gradients at the pre-activation.
        kernel, padding, dilation: of the convolution, one entry a spatial dimension; padding with zeros.
        memory: lends the chunks.
    """
    batch, inputs, outputs = images.shape[0], images.shape[2:], grads.shape[2:]
    squared, scale = grads.new_empty(batch), grads.new_empty(batch)
    numbers = math.prod(inputs) ** 2 + 2 * math.prod(outputs) ** 2
    for part in chunks(batch, numbers * grads.element_size()):
        pairs = _gram_matrix(images[part], memory).view(-1, *inputs, *inputs)
        for dim in range(len(kernel)):
            pairs = _summed_windows(
                pairs, 1 + dim, outputs[dim], [k * dilation[dim] - padding[dim] for k in range(kernel[dim])], memory
            )
        products = _gram_matrix(grads[part], memory)
        products *= pairs.view(products.shape)
        torch.sum(products, dim=(1, 2), out=squared[part])
        torch.sum(products.diagonal(dim1=1, dim2=2), dim=1, out=scale[part])
    return squared, scale


def _gram_matrix(maps: Tensor, memory: Memory) -> Tensor:
    """Inner products of positions over channels, [B, positions, positions]."""
    flat = maps.flatten(2)
    return torch.bmm(flat.mT, flat, out=memory.empty(flat, flat.shape[0], flat.shape[2], flat.shape[2]))


def _summed_windows(pairs: Tensor, axis: int, size: int, shifts: list[int], memory: Memory) -> Tensor:
    """``sum_k pairs[..., s + k, ..., t + k, ...]`` for 0 <= s, t < size at ``axis`` and its mirror; zeros outside."""
    mirror, length = axis + (pairs.dim() - 1) // 2, pairs.shape[axis]
    if shifts == [0] and size == length:
        return pairs
    shape = list(pairs.shape)
    shape[axis] = shape[mirror] = size
    total = memory.empty(pairs, *shape).zero_()
    for shift in shifts:
        first, last = max(0, -shift), min(size, length - shift)
        if first < last:
            window, count = first + shift, last - first
            total.narrow(axis, first, count).narrow(mirror, first, count).add_(
                pairs.narrow(axis, window, count).narrow(mirror, window, count)
            )
    return total
