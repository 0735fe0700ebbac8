"""Gradients that fall on a few rows of a table: embeddings. No one-hot is ever built.

The gradient of example i is a table whose row r is the sum of ``gradients[i, t]`` over the positions t with
``indices[i, t] == r``. Its squared norm sorts each example's indices and sums runs of equal ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .dense import squared_norms
from .term import Answer, Term, split_examples, wide, zero_examples

__all__ = ["Rows", "runs_squared_norms"]


def runs_squared_norms(indices: Tensor, gradients: Tensor) -> Tensor:
    """Squared norms [B] of scattered rows, for indices [B, T] and gradients [B, T, d], in O(B T d)."""
    batch, positions = indices.shape
    if positions == 1 or batch == 0:
        return squared_norms(gradients)
    ordered, order = indices.sort(dim=1)
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    run = starts.flatten().cumsum(0) - 1
    offsets = torch.arange(batch, device=order.device).unsqueeze(1) * positions
    slot = torch.empty_like(run).scatter_(0, (order + offsets).flatten(), run)
    sums = torch.zeros_like(gradients.flatten(0, 1)).index_add_(0, slot, gradients.flatten(0, 1))
    # Runs are numbered over the whole batch: each belongs to the example its first position belongs to.
    owner = torch.zeros_like(run).scatter_(0, run, torch.arange(batch, device=run.device).repeat_interleave(positions))
    return sums.new_zeros(batch).index_add_(0, owner, squared_norms(sums))


@dataclass(eq=False)
class Rows(Term):
    """Rows of gradients and where they fall.

    Attributes:
        indices: [B, T], the row each gradient belongs to.
        gradients: [B, T, d]; zero where a position does not count (padding).
        shape: of the table, [rows, d].
    """

    indices: Tensor
    gradients: Tensor
    shape: torch.Size

    @property
    def key(self) -> tuple:
        return ("rows", tuple(self.gradients.shape[1:]), self.gradients.dtype, self.gradients.device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.gradients, self.indices)

    def sole_answer(self, keep: bool) -> Answer:
        return Answer(runs_squared_norms(self.indices, wide(self.gradients)))

    def per_example(self) -> Tensor:
        gradients = wide(self.gradients)
        table = gradients.new_zeros(self.indices.shape[0], *self.shape)
        return table.scatter_add_(1, self.indices.unsqueeze(2).expand_as(gradients), gradients)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        gradients = wide(self.gradients)
        gradients = gradients * weights.to(gradients.dtype).view(-1, 1, 1)
        return gradients.new_zeros(self.shape).index_add_(0, self.indices.flatten(), gradients.flatten(0, 1))

    def keep_only(self, keep: Tensor) -> Rows:
        return Rows(self.indices, zero_examples(self.gradients, keep), self.shape)

    def regroup(self, count: int, major: str) -> Rows:
        indices, gradients = (split_examples(t, count, major).flatten(1, 2) for t in (self.indices, self.gradients))
        return Rows(indices, gradients, self.shape)
