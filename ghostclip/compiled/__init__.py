"""Compiled steps: forward, passes and clipped sums of a physical batch, noise and update, as inductor graphs."""

from ghostclip.clipper.clipper import register_compiler
from ghostclip.compiled.clip import CompiledClip, GraphPlan
from ghostclip.compiled.update import NOT_YET, Update, UpdateReader
from ghostclip.compiled.whole import CompiledStep

__all__ = ["NOT_YET", "CompiledClip", "CompiledStep", "GraphPlan", "Update", "UpdateReader"]

register_compiler(CompiledClip)
