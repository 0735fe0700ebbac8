"""Weight and bias of a linear layer that saw one position an example: both answers from one read of the gradient.

With dz [B, p] and x [B, d], dL_i/dW = dz[i] (x) x[i] and dL_i/db = dz[i], so that ||dL_i/dW|| = ||dz[i]|| ||x[i]||
(Goodfellow 2015), and clipped sums of both are made of the same scaled dz.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .dense import squared_norms
from .term import wide, zero_examples

__all__ = ["Affine"]


@dataclass(eq=False)
class Affine:
    """The per-example gradients of a linear layer's parameters, not multiplied out.

    Attributes:
        left: [B, p], gradients at the pre-activation.
        right: [B, d], inputs.
        names: which of "weight" and "bias" are asked for.
    """

    left: Tensor
    right: Tensor
    names: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the two tensors."""
        return self.left.nbytes + self.right.nbytes

    def squared_norms(self) -> dict[str, Tensor]:
        """{name: [B]}, in float32 or wider."""
        left = squared_norms(self.left)
        return {name: left if name == "bias" else left * squared_norms(self.right) for name in self.names}

    def weighted_sums(self, weights: Tensor) -> dict[str, Tensor]:
        """{name: sum_i weights[i] * gradient[i]} for weights [B]."""
        scaled = wide(self.left) * weights.to(wide(self.left).dtype).unsqueeze(1)
        return {
            name: torch.sum(scaled, 0) if name == "bias" else torch.mm(scaled.t(), wide(self.right))
            for name in self.names
        }

    def keep_only(self, keep: Tensor) -> Affine:
        """The same with zeros for examples where ``keep`` [B] is False."""
        return Affine(zero_examples(self.left, keep), zero_examples(self.right, keep), self.names)
