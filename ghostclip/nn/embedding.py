"""Embeddings: the gradient of example i adds dz[i,t] to row index[i,t] of the table, for positions that count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ghostclip.norms.rows import LookupGrads
from ghostclip.norms.term import PerExampleGrads

from .base import GhostLayer, LayerCall

__all__ = ["Embedding", "Table"]


class Table(GhostLayer):
    """What layers that look up rows of one weight have in common."""

    checked_when_frozen = True
    reads_indices = True

    @classmethod
    def parameter_names(cls, module: torch.nn.Module) -> tuple[str, ...]:
        return ("weight",)

    @classmethod
    def obstacles(cls, module: Any) -> list[tuple[str, str]]:
        found = []
        if module.max_norm is not None:  # a frozen table is rescaled too
            found.append(
                ("max_norm rescales rows by what the batch looked up, outside any gradient", "set max_norm=None")
            )
        if not module.weight.requires_grad:
            return found
        if module.scale_grad_by_freq:
            problem = "scale_grad_by_freq divides by counts over the whole batch, which mixes examples"
            found.append((problem, "set scale_grad_by_freq=False"))
        if module.sparse:
            problem = (
                "sparse=True makes sparse gradients, which can't hold noise: every row gets some, looked up or not"
            )
            found.append((problem, "set sparse=False, and use an optimizer for dense gradients"))
        return found


class Embedding(Table, torch.nn.Embedding, wraps=torch.nn.Embedding):
    """`torch.nn.Embedding` that can be clipped; repeated indices add up, ``padding_idx`` gets no gradient."""

    def forward(self, input: Tensor) -> Tensor:
        return self.capture(super().forward(input), input)

    def example_dims(self, call: LayerCall) -> Sequence[int]:
        return range(len(call.shape) - 1)

    def per_example(self, name: str, call: LayerCall, inputs: tuple[Tensor, ...], grad: Tensor) -> PerExampleGrads:
        indices = inputs[0].movedim(call.batch_dim, 0).long()
        grad = grad.movedim(call.batch_dim, 0)
        if self.padding_idx is not None:
            grad = torch.where((indices == self.padding_idx).unsqueeze(-1), grad.new_zeros(()), grad)
        positions = indices.unsqueeze(1) if indices.dim() == 1 else indices.flatten(1)
        return LookupGrads(positions, grad.reshape(*positions.shape, grad.shape[-1]), self.weight.shape)
