"""Whether a graph is used: it is tried beside the eager way on a few batches, and kept where it is right and faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter as clock
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["TRIALS", "Trial", "difference", "drift", "movement", "timed"]

T = TypeVar("T")
# Batches on which both ways run before the faster one is taken.
TRIALS = 4
# Relative difference of the results from which on the graph doesn't do what the eager step does.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
# The same for parameters after an update that divides by the gradient's own size: a gradient that is rounding and
# nothing else moves a parameter as far as any other.
AMPLIFIED = 0.05


def timed(run: Callable[[], T]) -> tuple[T, float]:
    """What ``run`` returns, and its seconds, until a GPU has done what it was told to."""
    _wait()
    started = clock()
    result = run()
    _wait()
    return result, clock() - started


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@dataclass
class Trial:
    """The best times of both ways, in seconds.

    Attributes:
        left: batches to come on which both ways are run.
        copies: of what a step writes, for it to be tried on.
    """

    left: int = TRIALS
    eager: float = float("inf")
    compiled: float = float("inf")
    copies: list[Tensor] = field(default_factory=list)

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`copies` as the tensors are now, in the same memory each time: elsewhere a CUDA graph is recorded anew."""
        if not self.copies:
            self.copies = [tensor.detach().clone() for tensor in tensors]
        else:
            torch._foreach_copy_(self.copies, [tensor.detach() for tensor in tensors])
        return self.copies

    def note(self, compiled: float, eager: float, error: float, dtype: torch.dtype) -> str | None:
        """Takes both times of one batch and the relative difference of the results; says why the graph is refused."""
        self.left -= 1
        self.compiled, self.eager = min(self.compiled, compiled), min(self.eager, eager)
        if not error <= TOLERANCE.get(dtype, TOLERANCE[torch.float32]):
            return (
                f"the compiled step's sums differ from eager's by {error:.2g} (relative): the loss or the forward "
                "depends on something besides the batch, the parameters and torch's random numbers"
            )
        if self.left == 0 and self.compiled > self.eager:
            return f"eager is faster ({1e3 * self.eager:.3g} ms, compiled {1e3 * self.compiled:.3g})"
        return None


def difference(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """The norm of the difference of all tensors as a share of the norm of the expected ones."""
    if [tensor is None for tensor in found] != [tensor is None for tensor in expected]:
        return float("inf")
    here, there = ([tensor for tensor in some if tensor is not None] for some in (found, expected))
    off, size = movement(here, there), movement(there)
    return off / size if size else off


@torch.no_grad()
def movement(after: Sequence[Tensor], before: Sequence[Tensor] | None = None) -> float:
    """The norm of all that changed; None: since all was zero."""
    if not after:
        return 0.0
    origin: Sequence[Any] = [0.0] * len(after) if before is None else before
    return float(torch.stack([(a.double() - b).norm() for a, b in zip(after, origin, strict=True)]).norm())


def drift(found: Sequence[Tensor], expected: Sequence[Tensor], moved: float, *, amplified: bool = False) -> float:
    """The norm of the difference of two updates as a share of an update's own, rounding of the values allowed for.

    Args:
        found, expected: tensors after the update.
        moved: how far `found` came by it.
        amplified: whether the gradients' rounding may have grown to the size of the update.
    """
    if not found:
        return 0.0
    rounding = 4 * torch.finfo(found[0].dtype).eps * movement(expected)
    off = movement(found, expected) - rounding - (AMPLIFIED * moved if amplified else 0.0)
    return 0.0 if off <= 0 else off / moved if moved else float("inf")
