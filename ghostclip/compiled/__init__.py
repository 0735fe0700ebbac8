"""Compiled steps: forward, passes and clipped sums of a physical batch, noise and update, as inductor graphs."""

from ghostclip.clipper.clipper import register_compiler
from ghostclip.compiled.clip import CompiledClip
from ghostclip.compiled.release import CompiledRelease, ReleaseGraph
from ghostclip.compiled.update import NOT_YET, Update, UpdateReader
from ghostclip.compiled.whole import CompiledStep, WholeStep

__all__ = [
    "NOT_YET",
    "CompiledClip",
    "CompiledRelease",
    "CompiledStep",
    "ReleaseGraph",
    "Update",
    "UpdateReader",
    "WholeStep",
]

register_compiler(CompiledClip)
