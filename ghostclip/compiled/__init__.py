"""Compiled steps: forward, passes, weights and clipped sums of a physical batch as one inductor graph."""

from ghostclip.compiled.clip import CompiledClip

__all__ = ["CompiledClip"]
