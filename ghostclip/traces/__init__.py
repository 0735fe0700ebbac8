"""What steps of an engine looked like without noise, for debugging: observed, written to a folder, and read back."""

from ghostclip.traces.folder import BY_GROUP, BY_STEP, PRIVATE, TracedStep, TraceFolder, read
from ghostclip.traces.steps import StepTrace

__all__ = ["BY_GROUP", "BY_STEP", "PRIVATE", "StepTrace", "TraceFolder", "TracedStep", "read"]
