"""Embeddings: the gradient of example i adds dz[i,t] to row index[i,t] of the table, for positions that count."""

from __future__ import annotations

import torch
from torch import Tensor

from ghostclip.norms.rows import Rows
from ghostclip.norms.term import Term

from .base import Call, GhostLayer

__all__ = ["Embedding"]


class Embedding(GhostLayer, torch.nn.Embedding, wraps=torch.nn.Embedding):
    """`torch.nn.Embedding` that can be clipped; repeated indices add up, ``padding_idx`` gets no gradient."""

    def forward(self, input: Tensor) -> Tensor:
        return self.capture(super().forward(input), input, parameters=("weight",))

    def per_example(self, name: str, call: Call, inputs: tuple[Tensor, ...], grad: Tensor) -> Term:
        indices = inputs[0].movedim(call.batch_dim, 0)
        grad = grad.movedim(call.batch_dim, 0)
        if self.padding_idx is not None:
            grad = torch.where((indices == self.padding_idx).unsqueeze(-1), grad.new_zeros(()), grad)
        positions = indices.unsqueeze(1) if indices.dim() == 1 else indices.flatten(1)
        return Rows(positions, grad.reshape(*positions.shape, grad.shape[-1]), self.weight.shape)

    @classmethod
    def obstacles(cls, module: torch.nn.Module) -> list[tuple[str, str]]:
        assert isinstance(module, torch.nn.Embedding)
        found = []
        if module.max_norm is not None:
            found.append(
                ("max_norm rescales rows by what the batch looked up, outside any gradient", "set max_norm=None")
            )
        if module.scale_grad_by_freq:
            found.append(
                (
                    "scale_grad_by_freq divides by counts over the whole batch, which mixes examples",
                    "set it to False",
                )
            )
        if module.sparse:
            found.append(("sparse=True makes sparse gradients, which can't hold noise", "set sparse=False"))
        return found
