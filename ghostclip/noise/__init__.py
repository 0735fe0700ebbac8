"""Gaussian noise for a release: where the random numbers come from, how they get into the clipped sums.

And how the noise of one step depends on that of the steps before, where it does: `BandedToeplitz`, `BufferedToeplitz`.
"""

from __future__ import annotations

from ghostclip.noise.banded import BandedToeplitz
from ghostclip.noise.buffered import BufferedToeplitz
from ghostclip.noise.correlation import Correlation
from ghostclip.noise.hardened import HardenedNoise
from ghostclip.noise.release import Noise
from ghostclip.noise.standard import StandardNoise
from ghostclip.validate import one_of, whole

__all__ = ["MODES", "BandedToeplitz", "BufferedToeplitz", "Correlation", "Noise", "noise_source"]

MODES = ("standard", "hardened", "test")


def noise_source(mode: str = "standard", seed: int | None = None) -> Noise:
    """The source of noise for a mode's name.

    Args:
        mode: "standard": a generator on each device, its state filled from the operating system's entropy;
            "hardened": a cipher's key stream, and sums on a lattice, exact to the last digit;
            "test": repeatable noise from ``seed``, which protects nobody and is charged as epsilon = inf.
        seed: a whole number, with "test" only.

    Raises:
        ValueError: an unknown mode; a seed without "test", or "test" without one.
    """
    one_of(MODES, noise=mode)
    if mode == "test" and seed is None:
        raise ValueError('noise="test" needs a seed: pass seed=..., a whole number')
    if mode != "test" and seed is not None:
        raise ValueError(
            f'seed={seed!r} would make the noise predictable, so noise="{mode}" takes none; leave it out, or use '
            'noise="test", which reports epsilon = inf'
        )
    if mode == "hardened":
        return HardenedNoise()
    if seed is not None and whole(seed=seed) >= 2**63:
        raise ValueError(f"seed must be below 2**63; got {seed!r}")
    return StandardNoise(None if seed is None else whole(seed=seed))
