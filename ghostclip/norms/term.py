"""A term: the per-example gradients of one parameter, not yet multiplied out.

Every layer brings what it saw to one of the few shapes of term in this package; the mathematics of squared norms
and clipped sums is then written once per shape, as tensor functions.
"""

from __future__ import annotations

import copy
import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from ghostclip.native.custom_ops import is_traced

from .reduce import Sizes

__all__ = [
    "SAMPLE",
    "Dense",
    "NormResult",
    "PerExampleGrads",
    "Strategy",
    "may_sync",
    "pick_rows",
    "product_of_sizes",
    "size_class",
    "squared_norms",
    "squared_sizes",
    "to_float32",
]

# Costs are measured on at most this many examples: beyond, they grow with their number.
SAMPLE = 32
# A norm in float32 loses 1e-6 of itself for about so many numbers, and more in proportion (2.5 million: 4e-4).
LONG = 8192
# Rows that are added up by one product.
BLOCK = 256


Kind = TypeVar("Kind", bound="PerExampleGrads")


@dataclass(slots=True)
class NormResult:
    """Squared norms [B], and what was formed on the way.

    Attributes:
        squared_norms: [B].
        kept: per-example gradients [B, *shape].
        absolute: `PerExampleGrads.absolute`.
        sizes: `OuterProduct.sizes`.
    """

    squared_norms: Tensor
    kept: Tensor | None = None
    absolute: Tensor | None = None
    sizes: Sizes | None = None


class StrategyRun(Protocol):
    """Computes the answer of any term of one kind.

    Args:
        term: the term.
        keep: whether per-example gradients are to be kept, where the way can.
    """

    def __call__(self, term: Any, /, keep: bool = ...) -> NormResult: ...


@dataclass(frozen=True)
class Strategy:
    """One way to the squared norms of a term.

    Attributes:
        family: "gram" or "direct", what ``norm_strategy`` asks for.
        run: computes the answer, of this term or another of the same ``key``.
        flops: an estimate, for choices that must not depend on a clock.
        keeps: whether ``run`` can keep the per-example gradients.
    """

    family: str
    run: StrategyRun
    flops: float
    keeps: bool = False


class PerExampleGrads(ABC):
    """Per-example gradients of one parameter: B of them, each of ``shape``.

    A subclass is a dataclass of tensors with the examples in dimension 0. It defines how gradients are formed
    (`per_example`), summed (`weighted_sum`) and measured (`closed_form` or `candidates`).
    """

    shape: torch.Size
    # The names of its tensors; the first is never None.
    TENSORS: ClassVar[tuple[str, ...]] = ()

    @property
    def key(self) -> tuple:
        """What the cost of this term depends on: kind, sizes, dtypes, device."""
        sizes = [(tuple(tensor.shape[1:]), tensor.dtype) for tensor in self.tensors]
        return (type(self).__name__, size_class(self.examples), *sizes, self.shape, self.device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors this term holds on to; they have the examples (times groups) in dimension 0."""
        return tuple(filter(_is_there, map(self.__getattribute__, self.TENSORS)))

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors this term holds on to."""
        return sum([tensor.nbytes for tensor in self.tensors])

    @property
    def examples(self) -> int:
        """B."""
        return self.tensors[0].shape[0]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.tensors[0].device

    def closed_form(self, keep: bool) -> NormResult | None:
        """The squared norms [B] if there is one formula for them; None if there are several `candidates`."""
        return None

    def candidates(self) -> dict[str, Strategy]:
        """The ways to the squared norms, by name; a term without a sole answer has at least one."""
        return {}

    def exact_squared_norms(self) -> Tensor | None:
        """Squared norms [B] where candidates of the "direct" family may lose digits to cancellation, too; else None."""
        return None

    def absolute(self) -> Tensor | None:
        """At least ``(sum_t |part_t|)^2`` [B] of the parts that a gradient is added up from; None where it is not.

        Digits can cancel between parts, see `ghostclip.norms.reduce`.
        """
        return None

    @abstractmethod
    def per_example(self) -> Tensor:
        """The gradients themselves, [B, *shape], in float32 or wider."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """``sum_i weights[i] * gradient[i]`` for weights [B]; returns [*shape]."""

    def replaced(self: Kind, function: Callable[[Tensor], Tensor]) -> Kind:
        """The term of other examples, whose tensors [n, ...] ``function`` makes of those of this one, [B, ...]."""
        found = copy.copy(self)
        for name in self.TENSORS:
            tensor = getattr(self, name)
            setattr(found, name, None if tensor is None else function(tensor))
        return found

    def keep_only(self: Kind, keep: Tensor) -> Kind:
        """The same term with what belongs to examples where ``keep`` [B] is False replaced by zeros."""
        return self.replaced(lambda tensor: zero_examples(tensor, keep))

    def pick(self: Kind, rows: Tensor | slice, there: Tensor | None = None) -> Kind:
        """The term of the examples ``rows`` [n] in this order; zeros in the place of one that isn't ``there`` [n].

        With a slice, all are there.
        """
        return self.replaced(lambda tensor: pick_rows(tensor, rows, there))

    @abstractmethod
    def split_rows(self, count: int, row_order: str) -> PerExampleGrads:
        """The term of B/count examples when each had ``count`` rows: in "example" order (b k) or "row" order (k b)."""


WIDE = torch.float32, torch.float64
# None for tensors that a term doesn't have.
_is_there = functools.partial(operator.is_not, None)


def size_class(examples: int) -> int:
    """Batches for which one measurement stands: up to the next power of two, and all from SAMPLE on."""
    return min(SAMPLE, 1 << (examples - 1).bit_length())


def to_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32 (or complex64), or as it is when it is no narrower already."""
    if tensor.dtype in WIDE:
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def zero_examples(tensor: Tensor, keep: Tensor) -> Tensor:
    """``tensor`` [B, ...] with rows of zeros where ``keep`` [B] is False (0 * inf would be NaN)."""
    return torch.where(keep.view(-1, *[1] * (tensor.dim() - 1)), tensor, tensor.new_zeros(()))


def pick_rows(tensor: Tensor, rows: Tensor | slice, there: Tensor | None) -> Tensor:
    """``tensor[rows]`` [n, ...], with zeros where ``there`` [n] is False."""
    if isinstance(rows, slice):
        return tensor[rows]
    found = tensor.index_select(0, rows)
    return found if there is None else found.masked_fill_(~there.view(-1, *[1] * (tensor.dim() - 1)), 0)


def split_examples(tensor: Tensor, count: int, row_order: str) -> Tensor:
    """``[B * count, ...]`` rows as [B, count, ...], whichever of the two is the slower axis."""
    if row_order == "example":
        return tensor.unflatten(0, (-1, count))
    return tensor.unflatten(0, (count, -1)).transpose(0, 1)


def may_sync(device: torch.device) -> bool:
    """Whether the host may wait for values on ``device`` wherever they come up, rather than once for a batch.

    A host that waits until a GPU has done all it was given leaves it idle.
    """
    return device.type == "cpu" and not is_traced()


def squared_norms(gradients: Tensor) -> Tensor:
    """Squared L2 norms of the rows of ``gradients`` [B, ...]; returns [B] in float32 or wider."""
    if gradients.dtype not in WIDE:
        gradients = to_float32(gradients)
    if gradients.dim() == 1:
        return gradients.square()
    if gradients.numel() == 0:
        return gradients.new_zeros(gradients.shape[0])
    flat = gradients.flatten(1)
    norms = _row_norms(flat) if flat.shape[1] > LONG else torch.linalg.vector_norm(flat, dim=1)
    return norms.mul_(norms)


def _row_norms(flat: Tensor) -> Tensor:
    """Norms [B] of the rows of ``flat`` [B, n]; long rows by parts, since torch adds up one number after another."""
    whole = flat.shape[1] - flat.shape[1] % LONG
    if whole <= LONG:
        return torch.linalg.vector_norm(flat, dim=1)
    parts = torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (-1, LONG)), dim=2)
    if whole < flat.shape[1]:
        rest = torch.linalg.vector_norm(flat[:, whole:], dim=1, keepdim=True)
        parts = torch.cat([parts, rest], dim=1)
    return _row_norms(parts)


def sum_of_rows(weights: Tensor, rows: Tensor) -> Tensor:
    """``weights @ rows`` [n], for [N] and [N, n]: of many rows by blocks, and the blocks in float64.

    A product of few columns adds up one row after another. In float32 one example more could change how each of the
    rows after it is rounded: sums of 20,000 gradients of norm 1 moved by up to 9. By blocks it is a thousandth.
    """
    whole = len(rows) - len(rows) % BLOCK
    if whole <= BLOCK:
        return torch.mv(rows.t(), weights)
    blocks = weights[:whole].reshape(-1, 1, BLOCK) @ rows[:whole].unflatten(0, (-1, BLOCK))
    found = blocks.sum((0, 1), dtype=torch.float64) + weights[whole:] @ rows[whole:]
    return found.to(rows.dtype)


def summed_products(left: Tensor, right: Tensor) -> Tensor:
    """``left.T @ right`` [p, d], for [N, p] and [N, d], where a side of one column is added up by `sum_of_rows`."""
    if left.shape[1] == 1:
        return sum_of_rows(left[:, 0], right).unsqueeze(0)
    if right.shape[1] == 1:
        return sum_of_rows(right[:, 0], left).unsqueeze(1)
    return left.mT @ right


def squared_sizes(side: Tensor) -> Tensor:
    """``|side[i]|^2`` [B] over all other axes, read as they lie in memory."""
    if side.dim() == 3 and not side.is_contiguous() and side.transpose(0, 1).is_contiguous():
        rows = squared_norms(side.transpose(0, 1).flatten(0, 1))
        return rows.view(side.shape[1], side.shape[0]).sum(0)
    return squared_norms(side)


def product_of_sizes(left: Tensor, right: Tensor) -> Tensor:
    """``|left[i]|^2 |right[i]|^2`` [B] over all other axes: at least S^2 of `norms.reduce`, by Cauchy and Schwarz."""
    return squared_sizes(left) * squared_sizes(right)


@dataclass(eq=False)
class Dense(PerExampleGrads):
    """Gradients small enough to stand there as they are: biases, scales, anything a plain rule returns.

    Attributes:
        gradients: [B, *shape].
        added_up: where their sum will be made of parts again, what `absolute` says of these, [B].
    """

    TENSORS = ("gradients", "added_up")
    gradients: Tensor
    added_up: Tensor | None = None

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.gradients.shape[1:]

    def closed_form(self, keep: bool) -> NormResult:
        return NormResult(squared_norms(self.gradients))

    def absolute(self) -> Tensor | None:
        return self.added_up

    def per_example(self) -> Tensor:
        return to_float32(self.gradients)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        gradients = to_float32(self.gradients)
        if gradients.dim() == 2:
            return sum_of_rows(weights.to(gradients.dtype), gradients)
        if gradients.dim() == 3 and not gradients.is_contiguous() and gradients.mT.is_contiguous():
            return Dense(gradients.mT).weighted_sum(weights).mT.contiguous()
        return sum_of_rows(weights.to(gradients.dtype), gradients.unsqueeze(-1).flatten(1)).view(self.shape)

    def split_rows(self, count: int, row_order: str) -> Dense:
        return Dense(split_examples(to_float32(self.gradients), count, row_order).sum(1))
