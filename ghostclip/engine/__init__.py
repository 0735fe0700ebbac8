"""Private training: the pieces put together around the user's own optimizer."""

from .privacy_engine import PrivacyEngine, StepRecord

__all__ = ["PrivacyEngine", "StepRecord"]
