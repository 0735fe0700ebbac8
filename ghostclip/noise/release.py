"""What every source of noise promises, what it may be given, and how tensors become one vector and tensors again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ghostclip.validate import nonnegative, positive

__all__ = ["Noise", "NoiseRecurrence", "check_release", "flat", "on_flat"]


class NoiseRecurrence(NamedTuple):
    """How a step's noise follows from that of earlier steps: by u = (w + sum_k weights_k kept_k) / first.

    After it kept_k becomes shares_k kept_k + gains_k u. ``kept`` has a tensor [K, ...] for each sum, the factors are
    float64 [K], w is independent, and ``scale`` u is the noise of the sum.
    """

    kept: Sequence[Tensor]
    weights: np.ndarray
    shares: np.ndarray
    gains: np.ndarray
    first: float
    scale: float


# The least noise that a released number may have, above which neither sums nor noise are rounded to multiples of the
# smallest number there is, nor to zero where the processor flushes what is below the smallest normal one.
LEAST = {dtype: 2.0**24 * torch.finfo(dtype).tiny for dtype in (torch.float32, torch.float64)}


class Noise:
    """A source of Gaussian noise.

    Attributes:
        mode: "standard", "hardened" or "test", as reports name it.
        private: False when whoever knows a seed knows the noise.
        draws: releases that got noise so far.
    """

    mode: str
    private: bool
    draws: int

    def release(self, sums: Sequence[Tensor], std: float, divisor: float = 1.0) -> list[Tensor]:
        """(sum + noise) / divisor for each of ``sums``, with noise of standard deviation ``std``.

        Args:
            sums: float32 or float64; not to be used afterwards, since they may be overwritten.
            std: standard deviation of the noise in a sum, finite and >= 0.
            divisor: the public number the sums are divided by, > 0.

        Raises:
            TypeError: a sum is in a narrower type than float32, where noise would be rounded away.
            ValueError: ``std`` or ``divisor`` is out of range, or noise so small would be lost in rounding.
        """
        raise NotImplementedError

    def release_correlated(
        self, sums: Sequence[Tensor], recurrence: NoiseRecurrence, std: float, divisor: float
    ) -> bool:
        """The same in one pass, in place, with noise that depends on earlier steps', where this source can.

        Args:
            sums, std, divisor: as `release` has them; ``std`` is that of the independent part w.
            recurrence: what is kept of earlier steps; brought up to date.

        Returns:
            Whether it was done; False where nothing was touched.
        """
        return False

    def generator(self, key: bytes | None = None) -> Any:
        """A fresh generator for sampling: as much of `numpy.random.Generator` as `binomial` and `choice`.

        Args:
            key: 32 random bytes that several processes share, which then draw the same; None: fresh ones, for one.
        """
        raise NotImplementedError

    def generator_on(self, device: torch.device) -> str:
        """Where the random numbers for parameters on a device come from, in words."""
        raise NotImplementedError

    def generator_for(self, model: nn.Module) -> str:
        """Where those for a model's trained parameters come from."""
        devices = [parameter.device for parameter in model.parameters() if parameter.requires_grad]
        return ", and ".join(dict.fromkeys(map(self.generator_on, dict.fromkeys(devices))))

    @property
    def growth(self) -> float:
        """Standard deviation of the last release's noise over that of independent noise; 1 without correlation."""
        return 1.0

    def positions(self) -> dict[str, Any]:
        """How far a repeatable source has come, for a checkpoint; {} for a private one, which nobody may repeat."""
        return {}

    def resume(self, positions: Mapping[str, Any]) -> None:
        """Goes on from `positions` of a source with the same seed; a private source starts afresh instead."""


def check_release(sums: Sequence[Tensor], std: float, divisor: float) -> None:
    """Raises TypeError or ValueError when that is not what `Noise.release` takes."""
    if not (type(std) is float and 0.0 <= std < math.inf and type(divisor) is int and divisor > 0):
        positive(divisor=divisor)
        nonnegative(std=std)
    for tensor in sums:
        if (least := LEAST.get(tensor.dtype)) is None:
            raise TypeError(f"noise is added in float32 or float64, and cast afterwards; got a sum in {tensor.dtype}")
        if 0.0 < std < least * divisor:
            raise ValueError(
                f"noise of standard deviation {std / divisor:.3g} would be lost in rounding: in {tensor.dtype} it must "
                f"be at least {least:.3g}. Nothing was released; take a larger clipping norm"
            )


def on_flat(like: Sequence[Tensor], make: Callable[[list[Tensor]], Tensor]) -> list[Tensor]:
    """Tensors of the shapes of ``like``, as views of vectors: ``make`` gets those of one device and type together."""
    views: list[Tensor] = [torch.empty(0)] * len(like)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(like):
        groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    for indices in groups.values():
        some = [like[index] for index in indices]
        for index, view in zip(indices, _unflatten_dense_tensors(make(some), some), strict=True):
            views[index] = view
    return views


def flat(tensors: list[Tensor]) -> Tensor:
    """Their numbers, in one vector."""
    return _flatten_dense_tensors([tensor.contiguous() for tensor in tensors])
