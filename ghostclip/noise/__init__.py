"""Gaussian noise for a release: where the random numbers come from, and how they get into the clipped sums."""

from ghostclip.noise.release import Noise
from ghostclip.noise.source import MODES, noise_source

__all__ = ["MODES", "Noise", "noise_source"]
