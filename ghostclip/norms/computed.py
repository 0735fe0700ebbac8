"""Per-example gradients of parameters that a weight is computed from, by the chain rule from the weight's own.

With G_i the gradient of example i at the weight W, a parameter that W is computed from entry by entry (a mask, a sum
with constants) has the gradient factor * G_i. Under weight normalization W = g v / |v|, row by row, with
c = <G_i, v / |v|>,

    dL_i/dg = c    and    dL_i/dv = g / |v| (G_i - c v / |v|)    (Salimans & Kingma 2016, equation 3).

Where G_i is one outer product, as of a linear layer on one position, both have norms that form no G_i.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .outer import OuterProduct, chunks, gram_is_reliable
from .term import Dense, NormResult, PerExampleGrads, Strategy, squared_norms, to_float32

__all__ = ["DirectionGrads", "ScaledOuter", "WeightNorm", "materialised"]


def materialised(term: PerExampleGrads) -> Tensor:
    """`PerExampleGrads.per_example`, the way that a norm would form them."""
    if term.closed_form(False) is None and term.examples:
        for way in term.candidates().values():
            if way.keeps and (kept := way.run(term, True).kept) is not None:
                return kept
    return term.per_example()


@dataclass(eq=False)
class _OfOuter(PerExampleGrads):
    """Gradients that follow linearly from an outer product at the weight.

    Attributes:
        inner: the weight's.
        factor: what the rule multiplies with.
    """

    inner: OuterProduct
    factor: Any

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.inner.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.inner.tensors

    @property
    def examples(self) -> int:
        return self.inner.examples

    def apply(self, gradients: Tensor) -> Tensor:
        """The parameter's gradients [n, *shape] from the weight's [n, *shape]."""
        raise NotImplementedError

    def per_example(self) -> Tensor:
        return self.apply(self.inner.per_example())

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.apply(self.inner.weighted_sum(weights).unsqueeze(0)).squeeze(0)

    def replaced(self, function: Callable[[Tensor], Tensor]) -> Any:
        return replace(self, inner=self.inner.replaced(function))

    def split_rows(self, count: int, row_order: str) -> PerExampleGrads:
        inner = self.inner.split_rows(count, row_order)
        return replace(self, inner=inner) if isinstance(inner, OuterProduct) else Dense(self.apply(inner.per_example()))

    def candidates(self) -> dict[str, Strategy]:
        batch, positions, outputs = self.inner.left.shape
        flops = 2.0 * batch * positions * outputs * self.inner.right.shape[2]
        return {"direct": Strategy("direct", _OfOuter.by_direct, flops, keeps=True)}

    def by_direct(self, keep: bool = False) -> NormResult:
        """From the weight's gradients, formed a chunk of examples at a time; ``keep`` keeps the parameter's."""
        found, squared = [], to_float32(self.inner.left[:0]).new_empty(self.examples)
        for part in chunks(self.examples, 4 * self.shape.numel()):
            gradients = self.pick(part).per_example()
            squared[part] = squared_norms(gradients)
            found += [gradients] if keep else []
        return NormResult(squared, torch.cat(found) if found else None)


class ScaledOuter(_OfOuter):
    """``factor * G_i``, for a factor of the weight's shape."""

    def apply(self, gradients: Tensor) -> Tensor:
        return gradients * self.factor

    def closed_form(self, keep: bool) -> NormResult | None:
        """One position: ``sum_pd left[p]^2 factor[p, d]^2 right[d]^2``."""
        if self.inner.left.shape[1] != 1 or self.inner.groups != 1:
            return None
        left, right = (to_float32(side).squeeze(1).square() for side in self.inner.tensors)
        return NormResult(((right @ self.factor.square().flatten(1).mT) * left).sum(1))

    def absolute(self) -> Tensor | None:
        inner = self.inner.absolute()
        return None if inner is None else inner * self.factor.abs().amax().square()


@dataclass(frozen=True)
class WeightNorm:
    """Weight normalization by rows: W = g v / |v|.

    Attributes:
        v: [p, ...].
        g, norms: [p, 1, ...], as many dimensions.
    """

    v: Tensor
    g: Tensor
    norms: Tensor

    @cached_property
    def unit(self) -> Tensor:
        """v / |v|."""
        return self.v / self.norms

    def of_g(self, gradients: Tensor) -> Tensor:
        """dL_i/dg [n, p, 1, ...] from gradients [n, p, ...] at the weight."""
        along = gradients * self.unit
        return (along if along.dim() == 2 else along.flatten(2).sum(2)).view(-1, *self.g.shape)

    def of_v(self, gradients: Tensor) -> Tensor:
        """dL_i/dv [n, p, ...] from gradients [n, p, ...] at the weight."""
        across = torch.addcmul(gradients, self.of_g(gradients), self.unit, value=-1.0)
        return across.mul_(self.g / self.norms)


class DirectionGrads(_OfOuter):
    """dL_i/dv of a weight normalization, its ``factor`` a `WeightNorm`."""

    def apply(self, gradients: Tensor) -> Tensor:
        return self.factor.of_v(gradients)

    def closed_form(self, keep: bool) -> NormResult | None:
        """One position: ``sum_p left[p]^2 (g[p] / |v[p]|)^2 (|right|^2 - <right, v[p] / |v[p]|>^2)``."""
        if self.inner.left.shape[1] != 1:
            return None
        left, right = (to_float32(side).squeeze(1) for side in self.inner.tensors)
        scaled = left.square() * (self.factor.g / self.factor.norms).flatten().square()
        whole = squared_norms(right).unsqueeze(1)
        across = whole - (right @ self.factor.unit.flatten(1).mT).square()
        squared, scale = (scaled * across).sum(1), scaled.sum(1) * whole.squeeze(1)
        lost = ~gram_is_reliable(squared, scale)
        if bool(lost.any()):
            rows = lost.nonzero().flatten()
            squared[rows] = self.pick(rows).by_direct().squared_norms
        return NormResult(squared, absolute=4 * scale)
