"""Gradients of tables whose looked-up rows were added up: every position of an example has the same gradient.

Row r of example i's gradient is ``(sum of factors[i, t] over t with indices[i, t] == r) * gradients[i]``, an outer
product of counts and one vector, so that its squared norm is that of the counts times that of the vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .dense import squared_norms
from .outer import chunks
from .rows import Rows, runs_squared_norms
from .term import Answer, Term, size_class, wide, zero_examples

__all__ = ["Bags"]


@dataclass(eq=False)
class Bags(Term):
    """Bags of rows of a table.

    Attributes:
        gradients: [B, d], at the sums.
        indices: [B, T], the rows each example looked up.
        factors: [B, T], what they were multiplied with; zero where a position does not count.
        shape: of the table, [rows, d].
    """

    gradients: Tensor
    indices: Tensor
    factors: Tensor
    shape: torch.Size

    @property
    def key(self) -> tuple:
        sizes = (self.indices.shape[1], self.shape)
        return ("bags", size_class(self.examples), sizes, self.gradients.dtype, self.gradients.device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.gradients, self.indices, self.factors)

    def rows(self) -> Rows:
        """The same with a gradient for every position."""
        return Rows(self.indices, self.factors.unsqueeze(2) * wide(self.gradients).unsqueeze(1), self.shape)

    def sole_answer(self, keep: bool) -> Answer:
        counts = runs_squared_norms(self.indices, self.factors.unsqueeze(2))
        return Answer(counts * squared_norms(self.gradients))

    def head(self, count: int) -> Bags:
        return Bags(self.gradients[:count], self.indices[:count], self.factors[:count], self.shape)

    def per_example(self) -> Tensor:
        return self.rows().per_example()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        gradients = wide(self.gradients)
        gradients = gradients * weights.to(gradients.dtype).unsqueeze(1)
        total = gradients.new_zeros(self.shape)
        for part in chunks(len(gradients), gradients[:1].nbytes * self.indices.shape[1]):
            spread = self.factors[part].unsqueeze(2) * gradients[part].unsqueeze(1)
            total.index_add_(0, self.indices[part].flatten(), spread.flatten(0, 1))
        return total

    def keep_only(self, keep: Tensor) -> Bags:
        gradients, factors = (zero_examples(tensor, keep) for tensor in (self.gradients, self.factors))
        return Bags(gradients, self.indices, factors, self.shape)

    def regroup(self, count: int, major: str) -> Rows:
        return self.rows().regroup(count, major)
