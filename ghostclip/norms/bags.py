"""Gradients of tables whose looked-up rows were added up: every position of an example has the same gradient.

Row r of example i's gradient is ``(sum of factors[i, t] over t with indices[i, t] == r) * gradients[i]``, an outer
product of counts and one vector, so that its squared norm is that of the counts times that of the vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ghostclip.native.custom_ops import is_traced
from ghostclip.native.rows import chained_squared_norms, chains_are_there

from .outer import chunks
from .rounding import product_of_sizes
from .rows import LookupGrads, runs_squared_norms
from .term import NormResult, PerExampleGrads, size_class, squared_norms, to_float32, zero_examples

__all__ = ["BagGrads"]


@dataclass(eq=False)
class BagGrads(PerExampleGrads):
    """Bags of rows of a table.

    Attributes:
        gradients: [B, d], at the sums.
        indices: [B, T], the rows each example looked up.
        factors: [B, T], what they were multiplied with, zero where a position does not count; None for ones.
        shape: of the table, [rows, d].
    """

    gradients: Tensor
    indices: Tensor
    factors: Tensor | None
    shape: torch.Size

    @property
    def key(self) -> tuple:
        sizes = (self.indices.shape[1], self.shape)
        return ("bags", size_class(self.examples), sizes, self.gradients.dtype, self.gradients.device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.gradients, self.indices, *([] if self.factors is None else [self.factors]))

    def rows(self, part: slice = slice(None)) -> LookupGrads:
        """Those of some examples with a gradient for every position."""
        indices, gradients = self.indices[part], to_float32(self.gradients[part]).unsqueeze(1)
        if self.factors is None:
            return LookupGrads(indices, gradients.expand(-1, indices.shape[1], -1), self.shape)
        return LookupGrads(indices, self.factors[part].unsqueeze(2) * gradients, self.shape)

    def closed_form(self, keep: bool) -> NormResult:
        gradients, factors = to_float32(self.gradients), self.factors
        if factors is None:
            factors = gradients.new_ones(()).expand(self.indices.shape)
        each = factors.unsqueeze(2)
        compiled = chains_are_there(self.indices, each) and not is_traced()
        counts = chained_squared_norms(self.indices, each)[0] if compiled else runs_squared_norms(self.indices, each)
        return NormResult(counts * squared_norms(gradients))

    def head(self, count: int) -> BagGrads:
        factors = None if self.factors is None else self.factors[:count]
        return BagGrads(self.gradients[:count], self.indices[:count], factors, self.shape)

    def absolute(self) -> Tensor | None:
        if self.factors is None:
            return None
        return product_of_sizes(self.gradients, self.factors) * self.indices.shape[1]

    def per_example(self) -> Tensor:
        return self.rows().per_example()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = to_float32(self.gradients).new_zeros(self.shape)
        for part in chunks(self.examples, total[:1].nbytes * self.indices.shape[1]):
            self.rows(part).add_weighted(total, weights[part])
        return total

    def keep_only(self, keep: Tensor) -> BagGrads:
        factors = None if self.factors is None else zero_examples(self.factors, keep)
        return BagGrads(zero_examples(self.gradients, keep), self.indices, factors, self.shape)

    def split_rows(self, count: int, row_order: str) -> LookupGrads:
        return self.rows().split_rows(count, row_order)
