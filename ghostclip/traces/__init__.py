"""What a trace of an engine's steps holds, and how it is read back; `PrivacyEngine.trace` writes it."""

from ghostclip.traces.folder import BY_GROUP, BY_STEP, PRIVATE, TracedStep, TraceFolder, read

__all__ = ["BY_GROUP", "BY_STEP", "PRIVATE", "TraceFolder", "TracedStep", "read"]
