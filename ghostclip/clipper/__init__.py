"""Clipping: norms by a first pass, weights, and the clipped sum by a second (Lee & Kifer 2020, algorithm 1)."""

from .clipper import ClippingResult, GhostClipper
from .one_call import per_example_norms

__all__ = ["ClippingResult", "GhostClipper", "per_example_norms"]
