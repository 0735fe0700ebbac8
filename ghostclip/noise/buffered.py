"""Buffered linear Toeplitz noise (BLT; McMahan et al. 2024): all steps share noise, by a few buffers.

c_0 = 1 and c_t = sum_i w_i h_i^(t - 1), with weights w_i > 0 and decay rates h_i in (0, 1). Then T u = n, for fresh
noise n, is solved with one buffer b_i for each rate: u = n - sum_i w_i b_i, and afterwards b_i <- h_i b_i + u.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ghostclip.noise.correlation import Correlation, inverse_series, minimized
from ghostclip.validate import positive_int

__all__ = ["BufferedToeplitz"]


@dataclass(frozen=True)
class BufferedToeplitz(Correlation):
    """C with all its diagonals, sums of a few decaying exponentials (BLT; McMahan et al. 2024).

    Its noise needs ``sampling="cyclic"``: steps at any distance share noise.

    Args:
        buffers: the number of exponentials, and of tensors of each parameter's size that are kept, >= 1.

    Raises:
        ValueError, TypeError: ``buffers`` is no whole number >= 1.
    """

    buffers: int = 3
    bands: ClassVar[None] = None  # C is not banded

    def __post_init__(self) -> None:
        object.__setattr__(self, "buffers", positive_int(buffers=self.buffers))

    def exponentials(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Weights and decay rates, [buffers] each, with the smallest error over so many steps."""
        return _optimal_exponentials(self.buffers, positive_int(steps=steps))

    def series(self, steps: int) -> np.ndarray:
        """See `Correlation.series`."""
        weights, rates = self.exponentials(steps)
        found = _series(torch.from_numpy(weights), torch.from_numpy(rates), steps).numpy()
        return found / np.linalg.norm(found)

    def recurrence(self, series: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See `Correlation.recurrence`: one buffer for each exponential, b_i = sum_j rate_i^(j - 1) u_{t - j}."""
        scales, rates = self.exponentials(len(series))
        return -series[0] * scales, rates, np.ones(self.buffers)


def _series(weights: Tensor, rates: Tensor, steps: int) -> Tensor:
    """c [steps], c_0 = 1."""
    powers = rates[:, None] ** torch.arange(steps - 1, dtype=weights.dtype)
    return torch.cat([torch.ones(1, dtype=weights.dtype), weights @ powers])


def _unpacked(variables: Tensor) -> tuple[Tensor, Tensor]:
    """Weights > 0 and rates in (0, 1) from unbounded variables [2 buffers]."""
    weights, rates = variables.chunk(2)
    return weights.exp(), rates.sigmoid()


@lru_cache(maxsize=64)
def _optimal_exponentials(buffers: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Those that minimize |A T^-1|_F^2 |c|^2: the error when all columns are divided by the norm of the first."""

    def error(variables: Tensor) -> Tensor:
        series = _series(*_unpacked(variables), steps)
        sums = inverse_series(series, steps).cumsum(0)
        return series.square().sum() * (torch.arange(steps, 0, -1, dtype=series.dtype) @ sums.square())

    # Exponentials that forget after a step and up to all steps, with weights that fall as 1 / sqrt(t).
    memory = np.geomspace(1.5, max(2.0, steps), buffers + 1)[1:] if buffers > 1 else np.array([max(2.0, steps**0.5)])
    start = np.concatenate([np.log(0.5 / memory**0.5 / buffers**0.5), np.log(memory)])
    weights, rates = _unpacked(torch.from_numpy(minimized(error, start)))
    return weights.numpy(), rates.numpy()
