"""Whether a graph is used: it is tried beside the eager way on a few batches, and kept where it is right and faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter as clock
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["TOLERANCE", "TRIALS", "Trial", "by_rounding", "difference", "in_a_line", "timed", "with_other_masks"]

T = TypeVar("T")
# Batches on which both ways run before the faster one is taken.
TRIALS = 4
# Relative difference of the results from which on the graph doesn't do what the eager step does.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
# Units in the last place by which parameters are changed (of narrower types one), how often, and how much more a graph
# may differ.
NUDGE, NUDGES, SLACK = 512.0, 3, 2.0


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
    """

    left: int = TRIALS
    eager: float = float("inf")
    compiled: float = float("inf")

    def note(self, compiled: float, eager: float, error: float, most: float) -> str | None:
        """Takes both times of one batch, and the relative difference of the results; says why the graph is refused.

        It is if it is slower, or the difference is more than ``most``.
        """
        self.left -= 1
        self.compiled, self.eager = min(self.compiled, compiled), min(self.eager, eager)
        if not error <= most:
            return (
                f"the compiled step's sums differ from eager's by {error:.2g} (relative): the loss or the forward "
                "depends on something besides the batch, the parameters and torch's random numbers"
            )
        if self.left == 0 and self.compiled > self.eager:
            return f"eager is faster ({1e3 * self.eager:.3g} ms, compiled {1e3 * self.compiled:.3g})"
        return None


def by_rounding(
    parameters: Iterable[Tensor], sums: Callable[[], Sequence[Tensor | None]], expected: Sequence[Tensor | None]
) -> float:
    """How far from the eager sums ``expected`` a graph's may be, by what nudged parameters make of eager sums.

    A ReLU that turns, or another largest entry of a pool, moves the sums of a ResNet-18 by a hundredth; rounding turns
    one in every seventh batch of 16 images.

    Args:
        parameters: of the model; they are as they were afterwards.
        sums: makes the same batch's sums anew, from the same random numbers.
        expected: of the parameters as they are.
    """
    changes, kept = [0.0], [(each.data, each.data.clone()) for each in parameters if each.is_floating_point()]
    try:
        for _ in range(NUDGES):
            for tensor, value in kept:
                units = (NUDGE if tensor.dtype in TOLERANCE else 1.0) * torch.finfo(tensor.dtype).eps
                noise = torch.rand(tensor.shape, device=tensor.device, generator=_fresh_generator(tensor.device))
                tensor.copy_(value * (1.0 + units * (2.0 * noise - 1.0)))
            changes.append(difference(sums(), expected))
    finally:
        for tensor, value in kept:
            tensor.copy_(value)
    return SLACK * max(filter(math.isfinite, changes))


def _fresh_generator(device: torch.device) -> torch.Generator:
    generator = torch.Generator(device)
    generator.seed()
    return generator


def with_other_masks(leaves: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """A batch without padding, and one in which all rows but the first are padded: what compiled code does with a mask.

    Masks are tensors [B, T, ...] of nothing but 0 and 1 (integers or bool); nothing is yielded where there is none.

    Args:
        leaves: of the batch.
    """
    masks = [_is_mask(leaf) for leaf in leaves]
    if any(masks):
        yield [torch.ones_like(leaf) if mask else leaf for leaf, mask in zip(leaves, masks, strict=True)]
        yield [_ending_early(leaf) if mask else leaf for leaf, mask in zip(leaves, masks, strict=True)]


def _is_mask(leaf: Tensor) -> bool:
    return leaf.dim() > 1 and not leaf.is_floating_point() and bool(((leaf == 0) | (leaf == 1)).all())


def _ending_early(mask: Tensor) -> Tensor:
    """The second half of each row but the first is zero."""
    found = torch.ones_like(mask)
    found[1:, (mask.shape[1] + 1) // 2 :] = 0
    return found


@torch.no_grad()
def difference(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """The norm of the difference of all tensors as a share of the norm of the expected ones."""
    if [tensor is None for tensor in found] != [tensor is None for tensor in expected]:
        return float("inf")
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True) if a is not None and b is not None]
    off, size = (_norm([a - b for a, b in pairs]), _norm([b for _, b in pairs]))
    return off / size if size else off


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([each.norm() for each in tensors]).norm()) if tensors else 0.0


def in_a_line(error: Exception) -> str:
    """An error's type and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
