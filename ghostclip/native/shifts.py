"""Per-example gradients of a convolution's weights without patches, by compiled C: shifts.c.

Its products read the image where it lies, shifted by each of the kernel's taps; outputs are the lanes of its vectors,
and each square is taken while the gradient is in the registers. It takes a third to three quarters of the time of the
fastest of torch's ways where places are many and weights few.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ghostclip.native.build import library
from ghostclip.native.calls import run_examples
from ghostclip.native.custom_ops import traceable

__all__ = ["shifted_products", "shifts_are_there"]

Sizes = tuple[int, ...]


def shifts_are_there(images: Tensor) -> bool:
    """Whether `shifted_products` can be used for images of that kind: in one or two dimensions, on the CPU."""
    return images.device.type == "cpu" and images.dim() in (3, 4) and library("shifts") is not None


def _shapes(images: Tensor, grads: Tensor, kernel: Sizes, *rest: object) -> list[Tensor]:
    shapes = [(len(grads),), (len(grads), grads.shape[1], images.shape[1], *kernel)]
    return [grads.new_empty(shape) for shape in shapes[: 1 + bool(rest[-1])]]


def _dense(images: Tensor) -> tuple[Tensor, bool]:
    """Images without gaps in memory, and whether their channels are its last axis there (channels_last)."""
    last = not images.is_contiguous() and images.movedim(1, -1).is_contiguous()
    return (images if last else images.contiguous()), last


@traceable(
    "shifted_products(Tensor images, Tensor grads, int[] kernel, int[] stride, int[] padding, int[] dilation, "
    "bool keep) -> Tensor[]",
    _shapes,
)
def shifted_products(
    images: Tensor, grads: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, keep: bool
) -> list[Tensor]:
    """Squared norms [B] of the weight's gradients and, where asked, these, [B, P, C, *kernel].

    Args:
        images, grads: float32 or float64, [B, C, *S] and [B, P, *O], gradients at the pre-activation; read as they lie
            where they are contiguous or in channels_last.
        kernel, stride, padding, dilation: of the convolution, one entry a spatial dimension; padding with zeros.
        keep: whether the gradients are to be kept.
    """
    (images, images_last), (grads, grads_last) = _dense(images), _dense(grads)
    found = _shapes(images, grads, kernel, keep)
    sizes = [images.shape[2:], grads.shape[2:], kernel, padding, dilation, stride]
    if len(kernel) == 1:  # a line is a picture of one row, with nothing above and below
        sizes = [(of_row, *of_line) for of_row, of_line in zip((1, 1, 1, 0, 1, 1), sizes, strict=True)]
    channels = images.shape[1], grads.shape[1]
    work = grads.numel() * images.shape[1] * torch.Size(kernel).numel()
    lasts = images_last, grads_last
    arguments = (images, grads, found[0], found[1] if keep else None, *channels, *itertools.chain(*sizes), *lasts)
    run_examples("shifts", "shifts", grads.dtype, len(grads), work, arguments)
    return found
