"""Per-example gradients of parameters that a weight is computed from, by the chain rule from the weight's own.

With G_i the gradient of example i at the weight W, a parameter that W is computed from entry by entry (a mask, a sum
with constants) has the gradient factor * G_i. Under weight normalization W = g v / |v|, row by row, with
c = <G_i, v / |v|>,

    dL_i/dg = c    and    dL_i/dv = g / |v| (G_i - c v / |v|)    (Salimans & Kingma 2016, equation 3).

Where W = v / s(v) for one number s, as under spectral normalization, with D the gradient of s,

    dL_i/dv = (G_i - <G_i, W> D) / s    (Miyato et al. 2018, equation 10).

Where G_i is one outer product, as of a linear layer on one position, all of them have norms that form no G_i.
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

__all__ = ["DirectionGrads", "Quotient", "QuotientGrads", "ScaledOuter", "WeightNorm", "materialised"]


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

    def measured_again(self, squared: Tensor, scale: Tensor) -> NormResult:
        """``squared`` [B] of a difference of terms of the size ``scale`` [B]; directly where its digits cancelled."""
        lost = ~gram_is_reliable(squared, scale)
        if bool(lost.any()):
            rows = lost.nonzero().flatten()
            squared[rows] = self.pick(rows).by_direct().squared_norms
        return NormResult(squared, absolute=4 * scale)


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


@dataclass(eq=False)
class DirectionGrads(_OfOuter):
    """dL_i/dv of a weight normalization, its ``factor`` a `WeightNorm`.

    Attributes:
        of_g: dL_i/dg [B, p] where G_i is one outer product and that is known; else None.
    """

    of_g: Tensor | None = None

    @classmethod
    def of_one_position(cls, inner: OuterProduct, norm: WeightNorm) -> DirectionGrads:
        """With `of_g`, for one outer product an example."""
        left, right = (to_float32(side).squeeze(1) for side in inner.tensors)
        along = right @ norm.v.flatten(1).mT.to(right.dtype)
        return cls(inner, norm, along.mul_(left).div_(norm.norms.flatten()))

    def replaced(self, function: Callable[[Tensor], Tensor]) -> DirectionGrads:
        of_g = None if self.of_g is None else function(self.of_g)
        return replace(self, inner=self.inner.replaced(function), of_g=of_g)

    def split_rows(self, count: int, row_order: str) -> PerExampleGrads:
        return _OfOuter.split_rows(replace(self, of_g=None), count, row_order)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.of_g is None:
            return super().weighted_sum(weights)
        total, norms = self.inner.weighted_sum(weights), self.factor.norms
        of_g = (weights.to(self.of_g.dtype) @ self.of_g).view_as(norms)
        return total.addcmul_(of_g / norms, self.factor.v, value=-1.0).mul_(self.factor.g / norms)

    def apply(self, gradients: Tensor) -> Tensor:
        return self.factor.of_v(gradients)

    def closed_form(self, keep: bool) -> NormResult | None:
        """One position: ``sum_p (g[p] / |v[p]|)^2 (left[p]^2 |right|^2 - c[p]^2)``, with c the gradient of g."""
        if self.of_g is None:
            return None
        left, right = (to_float32(side).squeeze(1) for side in self.inner.tensors)
        shares = (self.factor.g / self.factor.norms).flatten().square()
        whole = left.square().mul_(squared_norms(right).unsqueeze(1))
        across = whole - self.of_g.square()
        return self.measured_again(across @ shares, whole @ shares)


@dataclass(frozen=True)
class Quotient:
    """W = v / s(v).

    Attributes:
        value: W [p, ...].
        divisor: s, [].
        slope: the gradient of s, [p, ...].
    """

    value: Tensor
    divisor: Tensor
    slope: Tensor

    def of_v(self, gradients: Tensor) -> Tensor:
        """dL_i/dv [n, p, ...] from gradients [n, p, ...] at the weight."""
        along = gradients.flatten(1) @ self.value.flatten().to(gradients.dtype)
        across = torch.addcmul(gradients, along.view(-1, *[1] * self.value.dim()), self.slope, value=-1.0)
        return across.div_(self.divisor)


class QuotientGrads(_OfOuter):
    """dL_i/dv of a quotient, its ``factor`` a `Quotient`."""

    def apply(self, gradients: Tensor) -> Tensor:
        return self.factor.of_v(gradients)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total, value = self.inner.weighted_sum(weights), self.factor.value
        along = torch.dot(total.flatten(), value.flatten().to(total.dtype))
        return total.addcmul_(along, self.factor.slope, value=-1.0).div_(self.factor.divisor)

    def closed_form(self, keep: bool) -> NormResult | None:
        """One position: ``(|G|^2 - 2 <G, W> <G, D> + <G, W>^2 |D|^2) / s^2``."""
        if self.inner.left.shape[1] != 1 or self.inner.groups != 1:
            return None
        left, right = (to_float32(side).squeeze(1) for side in self.inner.tensors)
        value, slope = (each.flatten(1).mT.to(right.dtype) for each in (self.factor.value, self.factor.slope))
        of_value, of_slope = ((right @ each).mul_(left).sum(1) for each in (value, slope))
        whole = squared_norms(left) * squared_norms(right)
        taken = of_value.square() * squared_norms(slope.reshape(1, -1))
        scale = self.factor.divisor.to(right.dtype).square()
        squared = (whole - 2 * of_value * of_slope + taken) / scale
        return self.measured_again(squared, (whole + taken) / scale)
