"""Gradients of the scales of normalizations, example by example, without forming the normalized inputs.

dL_i/dw = sum_t dz[i, t] * n(x)[i, t], where n is the normalization; normalize.c reads inputs and gradients once
where tensor operations write and read the normalized inputs and the products.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ghostclip.native.build import library
from ghostclip.native.calls import NAMES, run_examples
from ghostclip.native.custom_ops import is_traced

__all__ = ["by_channel", "by_feature"]

# Positions of a channel below which tensor operations are as fast (measured).
FEW = 32
# Examples whose channels are shared out together: their sums are taken in vectors.
TOGETHER = 8


def _in_c(inputs: Tensor, grads: Tensor) -> bool:
    """Whether C can read both, and should."""
    if is_traced() or library("normalize") is None:
        return False
    plain = type(inputs) is Tensor and type(grads) is Tensor and inputs.is_cpu and grads.is_cpu
    return plain and inputs.dtype == grads.dtype and inputs.dtype in NAMES


def by_channel(images: Tensor, grads: Tensor, groups: int, eps: float, normalize: Callable[[Tensor], Tensor]) -> Tensor:
    """[B, C] for images and grads [B, C, ...], normalized in groups of channels.

    Args:
        images: inputs of the layer.
        grads: gradients at its output.
        groups: in which the channels are.
        eps: added to the variance.
        normalize: does the same by tensor operations.
    """
    positions = images[0, 0].numel() if images.shape[0] else 0
    if positions < FEW or not _in_c(images, grads) or not images.is_contiguous():
        products = grads * normalize(images)
        return products if products.dim() == 2 else products.flatten(2).sum(2)
    grads = grads.contiguous()
    batch, channels = images.shape[:2]
    found = images.new_empty(batch, channels)
    arguments = (images, grads, found, channels, groups, positions, float(eps))
    run_examples("normalize", "channels", images.dtype, batch, images.numel(), arguments, TOGETHER)
    return found


def by_feature(
    inputs: Tensor, grads: Tensor, normalized: int, centred: bool, eps: float, normalize: Callable[[Tensor], Tensor]
) -> Tensor:
    """[B, *shape] for inputs and grads [B, ..., *shape], whose last ``normalized`` dimensions are normalized together.

    Args:
        inputs: of the layer, examples first.
        grads: gradients at its output.
        normalized: how many dimensions the shape has.
        centred: whether the mean is taken away.
        eps: added to the variance, or to the mean square.
        normalize: does the same by tensor operations.
    """
    shape = inputs.shape[inputs.dim() - normalized :]
    left, right = _positions(inputs, normalized), _positions(grads, normalized)
    if left is None or right is None or not _in_c(inputs, grads):
        products = grads * normalize(inputs)
        positions = products.dim() - 1 - normalized
        return products.flatten(1, positions).sum(1) if positions else products
    batch, positions, width = left.shape
    found = inputs.new_empty(batch, *shape)
    sides = (left, *left.stride()[:2], right, *right.stride()[:2])
    arguments = (*sides, found, positions, width, int(centred), float(eps))
    run_examples("normalize", "rows", inputs.dtype, batch, inputs.numel(), arguments)
    return found


def _positions(tensor: Tensor, normalized: int) -> Tensor | None:
    """[B, ..., *shape] as a view [B, T, width] whose features lie side by side; None where there is no such view."""
    batch, shape = tensor.shape[0], tensor.shape[tensor.dim() - normalized :]
    try:
        found = tensor.view(batch, -1, shape.numel()) if tensor.numel() else None
    except RuntimeError:
        return None
    return found if found is not None and found.stride(2) == 1 else None
