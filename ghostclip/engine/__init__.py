"""Private training: the pieces put together around the user's own optimizer."""

from .privacy_engine import PrivacyEngine
from .snapshots import Restored
from .step import StepRecord

__all__ = ["PrivacyEngine", "Restored", "StepRecord"]
