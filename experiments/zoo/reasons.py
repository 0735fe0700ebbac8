"""Why the slowest models are slow, found by profiling; by name."""

__all__ = ["REASONS"]

REASONS: dict[str, str] = {}
