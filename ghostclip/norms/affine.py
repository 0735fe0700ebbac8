"""Weight and bias of a linear layer that saw one position an example: both answers from one read of the gradient.

With dz [B, p] and x [B, d], dL_i/dW = dz[i] (x) x[i] and dL_i/db = dz[i], so that ||dL_i/dW|| = ||dz[i]|| ||x[i]||
(Goodfellow 2015), and clipped sums of both are made of the same scaled dz.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .reduce import Parts, hidden
from .term import squared_norms, summed_products, to_float32, zero_examples

__all__ = ["LinearPair"]


@dataclass(eq=False, slots=True)
class LinearPair:
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

    def squared_norms(self) -> list[tuple[Tensor, Parts]]:
        """[B] for each name, in float32 or wider, and the parts of `PerExampleGrads.absolute`."""
        left, found = squared_norms(self.left), list[tuple[Tensor, Parts]]()
        for name in self.names:
            if name == "bias":
                found.append((left, ()))
            else:
                right, unit = squared_norms(self.right), hidden(left.dtype)
                parts = (left, self.right.shape[1] * unit), (right, self.left.shape[1] * unit)
                found.append((left * right, parts))
        return found

    def weighted_sums(self, weights: Tensor) -> list[Tensor]:
        """``sum_i weights[i] * gradient[i]`` for each name, for weights [B]."""
        right = to_float32(self.right)
        scaled = self.left * weights.to(right.dtype).unsqueeze(1)
        return [scaled.sum(0) if name == "bias" else summed_products(scaled, right) for name in self.names]

    def keep_only(self, keep: Tensor) -> LinearPair:
        """The same with zeros for examples where ``keep`` [B] is False."""
        return LinearPair(zero_examples(self.left, keep), zero_examples(self.right, keep), self.names)
