"""Per-example gradients of a parameter that a matrix W is computed from, where those at W are outer products.

With G_i the gradient of example i at W [p, d], the chain rule of the common parametrizations is

    g_i = factor * (G_i - <G_i, along> * back),

with the inner product over each row of W, or over all of it. A mask, or another function of single entries, has a
factor alone. Weight normalization by rows, W = g v / |v|, has factor = g / |v| and along = back = v / |v| (Salimans &
Kingma 2016, equation 3). W = v / s(v) for one number s, as of spectral normalization, has factor = 1 / s, along = W and
back = the gradient of s (Miyato et al. 2018, equation 10). Of one position the norms need no G_i.

One row v = [3, 4] has W = v / |v| = [0.6, 0.8]. With G = [1, 0], <G, W> is 0.6, and g = (G - 0.6 W) / 5 is
[0.128, -0.096].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .outer import OuterProduct, chunks, gram_is_reliable, reliable
from .reduce import hidden
from .term import Dense, NormResult, PerExampleGrads, Strategy, squared_norms, to_float32

__all__ = ["ComputedGrads"]


@dataclass(eq=False)
class ComputedGrads(PerExampleGrads):
    """``factor * (G_i - <G_i, along> * back)``, as the module's docstring has it.

    Attributes:
        inner: the gradients G_i at the matrix, in one group.
        factor: [p, 1] or [1, 1]; [p, d] where it is alone.
        along, back: [p, d]; None where there is a factor alone.
        by_row: whether the inner product is over each row, or over the matrix.
    """

    inner: OuterProduct
    factor: Tensor
    along: Tensor | None = None
    back: Tensor | None = None
    by_row: bool = False

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.inner.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.inner.tensors

    @cached_property
    def products(self) -> Tensor:
        """Inner products [B, p] of the rows of each G_i with those of ``along``."""
        assert self.along is not None
        return self._row_products(self.along)

    def _row_products(self, along: Tensor) -> Tensor:
        left, right = (to_float32(side) for side in self.inner.tensors)
        return (right @ along.mT).mul_(left).sum(1)

    def _apply(self, gradients: Tensor) -> Tensor:
        """The parameter's gradients [n, p, d] from the matrix's, in place."""
        if self.along is not None and self.back is not None:
            products = (gradients * self.along).sum(2 if self.by_row else (1, 2), keepdim=True)
            gradients.addcmul_(products, self.back, value=-1.0)
        return gradients.mul_(self.factor)

    def per_example(self) -> Tensor:
        return self._apply(self.inner.per_example())

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self._apply(self.inner.weighted_sum(weights).unsqueeze(0)).squeeze(0)

    def replaced(self, function: Callable[[Tensor], Tensor]) -> ComputedGrads:
        return replace(self, inner=self.inner.replaced(function))

    def split_rows(self, count: int, row_order: str) -> PerExampleGrads:
        return Dense(self.per_example()).split_rows(count, row_order)

    def closed_form(self, keep: bool) -> NormResult | None:
        """One position: ``sum_p factor[p]^2 (|G[p]|^2 - 2 c <G[p], back[p]> + c^2 |back[p]|^2)``, c = <G, along>."""
        if self.inner.left.shape[1] != 1:
            return None
        left, right = (to_float32(side).squeeze(1).square() for side in self.inner.tensors)
        factor = self.factor.square()
        sizes = left.sum(1), right.sum(1)
        lost = ((sizes[0] + sizes[1]) * factor.sum() + sizes[0] * sizes[1]) * hidden(left.dtype)
        if self.along is None or self.back is None:
            return NormResult((left * (right @ factor.mT)).sum(1), absolute=lost)
        back = self.products if self.back is self.along else self._row_products(self.back)
        along = self.products if self.by_row else self.products.sum(1, keepdim=True)
        factor = factor.flatten().expand(len(self.back))
        taken = along.square() * self.back.square().sum(1)
        whole = (left @ factor) * right.sum(1)
        squared, scale = whole + (taken - 2 * along * back) @ factor, whole + taken @ factor
        return NormResult(
            reliable(squared, scale, lambda: self._measured_again(squared, scale)), absolute=4 * scale + lost
        )

    def _measured_again(self, squared: Tensor, scale: Tensor) -> Tensor:
        """``squared`` [B] with what lost its digits measured directly."""
        lost = (~gram_is_reliable(squared, scale)).nonzero().flatten()
        return squared.index_copy(0, lost, self.pick(lost).exact_squared_norms())

    def exact_squared_norms(self) -> Tensor:
        return self._by_direct().squared_norms

    def candidates(self) -> dict[str, Strategy]:
        flops = 2.0 * self.inner.left.numel() * self.inner.right.shape[2]
        return {"direct": Strategy("direct", ComputedGrads._by_direct, flops, keeps=True)}

    def _by_direct(self, keep: bool = False) -> NormResult:
        """From gradients formed a chunk of examples at a time."""
        kept, squared = [], to_float32(self.inner.left[:0]).new_empty(self.examples)
        for part in chunks(self.examples, 4 * self.shape.numel()):
            gradients = self.pick(part).per_example()
            squared[part] = squared_norms(gradients)
            kept += [gradients] if keep else []
        return NormResult(squared, torch.cat(kept) if kept else None)

    def absolute(self) -> Tensor:
        growth = self.factor.abs().amax()
        if self.along is not None and self.back is not None:
            dims = (1,) if self.by_row else (0, 1)
            growth = growth * (1 + (self.along.norm(dim=dims) * self.back.norm(dim=dims)).amax())
        return self.inner.squared_sizes() * growth.square()
