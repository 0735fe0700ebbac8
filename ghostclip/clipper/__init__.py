"""Clipping: norms by a first pass, weights, and the clipped sum by a second (Lee & Kifer 2020, algorithm 1)."""

from .clipper import ClippingResult, GhostClipper

__all__ = ["ClippingResult", "GhostClipper"]
