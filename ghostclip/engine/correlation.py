"""Which matrix correlates the noise: what it goes with, and how the number of bands is chosen."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ghostclip import accounting
from ghostclip.clipping.choice import adapts
from ghostclip.events import Event
from ghostclip.noise import BandedToeplitz, BufferedToeplitz, Correlation
from ghostclip.sampling import LogicalBatches

__all__ = ["BandsRow", "ChosenCorrelation", "chosen_correlation", "refuse_with_correlation"]

log = logging.getLogger("ghostclip")

# Of each band but one a tensor of each parameter's size is kept.
MOST_BANDS = 32
BANDED, TURNS = ("cyclic_poisson", "cyclic"), ("cyclic",)
# Noise is kept in float32: where it grows by more, the fresh noise of a step is lost in rounding that of earlier ones.
MOST_GROWTH = 1e4


@dataclass(frozen=True)
class BandsRow:
    """One number of bands.

    Attributes:
        bands: the number.
        noise_multiplier: the least one for the target epsilon.
        error: `BandedToeplitz.error` for the planned steps.
    """

    bands: int
    noise_multiplier: float
    error: float

    @property
    def product(self) -> float:
        """Noise in the sum of updates, root mean square over the steps, in units of the sensitivity."""
        return self.noise_multiplier * self.error


@dataclass(frozen=True)
class ChosenCorrelation:
    """The matrix of an engine.

    Attributes:
        matrix: a `BandedToeplitz` with its number of bands, or a `BufferedToeplitz`.
        steps: the planned number, for which columns have norm 1.
        error: of the matrix, see `BandedToeplitz.error`.
        table: for ``bands="auto"`` the numbers of bands it was chosen among; else none.
    """

    matrix: Correlation
    steps: int
    error: float
    table: tuple[BandsRow, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.matrix!r} for {self.steps} steps, error of prefix sums {self.error:.4g}"]
        if self.table:
            lines.append("bands  noise multiplier  error of prefix sums  product")
            lines += [f"{r.bands:5}  {r.noise_multiplier:16.4g}  {r.error:20.4g}  {r.product:7.4g}" for r in self.table]
        return "\n".join(lines)


def refuse_with_correlation(correlation: Any, given: dict[str, Any], policy: Any) -> None:
    """Raises ValueError or TypeError where arguments of the engine don't go with correlated noise.

    ``given`` are ``sampling``, ``schedule``, ``noise``, ``steps``, ``epochs`` and ``target_epsilon``.
    """
    if correlation is None:
        return
    if not isinstance(correlation, BandedToeplitz | BufferedToeplitz):
        raise TypeError(f"correlation must be a BandedToeplitz or a BufferedToeplitz; got {correlation!r}")
    independent = isinstance(correlation, BandedToeplitz) and correlation.number == 1
    allowed = BANDED if isinstance(correlation, BandedToeplitz) else TURNS
    reasons = {
        "schedule": given["schedule"] is not None and "noise, thresholds and batch size must be the same at each step",
        "adaptive clipping": adapts(policy) and "the thresholds, and so the noise, must be the same at each step",
        'noise="hardened"': given["noise"] == "hardened" and not independent
        and "the history of noise is kept in floating point, which its lattice doesn't cover",
    }  # fmt: skip
    for other, reason in reasons.items():
        if reason:
            raise ValueError(f"correlation and {other} don't go together: {reason}; leave one of them out")
    if not independent and given["sampling"] not in allowed:
        raise ValueError(
            f"correlation={correlation!r} needs sampling={' or '.join(map(repr, allowed))}, so that an example takes "
            f"part in no two steps nearer than is charged; got {given['sampling']!r}"
        )
    if given["steps"] is None and given["epochs"] is None:
        raise ValueError(
            "correlation needs the planned steps, for which its matrix is made: give steps=... or epochs=..."
        )
    if isinstance(correlation, BandedToeplitz) and correlation.is_auto and given["target_epsilon"] is None:
        raise ValueError('bands="auto" needs target_epsilon, at which numbers of bands are compared; give it, or bands')


def chosen_correlation(
    correlation: Correlation, loader: LogicalBatches, steps: int, target_epsilon: float | None, target_delta: float,
    before: Sequence[Event] = (),
) -> ChosenCorrelation:  # fmt: skip
    """The matrix with its number of bands; "auto" takes the smallest noise multiplier times error, and logs the table.

    "auto" needs a target. ``before`` is charged besides the steps. With cyclic Poisson sampling the loader gets as many
    groups as there are bands.
    """
    table: tuple[BandsRow, ...] = ()
    if isinstance(correlation, BandedToeplitz) and correlation.is_auto and target_epsilon is not None:
        an_epoch = loader.units // loader.batch_size if loader.sampling == "cyclic_poisson" else len(loader)
        bands = [2**k for k in range(6) if 2**k <= min(an_epoch, steps, MOST_BANDS)]
        table = tuple(_row(each, loader, steps, target_epsilon, target_delta, before) for each in bands)
        correlation = BandedToeplitz(bands=min(table, key=lambda row: row.product).bands)
    found = ChosenCorrelation(correlation, steps, correlation.error(steps), table)
    if isinstance(correlation, BandedToeplitz):
        _check_growth(correlation, steps)
    if table:
        log.info("bands chosen at epsilon %g:\n%s", target_epsilon, found)
    if loader.sampling == "cyclic_poisson":
        loader.separate(correlation.bands or 1)
    return found


def _check_growth(correlation: BandedToeplitz, steps: int) -> None:
    """Raises ValueError where a step's noise is so large that the fresh part of it is lost in rounding."""
    with np.errstate(over="ignore", invalid="ignore"):
        grown = correlation.growth(steps).max()
    if not grown <= MOST_GROWTH:
        raise ValueError(
            f"{correlation!r} has no bounded inverse over {steps} steps: its noise would grow to more than "
            f"{MOST_GROWTH:,.0f} times that of independent steps, where rounding leaves no fresh noise; take "
            "coefficients that fall, such as [1.0, 0.5, 0.375]"
        )


def _row(
    bands: int, loader: LogicalBatches, steps: int, target_epsilon: float, target_delta: float, before: Sequence[Event]
) -> BandsRow:
    """One number of bands, see `chosen_correlation`."""
    scheme = loader.scheme
    setting = accounting.Setting(loader.sample_rate, loader.sampling, scheme.relation, bands=bands)
    sigma = accounting.noise_for(
        lambda noise: [*before, replace(setting.event(noise, steps), unit=scheme.unit)],
        target_epsilon=target_epsilon,
        delta=target_delta,
    )
    return BandsRow(bands, sigma, BandedToeplitz(bands=bands).error(steps))
