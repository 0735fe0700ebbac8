"""Compiled passes: forward, both passes and clipped sums of a physical batch as one inductor graph."""

from ghostclip.clipper.clipper import register_compiler
from ghostclip.compiled.clip import CompiledClip

__all__ = ["CompiledClip"]

register_compiler(CompiledClip)
