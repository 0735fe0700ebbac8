"""Centre: inputs minus a fixed mean, which is public: a buffer, with no parameter and no gradient of its own."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Centre"]


class Centre(torch.nn.Module):
    """Subtracts a mean that was released before training, such as that of `ghostclip.private_mean`.

    Inputs [..., *mean.shape] to the same shape. The mean is a buffer: it moves with the model and is saved with it,
    so it must be public.

    Args:
        mean: floating point, of any shape that the inputs end with. It is copied.

    Raises:
        TypeError, ValueError: ``mean`` is no floating-point tensor, or not finite.
    """

    mean: Tensor

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        if not isinstance(mean, Tensor) or not mean.is_floating_point():
            raise TypeError(f"mean must be a floating-point tensor, such as private_mean(...).mean; got {mean!r}")
        if not mean.isfinite().all():
            raise ValueError("mean must be finite; got entries that are not")
        self.register_buffer("mean", mean.detach().clone())

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[input.dim() - self.mean.dim() :] != self.mean.shape:
            raise ValueError(f"inputs must end with the mean's shape {list(self.mean.shape)}; got {list(input.shape)}")
        return input - self.mean

    def extra_repr(self) -> str:
        """The mean's shape, for ``print(model)``."""
        return f"shape={tuple(self.mean.shape)}"
