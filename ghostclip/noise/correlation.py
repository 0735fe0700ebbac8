"""What all mechanisms of correlated noise have in common: C = T D, with T Toeplitz and D such that columns have norm 1.

Without correlation each step's noise is independent, and the noise in the sum of t updates grows with the root of t.
Here the noise of step t is z_t, row t of z = C^-1 w, with w independent and C lower triangular (matrix factorization,
Denisov et al. 2022; Choquette-Choo et al. 2023). Releasing x + C^-1 w tells as much as C x + w: an example in step t
alone moves C x by column t, whose norm is 1, as it moves the sum without correlation.

T has the series c on its diagonals: T[i, j] = c[i - j]. Column t has the norm s_t = |c[: n - t]| over n planned steps,
and D = diag(1 / s). So z_t = s_t u_t with T u = w, which `ghostclip.noise.history` computes step by step.

For two bands with c = (0.8, 0.6), and three steps: u_0 = w_0 / 0.8, u_1 = (w_1 - 0.6 u_0) / 0.8, and so on; s is
(1, 1, 0.8), since the last column of T has no room for 0.6.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor

from ghostclip.validate import positive_int

__all__ = ["Correlation", "inverse_series", "minimized", "square_root_series"]

# Of an error's logarithm, below which its minimum isn't looked for any further.
PRECISION, MOST_ROUNDS = 1e-12, 500


class Correlation(ABC):
    """Noise that is correlated over steps: z = C^-1 w, with columns of C of norm 1."""

    @abstractmethod
    def series(self, steps: int) -> np.ndarray:
        """The diagonals c of T, float64 [steps], of norm 1."""

    @property
    @abstractmethod
    def bands(self) -> int | None:
        """How many diagonals C has at most; None: any number, so that all steps share noise."""

    @property
    @abstractmethod
    def buffers(self) -> int:
        """How many tensors of each parameter's size are kept from step to step."""

    @abstractmethod
    def recurrence(self, series: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Weights, shares and gains of `NoiseRecurrence`, so that its sum is -sum_{j >= 1} c_j u_{t - j}.

        Args:
            series: c, as `series` has it for all planned steps.
            step: t, from 0.
        """

    def column_norms(self, steps: int) -> np.ndarray:
        """s [steps]: what each column of T is divided by."""
        return np.sqrt(np.cumsum(self.series(steps) ** 2))[::-1]

    def matrix(self, steps: int) -> np.ndarray:
        """C for so many planned steps: float64 [steps, steps], lower triangular, columns of norm 1.

        Raises:
            ValueError, TypeError: ``steps`` is no whole number >= 1.
        """
        series = self.series(positive_int(steps=steps))
        return scipy.linalg.toeplitz(series, np.zeros(steps)) / self.column_norms(steps)

    def error(self, steps: int) -> float:
        """Root mean squared error of the ``steps`` prefix sums of z = C^-1 w, for w of variance 1.

        It is |A C^-1|_F / sqrt(steps), with A lower triangular of ones: what noise does to the sum of all updates so
        far, averaged over steps. Independent noise has sqrt((steps + 1) / 2). It is inf where C^-1 has no numbers.

        Raises:
            ValueError, TypeError: ``steps`` is no whole number >= 1.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            found = self._error(positive_int(steps=steps))
        return found if math.isfinite(found) else math.inf

    def _error(self, steps: int) -> float:
        series, norms = self.series(steps), self.column_norms(steps)
        inverse = scipy.signal.lfilter([1.0], np.trim_zeros(series, "b"), np.eye(1, steps)[0])
        # Columns of full norm come first; their prefix sums depend on distances alone.
        full = max(1, int(np.count_nonzero(norms == norms[0])))
        sums = norms[0] * np.cumsum(inverse)
        squares = float(np.arange(full, 0, -1) @ sums[:full] ** 2)
        prefix = np.zeros(steps)
        prefix[:full] = sums[full - 1 :: -1]
        for step in range(full, steps):
            prefix[: step + 1] += norms[step] * inverse[step::-1]
            squares += float(prefix @ prefix)
        return math.sqrt(squares / steps)

    def growth(self, steps: int) -> np.ndarray:
        """The norms of the rows of C^-1 [steps]: each step's noise has that times the standard deviation of w."""
        inverse = scipy.signal.lfilter([1.0], np.trim_zeros(self.series(steps), "b"), np.eye(1, steps)[0])
        return self.column_norms(steps) * np.sqrt(np.cumsum(inverse**2))

    def sensitivity(self, steps: int, separation: int) -> float:
        """The largest |C d| where an example may take part in each ``separation``-th step, by a unit vector at each.

        It is max over first steps j of |sum_i |C|[:, j + i separation]|: exact where c has no negative entries
        (Choquette-Choo et al. 2022, equation 5), an upper bound otherwise. Where columns that far apart share no row,
        it is the root of the number of turns.

        Raises:
            ValueError, TypeError: an argument is no whole number >= 1.
        """
        return math.sqrt(max(square for _, square in self._turns(steps, separation)))

    def turn_sensitivity(self, steps: int, separation: int) -> float:
        """The least r with |C d| <= r sqrt(k) for an example with k turns so far, for every k; see `sensitivity`."""
        return math.sqrt(max(square / turns for turns, square in self._turns(steps, separation)))

    def _turns(self, steps: int, separation: int) -> list[tuple[int, float]]:
        """(turns so far, |sum of the columns' absolute values|^2), for every first step and every number of turns."""
        steps, separation = positive_int(steps=steps), positive_int(separation=separation)
        if self.bands is not None and self.bands <= separation:
            return [(turns, float(turns)) for turns in range(1, -(-steps // separation) + 1)]
        series, norms = np.abs(self.series(steps)), self.column_norms(steps)
        found = []
        for first in range(min(separation, steps)):
            total = np.zeros(steps)
            for turn, step in enumerate(range(first, steps, separation), 1):
                total[step:] += series[: steps - step] / norms[step]
                found.append((turn, float(total @ total)))
        return found


def square_root_series(size: int) -> np.ndarray:
    """c [size] with c * c = 1 + x + x^2 + ..., nearly the optimum for prefix sums (Fichtenberger et al. 2023)."""
    odd = np.arange(1, size)
    return np.concatenate([[1.0], np.cumprod((2.0 * odd - 1.0) / (2.0 * odd))])


def inverse_series(series: Tensor, size: int) -> Tensor:
    """The power series g [size] with c * g = 1, by Newton's iteration; differentiable. ``series`` is c, c[0] = 1."""
    found = torch.ones(1, dtype=series.dtype)
    while (known := len(found)) < size:
        part = series[: 2 * known]
        length = 4 * known
        transform = torch.fft.rfft(found, length)
        product = torch.fft.irfft(transform * (2.0 - transform * torch.fft.rfft(part, length)), length)
        found = product[: 2 * known]
    return found[:size]


def minimized(error: Any, start: np.ndarray) -> np.ndarray:
    """Where ``error``, from float64 [k] to a positive scalar, differentiable, is least; L-BFGS from ``start``."""

    def value_and_gradient(point: np.ndarray) -> tuple[float, np.ndarray]:
        variables = torch.tensor(point, dtype=torch.float64, requires_grad=True)
        with torch.enable_grad():
            value = error(variables).log()
            (gradient,) = torch.autograd.grad(value, variables)
        return value.item(), gradient.numpy()

    options = {"maxiter": MOST_ROUNDS, "ftol": PRECISION, "gtol": 1e-9}
    return scipy.optimize.minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", options=options).x
