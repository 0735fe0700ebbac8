"""Bags of embeddings: each row that bag i looked up gets dz[i], times its weight, by its share of a mean, or by maxima.

A bag is an example: the rows of 2-D indices [B, T], or what 1-D indices hold between two offsets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ghostclip.errors import UnsupportedModelError
from ghostclip.norms.rows import BagGrads, LookupGrads
from ghostclip.norms.term import PerExampleGrads, to_float32

from .base import LayerCall, is_capturing, place_of
from .embedding import Table

__all__ = ["EmbeddingBag"]


class EmbeddingBag(Table, torch.nn.EmbeddingBag, wraps=torch.nn.EmbeddingBag):
    """`torch.nn.EmbeddingBag` that can be clipped; sum, mean and max, indices [B, T] or bags between offsets."""

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        if not is_capturing() or not self.weight.requires_grad:
            return super().forward(input, offsets, per_sample_weights)
        if input.is_nested:
            raise UnsupportedModelError(
                f"{place_of(self)} got nested indices, which have no gradient rule; "
                "give it indices.values() and indices.offsets() with include_last_offset=True"
            )
        well_formed = input.dim() == 2 if offsets is None else input.dim() == offsets.dim() == 1
        if self.mode == "max" and well_formed and per_sample_weights is None and not self.obstacles(self):
            return self._maxima(input, offsets)
        looked_up = (input,) if offsets is None else (input, offsets)
        weighed = () if per_sample_weights is None else (per_sample_weights,)
        output = super().forward(input, offsets, per_sample_weights)
        return self.capture(output, *looked_up, *weighed, batch_dim=0, extra=offsets is not None)

    def new_call(
        self, preactivation: Tensor, inputs: tuple[Tensor, ...], *args: Any, **options: Any
    ) -> LayerCall | None:
        """As ever; bags between offsets are told to the call."""
        call = super().new_call(preactivation, inputs, *args, **options)
        if call is not None and call.extra:
            call.lengths = (inputs[1],)
        return call

    def _maxima(self, input: Tensor, offsets: Tensor | None) -> Tensor:
        """The forward of mode "max", by the same kernel; asked by itself, it says which rows had the maxima."""
        last = self.include_last_offset and offsets is not None
        if offsets is None:
            starts = torch.arange(input.shape[0], dtype=input.dtype, device=input.device) * input.shape[1]
        else:
            starts = offsets
        output, _, sizes, rows = torch.embedding_bag(
            self.weight, input.reshape(-1), starts, False, 2, False, None, last, self.padding_idx
        )
        return self.capture(output, rows, sizes, batch_dim=0)

    def per_example(self, name: str, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        if self.mode == "max":
            return _rows_of_maxima(inputs[0], inputs[1], grad, self.weight.shape)
        indices, *rest = inputs
        weights = rest.pop() if len(rest) > call.extra else None
        present = None
        if call.extra:
            positions, present = _positions(rest[0], len(indices), self.include_last_offset)
            indices = indices[positions]
            weights = None if weights is None else weights[positions]
        if self.padding_idx is not None:
            counting = indices != self.padding_idx
            present = counting if present is None else present & counting
        grad = to_float32(grad)
        if self.mode == "mean":
            count = indices.shape[1] if present is None else present.sum(1, keepdim=True).clamp(min=1)
            grad = grad / count
        factors = None if weights is None else to_float32(weights)
        if present is not None:
            factors = present.to(grad.dtype) if factors is None else torch.where(present, factors, 0.0)
        return BagGrads(grad, indices.long(), factors, self.weight.shape)


def _positions(offsets: Tensor, total: int, include_last: bool) -> tuple[Tensor, Tensor]:
    """Where each bag's indices are, [B, longest], and whether there is one; offsets as torch takes them."""
    offsets = offsets.long()
    starts = offsets[:-1] if include_last else offsets
    ends = offsets[1:] if include_last else torch.cat([offsets[1:], offsets.new_tensor([total])])
    lengths = ends - starts
    longest = int(lengths.max()) if len(lengths) else 0
    steps = torch.arange(longest, device=offsets.device)
    present = steps < lengths.unsqueeze(1)
    return torch.where(present, starts.unsqueeze(1) + steps, 0), present


def _rows_of_maxima(rows: Tensor, sizes: Tensor, grad: Tensor, shape: torch.Size) -> LookupGrads:
    """The term of maxima: entry (rows[i, j], j) of the table gets grad[i, j], unless the bag was empty."""
    entries = rows.long().clamp(min=0) * shape[1] + torch.arange(shape[1], device=rows.device)
    values = torch.where((sizes > 0).unsqueeze(1), grad, grad.new_zeros(()))
    return LookupGrads(entries, values.unsqueeze(2), shape)
