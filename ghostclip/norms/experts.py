"""Products of rows with the matrices of experts, of which each row meets one.

The parameter is [E, p, d], and row r of expert e_r belongs to example i_r. The gradient of example i is, for each
expert, the sum of outer products over its rows there,

    g_i[e] = sum over rows r with e_r == e and i_r == i of left_r (x) right_r.

An example's rows at one expert are a ragged example of their own (`ghostclip.norms.ragged`); the squared norm of its
gradient is the sum over experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .outer import OuterProduct
from .ragged import Ragged, RowIndex
from .term import Dense, NormResult, PerExampleGrads, to_float32, zero_examples

__all__ = ["ExpertProducts"]


@dataclass(eq=False)
class ExpertProducts(PerExampleGrads):
    """The gradients of experts' matrices.

    Attributes:
        left: [R, p], gradients at the products, expert after expert.
        right: [R, d], what was multiplied.
        experts: (expert, how many rows), in the order of the rows; their numbers add up to R.
        rows: whose rows they are.
        shape: [E, p, d].
    """

    TENSORS = ("left", "right")
    left: Tensor
    right: Tensor
    experts: Sequence[tuple[int, int]]
    rows: RowIndex
    shape: torch.Size

    @property
    def examples(self) -> int:
        return self.rows.examples

    @functools.cached_property
    def _pairs(self) -> tuple[Tensor, Ragged]:
        """The pairs of an expert and an example that have rows, as expert * B + example [n], and their gradients."""
        numbers, counts = torch.tensor(self.experts, device=self.left.device).view(-1, 2).unbind(1)
        pairs = numbers.repeat_interleave(counts) * self.examples + self.rows.index
        pairs, index = pairs.unique(return_inverse=True)
        product = OuterProduct(self.left.unsqueeze(1), self.right.unsqueeze(1), self.shape[1:])
        return pairs, Ragged([(product, RowIndex(index, len(pairs)))], len(pairs))

    def _sums(self, answer: Callable[[Ragged], Tensor]) -> Tensor:
        """[B] of what ``answer`` gives for each pair."""
        pairs, gradients = self._pairs
        found = answer(gradients)
        return found.new_zeros(self.examples, *found.shape[1:]).index_add_(0, pairs % self.examples, found)

    def closed_form(self, keep: bool) -> NormResult:
        squared, absolute = self._sums(Ragged.squared_and_absolute).unbind(1)
        return NormResult(squared, absolute=absolute)

    def exact_squared_norms(self) -> Tensor:
        return self._sums(Ragged.exact_squared_norms)

    def absolute(self) -> Tensor:
        return self._sums(Ragged.absolute)

    def per_example(self) -> Tensor:
        pairs, gradients = self._pairs
        found = to_float32(self.left[:0]).new_zeros(self.examples, *self.shape)
        found[pairs % self.examples, pairs // self.examples] = gradients.per_example()
        return found

    def weighted_sum(self, weights: Tensor) -> Tensor:
        left, right = to_float32(self.left), to_float32(self.right)
        scale = weights.to(left.dtype)[self.rows.index].unsqueeze(1)
        left, right = (left * scale, right) if left.shape[1] <= right.shape[1] else (left, right * scale)
        found = left.new_zeros(self.shape)
        counts = [count for _, count in self.experts]
        for (expert, _), own, inputs in zip(self.experts, left.split(counts), right.split(counts), strict=True):
            found[expert].addmm_(own.mT, inputs)
        return found

    def keep_only(self, keep: Tensor) -> ExpertProducts:
        return self.keep_rows(keep[self.rows.index])

    def keep_rows(self, keep: Tensor) -> ExpertProducts:
        """The same with zeros in rows where ``keep`` [R] is False."""
        left, right = zero_examples(self.left, keep), zero_examples(self.right, keep)
        return ExpertProducts(left, right, self.experts, self.rows, self.shape)

    def pick(self, rows: Tensor | slice, there: Tensor | None = None) -> PerExampleGrads:  # type: ignore[override]
        return Dense(self.per_example()).pick(rows, there)

    def split_rows(self, count: int, row_order: str) -> PerExampleGrads:
        return Dense(self.per_example()).split_rows(count, row_order)
