"""Per-example gradients of a convolution's weights without patches, by compiled C: native/shifts.c.

Its products read the image where it lies, shifted by each of the kernel's taps; outputs are the lanes of its vectors,
and each square is taken while the gradient is in the registers. It takes a third to three quarters of the time of the
fastest of torch's ways where places are many and weights few.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ghostclip.native import library
from ghostclip.native.calls import run_examples

from .half_windows import in_plane
from .memory import FRESH, Memory
from .term import is_traced

__all__ = ["shifted_products", "shifts_are_there"]


def shifts_are_there(images: Tensor) -> bool:
    """Whether `shifted_products` can be used for images of that kind: in one or two dimensions, on the CPU."""
    return images.device.type == "cpu" and images.dim() in (3, 4) and library("shifts") is not None


def shifted_products(
    images: Tensor,
    grads: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    keep: bool,
    memory: Memory = FRESH,
) -> tuple[Tensor, Tensor | None]:
    """Squared norms [B] of the weight's gradients and, where asked, these, [B, P, C, *kernel].

    Args:
        images, grads: float32 or float64, [B, C, *S] and [B, P, *O], gradients at the pre-activation.
        kernel, stride, padding, dilation: of the convolution, one entry a spatial dimension; padding with zeros.
        keep: whether the gradients are to be kept.
        memory: lends their room.
    """
    if is_traced():
        from . import written

        squared, *formed = written.shifted_products(images, grads, [*kernel], [*stride], [*padding], [*dilation], keep)
        return squared, formed[0] if keep else None
    images, grads = images.contiguous(), grads.contiguous()
    axes = [in_plane(sizes) for sizes in (images.shape[2:], grads.shape[2:], kernel)]
    steps = [in_plane(padding, 0), in_plane(dilation), in_plane(stride)]
    batch = grads.shape[0]
    squared = grads.new_empty(batch)
    kept = memory.to_keep(grads, batch, grads.shape[1], images.shape[1], *kernel) if keep else None
    sizes = (images.shape[1], grads.shape[1], *(size for axis in (*axes, *steps) for size in axis))
    work = grads.numel() * images.shape[1] * torch.Size(kernel).numel()
    run_examples("shifts", "shifts", grads.dtype, batch, work, (images, grads, squared, kept, *sizes))
    return squared, kept
