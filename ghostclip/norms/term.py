"""A term: the per-example gradients of one parameter, not yet multiplied out.

Every layer brings what it saw to one of the few shapes of term in this package; the mathematics of squared norms
and clipped sums is then written once per shape, as tensor functions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .memory import Memory

__all__ = ["SAMPLE", "NormResult", "PerExampleGrads", "Strategy", "size_class", "to_float32"]

# (number of an example, its squared norm) -> its weight, a finite number.
Weigh = Callable[[int, float], float]

# Costs are measured on at most this many examples: beyond, they grow with their number.
SAMPLE = 32


@dataclass(slots=True)
class NormResult:
    """Squared norms [B], and what was formed on the way: per-example gradients [B, *shape] that may be kept, and
    `PerExampleGrads.absolute`."""

    squared_norms: Tensor
    kept: Tensor | None = None
    absolute: Tensor | None = None


class StrategyRun(Protocol):
    """Computes the answer of any term of one kind.

    Args:
        term: the term.
        keep: whether per-example gradients are to be kept, where the way can.
        memory: lends what is needed.
    """

    def __call__(self, term: Any, /, keep: bool = ..., memory: Memory = ...) -> NormResult: ...


@dataclass(frozen=True)
class Strategy:
    """One way to the squared norms of a term.

    Attributes:
        family: "gram" or "direct", what ``norm_strategy`` asks for.
        run: computes the answer, of this term or another of the same ``key``.
        flops: an estimate, for choices that must not depend on a clock.
        keeps: whether ``run`` can keep the per-example gradients.
        traces: whether it can be written down as a graph, without a look at any value.
    """

    family: str
    run: StrategyRun
    flops: float
    keeps: bool = False
    traces: bool = True


class PerExampleGrads(ABC):
    """Per-example gradients of one parameter: B of them, each of ``shape``."""

    shape: torch.Size

    @property
    @abstractmethod
    def key(self) -> tuple:
        """What the cost of this term depends on: kind, sizes, dtype, device."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors this term holds on to; the first has the examples (times groups) in dimension 0."""

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
        """The squared norms where there is only one way to them; None where `candidates` has to be chosen from."""
        return None

    def candidates(self) -> dict[str, Strategy]:
        """The ways to the squared norms, by name; a term without a sole answer has at least one."""
        return {}

    def exact_squared_norms(self) -> Tensor | None:
        """Squared norms [B] where candidates of the "direct" family may lose digits to cancellation, too; else None."""
        return None

    def head(self, count: int) -> PerExampleGrads:
        """The term of the first ``count`` examples, to measure on; all of them where a kind can't be divided."""
        return self

    def absolute(self) -> Tensor | None:
        """At least ``(sum_t |part_t|)^2`` [B] of the parts that a gradient is added up from; None where it is not.

        Digits can cancel between parts, see `ghostclip.norms.rounding`.
        """
        return None

    @abstractmethod
    def per_example(self) -> Tensor:
        """The gradients themselves, [B, *shape], in float32 or wider."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """``sum_i weights[i] * gradient[i]`` for weights [B]; returns [*shape]."""

    def sums(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """The ways to `weighted_sum`, by name, where there are several; the first is `weighted_sum` itself."""
        return {}

    @abstractmethod
    def keep_only(self, keep: Tensor) -> PerExampleGrads:
        """The same term with what belongs to examples where ``keep`` [B] is False replaced by zeros."""

    @abstractmethod
    def split_rows(self, count: int, row_order: str) -> PerExampleGrads:
        """The term of B/count examples when each had ``count`` rows: in "example" order (b k) or "row" order (k b)."""


def size_class(examples: int) -> int:
    """Batches for which one measurement stands: up to the next power of two, and all from SAMPLE on."""
    return min(SAMPLE, 1 << (examples - 1).bit_length())


def to_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32 (or complex64), or as it is when it is no narrower already."""
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def zero_examples(tensor: Tensor, keep: Tensor) -> Tensor:
    """``tensor`` [B, ...] with rows of zeros where ``keep`` [B] is False (0 * inf would be NaN)."""
    return torch.where(keep.view(-1, *[1] * (tensor.dim() - 1)), tensor, tensor.new_zeros(()))


def split_examples(tensor: Tensor, count: int, row_order: str) -> Tensor:
    """``[B * count, ...]`` rows as [B, count, ...], whichever of the two is the slower axis."""
    if row_order == "example":
        return tensor.unflatten(0, (-1, count))
    return tensor.unflatten(0, (count, -1)).transpose(0, 1)
