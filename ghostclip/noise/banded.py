"""Banded Toeplitz noise (BandMF; Choquette-Choo et al. 2023): steps that are ``bands`` or more apart share no noise.

An example that takes part in no two steps nearer than that moves rows of C x that no other turn of its moves. So its
turns count one by one, each as a step without correlation: with `sampling="cyclic_poisson"` they are Poisson samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor

from ghostclip.noise.correlation import Correlation, minimized, square_root_series
from ghostclip.validate import positive_int

__all__ = ["BandedToeplitz"]


@dataclass(frozen=True)
class BandedToeplitz(Correlation):
    """C with so many diagonals, whose noise partly cancels itself from step to step (Choquette-Choo et al. 2023).

    Args:
        bands: the number of diagonals, >= 1; one is independent noise. "auto": `PrivacyEngine` takes the number with
            the smallest noise multiplier times `error` at its ``target_epsilon``.
        coefficients: the diagonals, the main one first, in place of ``bands``; scaled so that columns have norm 1.
            None: those with the smallest `error` for the planned number of steps.

    Raises:
        ValueError, TypeError: an argument is out of range.
    """

    number: int | str
    coefficients: tuple[float, ...] | None

    def __init__(self, bands: int | str = 8, coefficients: Sequence[float] | None = None) -> None:
        given = None if coefficients is None else _checked(coefficients)
        if given is not None:
            bands = len(given)
        elif isinstance(bands, str):
            if bands != "auto":
                raise ValueError(f'bands must be a whole number >= 1, or "auto"; got {bands!r}')
        else:
            bands = positive_int(bands=bands)
        object.__setattr__(self, "number", bands)
        object.__setattr__(self, "coefficients", given)

    def __repr__(self) -> str:
        if self.coefficients is not None:
            return f"BandedToeplitz(coefficients={list(self.coefficients)})"
        return f"BandedToeplitz(bands={self.number!r})"

    @property
    def is_auto(self) -> bool:
        """Whether the number of bands is still to be chosen."""
        return self.number == "auto"

    @property
    def bands(self) -> int:
        """The number of diagonals; raises ValueError before "auto" was resolved."""
        if isinstance(self.number, str):
            raise ValueError(
                'bands="auto" is chosen by a PrivacyEngine, at its target_epsilon; engine.correlation shows it. Give a '
                "number of bands here"
            )
        return self.number

    @property
    def buffers(self) -> int:
        """``bands - 1``: the noise of so many steps is kept."""
        return self.bands - 1

    def series(self, steps: int) -> np.ndarray:
        """See `Correlation.series`; zeros beyond the bands."""
        bands = min(self.bands, steps)
        known = _optimal(bands, steps) if self.coefficients is None else np.array(self.coefficients[:bands])
        return np.pad(known / np.linalg.norm(known), (0, steps - bands))

    def recurrence(self, series: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See `Correlation.recurrence`: the last ``bands - 1`` of u in a ring, u of step t in slot t mod that."""
        kept = min(self.buffers, len(series) - 1)
        lags = (step - 1 - np.arange(kept)) % kept + 1
        oldest = (lags == kept).astype(float)
        return -series[lags], 1.0 - oldest, oldest


def _checked(coefficients: Sequence[float]) -> tuple[float, ...]:
    """The diagonals as floats; raises ValueError unless they are finite, and the first one positive."""
    found = tuple(float(each) for each in coefficients)
    if not found or not all(map(math.isfinite, found)) or found[0] <= 0:
        raise ValueError(
            f"coefficients must be finite numbers, the first of them > 0, since C must have an inverse; got {found!r}"
        )
    return found


@lru_cache(maxsize=64)
def _optimal(bands: int, steps: int) -> np.ndarray:
    """The diagonals [bands] with the smallest error over so many steps, the main one 1."""
    start = square_root_series(bands)
    if bands == 1:
        return start
    found = minimized(lambda rest: banded_error(torch.cat([torch.ones_like(rest[:1]), rest]), steps), start[1:])
    return np.concatenate([[1.0], found])


class Inverse(torch.autograd.Function):
    """The power series g [size] with c * g = 1, for a short c; the derivative of g by c_j is minus j zeros and g * g.

    A recursion, of which every digit is right: by Fourier transforms the search ended at its start for 100,000 steps.
    """

    @staticmethod
    def forward(ctx: Any, series: Tensor, size: int) -> Tensor:
        ctx.series = series.numpy()
        ctx.found = scipy.signal.lfilter([1.0], ctx.series, np.eye(1, size)[0])
        return torch.from_numpy(ctx.found)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        squared, by = scipy.signal.lfilter([1.0], ctx.series, ctx.found), grad.numpy()
        size = len(by)
        return torch.tensor([-(by[lag:] @ squared[: size - lag]) for lag in range(len(ctx.series))]), None


def banded_error(series: Tensor, steps: int) -> Tensor:
    """|A C^-1|_F^2 for C = T D, as `Correlation.error` has it, in time steps x bands; differentiable.

    Args:
        series: c, float64 [bands], c[0] = 1, bands <= steps.
        steps: how many.
    """
    bands, full = len(series), steps - len(series) + 1
    norms = series.square().cumsum(0).sqrt()
    inverse = Inverse.apply(series, steps)
    sums = norms[-1] * inverse.cumsum(0)
    squares = torch.arange(full, 0, -1, dtype=series.dtype) @ sums[:full].square()
    # Rows of the last steps, whose columns are cut short: entry i of row t is g[t - i].
    reversed_ = torch.cat([inverse.flip(0), torch.zeros(bands - 2, dtype=series.dtype)])
    rows = reversed_.unfold(0, steps, 1).flip(0)
    last = torch.cat([sums[:full].flip(0), torch.zeros(bands - 1, dtype=series.dtype)])
    prefix = last + (norms[:-1].flip(0)[:, None] * rows).cumsum(0)
    return squares + prefix.square().sum()
