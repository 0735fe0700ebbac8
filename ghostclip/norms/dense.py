"""Per-example gradients small enough to stand there as they are: biases, scales, anything a plain rule returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ghostclip.native.custom_ops import is_traced

from .term import NormResult, PerExampleGrads, split_examples, to_float32, zero_examples

__all__ = ["Dense", "squared_norms"]

# A norm in float32 loses 1e-6 of itself for about so many numbers, and more in proportion (2.5 million: 4e-4).
LONG = 8192
# MKL's inner products of rows from so many numbers on take half the time on one thread (measured: in the cache), and
# lose 2e-7 where so many are added up.
INNER_LEAST, INNER_MOST = 1 << 16, 1 << 18


def squared_norms(gradients: Tensor) -> Tensor:
    """Squared L2 norms of the rows of ``gradients`` [B, ...]; returns [B] in float32 or wider."""
    gradients = to_float32(gradients)
    dims = gradients.dim()
    if dims == 1:
        return gradients.square()
    if gradients.numel() == 0:
        return gradients.new_zeros(gradients.shape[0])
    flat = gradients if dims == 2 else gradients.flatten(1)
    if flat.shape[1] >= INNER_LEAST and _inner_products_are_best(flat):
        return _inner_products(flat)
    norms = _row_norms(flat)
    return norms.mul_(norms)


def _inner_products_are_best(flat: Tensor) -> bool:
    # Of numbers that don't lie side by side MKL adds up one after another.
    if flat.device.type != "cpu" or flat.is_complex() or flat.stride(1) != 1:
        return False
    return torch.get_num_threads() == 1 and torch.backends.mkl.is_available() and not is_traced()


def _inner_products(flat: Tensor) -> Tensor:
    """Inner products [B] of the rows of ``flat`` [B, n] with themselves."""
    if flat.shape[1] <= INNER_MOST:
        return torch.stack([torch.dot(row, row) for row in flat.unbind()])
    return torch.stack([_inner_products(part) for part in flat.split(INNER_MOST, dim=1)]).sum(0)


def _row_norms(flat: Tensor) -> Tensor:
    """Norms [B] of the rows of ``flat`` [B, n]; long rows by parts, since torch adds up one number after another."""
    whole = flat.shape[1] - flat.shape[1] % LONG
    if whole <= LONG:
        return torch.linalg.vector_norm(flat, dim=1)
    parts = torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (-1, LONG)), dim=2)
    if whole < flat.shape[1]:
        rest = torch.linalg.vector_norm(flat[:, whole:], dim=1, keepdim=True)
        parts = torch.cat([parts, rest], dim=1)
    return _row_norms(parts)


@dataclass(eq=False)
class Dense(PerExampleGrads):
    """The gradients, materialised.

    Attributes:
        gradients: [B, *shape].
        added_up: where their sum will be made of parts again, what `absolute` says of these, [B].
    """

    gradients: Tensor
    added_up: Tensor | None = None

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.gradients.shape[1:]

    @property
    def key(self) -> tuple:
        return ("dense", tuple(self.gradients.shape[1:]), self.gradients.dtype, self.gradients.device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.gradients,)

    def closed_form(self, keep: bool) -> NormResult:
        return NormResult(squared_norms(self.gradients))

    def absolute(self) -> Tensor | None:
        return self.added_up

    def per_example(self) -> Tensor:
        return to_float32(self.gradients)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        gradients = to_float32(self.gradients)
        if gradients.dim() == 2:
            return torch.mv(gradients.t(), weights.to(gradients.dtype))
        if gradients.dim() == 3 and not gradients.is_contiguous() and gradients.mT.is_contiguous():
            return Dense(gradients.mT).weighted_sum(weights).mT.contiguous()
        return (weights.to(gradients.dtype) @ gradients.unsqueeze(-1).flatten(1)).view(self.shape)

    def head(self, count: int) -> Dense:
        return Dense(self.gradients[:count])

    def keep_only(self, keep: Tensor) -> Dense:
        return Dense(zero_examples(self.gradients, keep))

    def split_rows(self, count: int, row_order: str) -> Dense:
        return Dense(split_examples(to_float32(self.gradients), count, row_order).sum(1))
